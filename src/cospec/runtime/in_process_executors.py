"""Executors in the engine's process: in the thread of the engine, or in a thread of the drafter."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from cospec.core.interfaces import Clock, Executor
from cospec.core.plugin_base import Drafter
from cospec.errors import DrafterLost
from cospec.runtime.drafter_proxy import DrafterProxy
from cospec.runtime.executor_base import DrafterExecutor, DrafterRecipe
from cospec.runtime.messages import DrafterInfo

if TYPE_CHECKING:
    import torch

CLOSED = "The drafter's executor is closed."


class InlineExecutor(DrafterExecutor):
    """Makes each call at once, in the thread that submits the call."""

    name: ClassVar[str] = "inline"
    builds_inline: ClassVar[bool] = True
    takes_cores: ClassVar[bool] = False
    parallel = False

    def __init__(self, drafter: Drafter, clock: Clock = time.monotonic) -> None:
        self.busy, self._present = 0.0, True
        self._drafter, self._clock = drafter, clock

    @classmethod
    def place(cls, recipe: DrafterRecipe) -> Drafter:
        """The drafter itself, which its caller's thread calls."""
        return recipe.build()

    @classmethod
    def overlap(cls, drafter: Drafter, device: torch.device) -> Executor | None:
        """None: the engine's thread drafts."""
        return None

    @property
    def present(self) -> bool:
        """Whether the executor is open."""
        return self._present

    @property
    def load(self) -> float:
        """0: every call is answered at once."""
        return 0.0

    def submit(self, method: str, *args: Any) -> Future[Any]:
        """Make the call; the future is done when this returns."""
        future: Future[Any] = Future()
        if not self.present:
            future.set_exception(DrafterLost(CLOSED))
            return future
        started = self._clock()
        try:
            future.set_result(getattr(self._drafter, method)(*args))
        except Exception as error:
            future.set_exception(error)
        self.busy += self._clock() - started
        return future

    def close(self) -> None:
        """Take no more calls."""
        self._present = False


class ThreadExecutor(DrafterExecutor):
    """Makes calls in one thread of its own, which starts with the first call.

    Args:
        parallel: overlapping is worth a try, because the drafter works elsewhere or in a CUDA stream.
        around: entered around every call in the thread, such as a CUDA stream.

    Attributes:
        info: the declared attributes of the drafter.
    """

    name: ClassVar[str] = "thread"
    builds_inline: ClassVar[bool] = True
    takes_cores: ClassVar[bool] = False

    def __init__(
        self,
        drafter: Drafter,
        clock: Clock = time.monotonic,
        parallel: bool = False,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.parallel, self.busy, self._present = parallel, 0.0, True
        self._drafter, self._clock, self._around = drafter, clock, around
        self._thread = ThreadPoolExecutor(1, "cospec-drafter")
        self._waiting: set[Future[Any]] = set()
        self._proposals: set[Future[Any]] = set()  # those of the waiting calls
        self.info = DrafterInfo.of(drafter)

    @classmethod
    def place(cls, recipe: DrafterRecipe) -> Drafter:
        """Build the drafter in this thread, and run its calls in a new thread."""
        return DrafterProxy(cls.of(recipe.build(), recipe.device))

    @classmethod
    def overlap(cls, drafter: Drafter, device: torch.device) -> Executor | None:
        """A new thread for a drafter that was built in the engine's thread."""
        return cls.of(drafter, device) if drafter.executor is None else drafter.executor

    @classmethod
    def of(cls, drafter: Drafter, device: torch.device) -> ThreadExecutor:
        """A thread for ``drafter``. On CUDA the thread's work goes into a stream of its own and need not wait for the
        target's work. A drafter that works elsewhere leaves the target its processors.
        """
        if device.type != "cuda":
            return cls(drafter, parallel=drafter.works_elsewhere)
        import torch

        return cls(drafter, parallel=True, around=partial(torch.cuda.stream, torch.cuda.Stream(device)))

    @property
    def present(self) -> bool:
        """Whether the executor is open."""
        return self._present

    @property
    def load(self) -> float:
        """Proposals that wait for an answer."""
        return float(len(self._proposals))

    @property
    def weights(self) -> Mapping[str, float]:
        """The present weights of a pool's drafters; empty for other drafters."""
        return self._drafter.weights()

    def submit(self, method: str, *args: Any) -> Future[Any]:
        """Queue a call; calls are made one at a time in their order."""
        future: Future[Any] = Future()
        if not self.present:
            future.set_exception(DrafterLost(CLOSED))
            return future
        self._waiting.add(future)
        if method == "propose":
            self._proposals.add(future)
        self._thread.submit(self._call, future, method, args)
        return future

    def close(self) -> None:
        """Wait for the call at work; the calls after it are lost."""
        self._present = False
        self._thread.shutdown(cancel_futures=True)
        self._proposals.clear()
        while self._waiting:
            self._waiting.pop().set_exception(DrafterLost(CLOSED))

    def _call(self, future: Future[Any], method: str, args: tuple[Any, ...]) -> None:
        started = self._clock()
        try:
            with self._around():
                result = getattr(self._drafter, method)(*args)
        except BaseException as error:
            self._finish(future, started)
            future.set_exception(error)
        else:
            self._finish(future, started)
            future.set_result(result)

    def _finish(self, future: Future[Any], started: float) -> None:
        """Note the time before the answer, so that a reader of the answer finds the time too."""
        self.busy += self._clock() - started
        self._waiting.discard(future)
        self._proposals.discard(future)
