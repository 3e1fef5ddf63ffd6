"""Runs a drafter in a process of its own, and replaces a process that dies or hangs.

Life of the process: started with the engine ──ready──► serves commands in order ──► dies, hangs or raises: its drafts
are lost, sequences go on without drafts, and a new process starts while the engine goes on. The new drafter knows
nothing, and reads what it needs from the contexts it is given. After ``STARTS`` deaths in a row no process is started.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Collection
from typing import Any, ClassVar, Protocol

from cospec.core.interfaces import Clock
from cospec.core.plugin_base import Drafter
from cospec.errors import DrafterLost, ModelError
from cospec.runtime.codec import ProtocolError, encode_call
from cospec.runtime.drafter_proxy import DrafterProxy
from cospec.runtime.executor_base import DrafterExecutor, DrafterRecipe
from cospec.runtime.messages import (
    Commits,
    ContextEncoder,
    DrafterInfo,
    DrafterReady,
    DrafterReply,
    Drafts,
    Failed,
    Free,
    Propose,
    Score,
    Scores,
    Start,
    Weights,
)
from cospec.runtime.transport import Channel, ChannelClosed, ChildProcess

HUNG_SECONDS = 10.0  # after which a drafter that does not answer is taken for dead
STARTS = 4  # in a row, none of which served for long
PROVEN = 256  # answers after which a process counts as one that works

WORKER = "cospec.runtime.drafter_worker"

log = logging.getLogger(__name__)

Build = Callable[[], Drafter]


class Worker(Protocol):
    """A place where a drafter runs. ``ChildProcess`` is one; a node of a cluster is another."""

    @property
    def stream(self) -> socket.socket:
        """A connected stream socket."""

    @property
    def pid(self) -> int: ...
    def kill(self) -> None:
        """End the process by force."""

    def ending(self) -> str:
        """How the process ended, as the predicate of a sentence."""

    def close(self) -> None:
        """Close the connection and end the process."""


Launch = Callable[[str], Worker]
"""Starts a worker that builds its drafter by the function of that name."""


class ProcessFuture:
    """An answer on its way from the process."""

    def __init__(self, executor: ProcessExecutor) -> None:
        self.submitted = executor.clock()
        self._executor = executor
        self._settled = self._lost = False
        self._result: Any = None

    def set_result(self, result: Any) -> None:
        """The answer has come."""
        self._settled, self._result = True, result

    def set_lost(self) -> None:
        """The answer will not come."""
        self._settled = self._lost = True

    def done(self) -> bool:
        """Whether the answer is here, or lost."""
        if not self._settled:
            self._executor.attend(0.0)
        return self._settled

    def result(self, timeout: float | None = None) -> Any:
        """See ``submitted_step.Future``."""
        end = self._executor.clock() + (HUNG_SECONDS if timeout is None else timeout)
        while not self.done():
            left = end - self._executor.clock()
            if left <= 0 and timeout is not None:
                raise TimeoutError
            self._executor.attend(max(left, 0.1) if timeout is None else left)
        if self._lost:
            raise DrafterLost("The drafter's process ended before it answered.")
        return self._result


class ProcessExecutor(DrafterExecutor):
    """An ``interfaces.Executor``. Used by one thread, as an engine is.

    Attributes:
        info: the declared attributes of the drafter.
        weights: of a pool's drafters, as the process sent them last; empty for other drafters.

    Args:
        build: makes the drafter inside the process, see ``codec.encode_call``.
        cores: the processors of the process; empty for all.
        launch: starts a worker elsewhere; None starts a child process.

    Raises:
        ModelError: the drafter cannot be built; the sentence is the drafter's.
    """

    name: ClassVar[str] = "process"
    builds_inline: ClassVar[bool] = False
    takes_cores: ClassVar[bool] = True
    parallel = True

    def __init__(
        self,
        build: Build,
        cores: Collection[int] = (),
        clock: Clock = time.monotonic,
        launch: Launch | None = None,
    ) -> None:
        self.clock, self.busy = clock, 0.0
        self._name, arguments = encode_call(build)
        self._message = Start(arguments)
        self._launch = launch or (lambda name: ChildProcess(WORKER, [name, *map(str, sorted(cores))]))
        self._futures: dict[int, ProcessFuture] = {}
        self._number = self._starts = self._answers = 0
        self._before = 0.0  # seconds that earlier processes worked
        self._start()
        self.info = self._built()
        self.weights: dict[str, float] = self.info.weights

    @classmethod
    def place(cls, recipe: DrafterRecipe) -> Drafter:
        """Start a process that builds the drafter."""
        return DrafterProxy(cls(recipe.elsewhere, recipe.cores))

    @property
    def present(self) -> bool:
        """Whether the process is there and its drafter is built, as far as is known here."""
        return self._ready

    @property
    def load(self) -> float:
        """Calls that wait for an answer."""
        return float(len(self._futures))

    @property
    def pid(self) -> int:
        """Of the present process, or of the last one."""
        return self._worker.pid

    def submit(self, method: str, *args: Any) -> ProcessFuture:
        """Send a call; ``commit`` and ``free`` count as done when they are sent."""
        future = ProcessFuture(self)
        self.attend(0.0)
        self._number += 1
        sent = self._ready and self._send(self._command(method, args))
        if method in ("commit", "free"):
            future.set_result(None)
        elif sent:
            self._futures[self._number] = future
        else:
            future.set_lost()
        return future

    def attend(self, seconds: float) -> None:
        """Take in what the process says within ``seconds``: the first message, and all that are there with it."""
        if self._channel.closed:
            return
        try:
            while (message := self._channel.receive(seconds)) is not None:
                self._take(message)
                seconds = 0.0
        except ChannelClosed:
            self._replace(self._worker.ending())
            return
        except ProtocolError as error:
            self._replace(f"cannot be understood ({error})")
            return
        oldest = next(iter(self._futures.values()), None)
        if oldest is not None and self.clock() - oldest.submitted > HUNG_SECONDS:
            self._replace(f"did not answer for {HUNG_SECONDS:.0f} s")

    def close(self) -> None:
        """End the process; what it has not answered is lost."""
        self._ready = False
        self._channel.close()
        self._worker.close()
        for future in self._futures.values():
            future.set_lost()
        self._futures.clear()

    def _start(self) -> None:
        """Start a process and send what it is to build; it says when that is done."""
        self._worker, self._ready, self._contexts = self._launch(self._name), False, ContextEncoder()
        self._starts, self._answers = self._starts + 1, 0
        self._channel = Channel(self._worker.stream, DrafterReply, HUNG_SECONDS)
        self._send(self._message)

    def _built(self) -> DrafterInfo:
        """Wait for the first process, whose failure ends the start of the engine."""
        try:
            message = self._channel.receive()
        except ChannelClosed:
            message = Failed(f"The drafter's process {self._worker.ending()} while it was started.")
        except ProtocolError as error:
            message = Failed(f"The drafter's process cannot be understood. {error}")
        if isinstance(message, DrafterReady):
            self._ready = True
            return message.info
        self.close()
        raise ModelError(message.message if isinstance(message, Failed) else "The drafter's process is out of order.")

    def _command(self, method: str, args: tuple[Any, ...]) -> Propose | Score | Commits | Free:
        match method:
            case "propose":
                contexts, budgets = args
                return Propose(self._number, [self._contexts.encode(context) for context in contexts], budgets)
            case "score_known_tokens":
                return Score(self._number, [self._contexts.encode(context) for context in args[0]])
            case "commit":
                return Commits(*args)
            case "free":
                self._contexts.free(*args)
                return Free(*args)
        raise ValueError(f"a drafter elsewhere has no method {method}")

    def _send(self, message: Any) -> bool:
        """Whether the message was sent; the next ``attend`` finds out how the process ended."""
        try:
            self._channel.send(message)
        except ChannelClosed:
            return False
        return True

    def _take(self, message: DrafterReply) -> None:
        match message:
            case DrafterReady(info):
                self._ready, self.weights = True, info.weights
                log.warning("the drafter is back, in process %d", self.pid)
            case Failed(sentence):
                log.warning("the drafter cannot be built again: %s", sentence)
            case Weights(weights):
                self.weights = weights
            case Drafts(number, answer, busy) | Scores(number, answer, busy):
                self.busy = self._before + busy
                self._answers += 1
                if self._answers == PROVEN:
                    self._starts = 1
                future = self._futures.pop(number, None)
                if future is not None:
                    future.set_result(answer)

    def _replace(self, cause: str) -> None:
        """Lose what the process was asked for, and start another process unless too many died already."""
        self._worker.kill()
        self.close()
        self._before = self.busy
        if self._starts < STARTS:
            log.warning("the drafter's process %s; another is started, and nothing is drafted until then", cause)
            self._start()
        else:
            log.warning("the drafter's process %s, as %d before it; nothing is drafted any more", cause, STARTS - 1)
