"""Drafters that work somewhere else than the round: in its own thread, or in a thread of their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from cospec.core.interfaces import Clock
from cospec.core.plugins import Drafter


class InlineExecutor:
    """In the round's own thread, at once: the same calls in the same order, with nothing beside them."""

    parallel, present = False, True

    def __init__(self, drafter: Drafter, clock: Clock = time.monotonic) -> None:
        self.busy = 0.0
        self._drafter, self._clock = drafter, clock

    def submit(self, method: str, *args: Any) -> Future[Any]:
        """The result is there when this returns."""
        started = self._clock()
        future: Future[Any] = Future()
        try:
            future.set_result(getattr(self._drafter, method)(*args))
        except Exception as error:
            future.set_exception(error)
        self.busy += self._clock() - started
        return future

    def close(self) -> None:
        """There is nothing to end."""


class ThreadExecutor:
    """In one thread of its own, which starts with the first task.

    Args:
        parallel: overlapping is worth a try, since the drafter works on a device of its own or in a CUDA stream.
        around: entered around every call in the thread, such as a CUDA stream.
    """

    present = True

    def __init__(
        self,
        drafter: Drafter,
        clock: Clock = time.monotonic,
        parallel: bool = False,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.parallel, self.busy = parallel, 0.0
        self._drafter, self._clock, self._around = drafter, clock, around
        self._thread = ThreadPoolExecutor(1, "cospec-drafter")

    def submit(self, method: str, *args: Any) -> Future[Any]:
        """Queue a call; calls are made one at a time in their order."""
        return self._thread.submit(self._call, method, args)

    def close(self) -> None:
        """Wait for the call at work; those behind it are dropped."""
        self._thread.shutdown(cancel_futures=True)

    def _call(self, method: str, args: tuple[Any, ...]) -> Any:
        started = self._clock()
        try:
            with self._around():
                return getattr(self._drafter, method)(*args)
        finally:
            self.busy += self._clock() - started
