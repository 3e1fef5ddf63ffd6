"""The handle of a drafter in a process of its own.

Life of the process: started with the engine ──ready──► asked and told in order ──► dies, hangs or raises: its drafts
are lost, sequences go on without, and it is started anew beside the engine's rounds. The new one knows nothing, and
reads what it needs from the contexts it is given. One that dies again and again is not started any more.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Collection
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from cospec.core.interfaces import Clock
from cospec.errors import DrafterLost, ModelError
from cospec.runtime.drafter_worker import SILENT, Answer, Build, DrafterInfo, DrafterReady, Refused
from cospec.runtime.ipc import receive, send

HUNG_SECONDS = 10.0  # after which a drafter that does not answer is taken for dead
STARTS = 4  # in a row, none of which served for long
PROVEN = 256  # answers after which a process counts as one that works
END_SECONDS = 2.0  # for a process that is told to end

MAIN = "import sys; from cospec.runtime.drafter_worker import main; main(sys.argv[1:])"

log = logging.getLogger(__name__)


class ProcessFuture:
    """An answer on its way from the process."""

    def __init__(self, process: ProcessExecutor) -> None:
        self.asked_at = process.clock()
        self._process = process
        self._settled = self._lost = False
        self._result: Any = None

    def keep(self, result: Any) -> None:
        """Here it is."""
        self._settled, self._result = True, result

    def lose(self) -> None:
        """It will not come."""
        self._settled = self._lost = True

    def done(self) -> bool:
        """Whether it is here, or lost."""
        if not self._settled:
            self._process.attend(0.0)
        return self._settled

    def result(self, timeout: float | None = None) -> Any:
        """See ``protocols.Future``."""
        end = self._process.clock() + (HUNG_SECONDS if timeout is None else timeout)
        while not self.done():
            left = end - self._process.clock()
            if left <= 0 and timeout is not None:
                raise TimeoutError
            self._process.attend(max(left, 0.1))
        if self._lost:
            raise DrafterLost("The drafter's process ended before it answered.")
        return self._result


class ProcessExecutor:
    """A ``protocols.Executor``. Used by one thread, as an engine is.

    Attributes:
        weights: of a pool's drafters, as the process sent them last; empty for other drafters.

    Args:
        build: makes the drafter inside the process; must be picklable by reference.
        cores: the processors that it keeps to; empty for all.

    Raises:
        ModelError: the drafter cannot be built; the sentence is its own.
    """

    parallel = True

    def __init__(self, build: Build, cores: Collection[int] = (), clock: Clock = time.monotonic) -> None:
        self.clock, self.busy = clock, 0.0
        self._build, self._cores = build, [str(core) for core in sorted(cores)]
        self._promises: dict[int, ProcessFuture] = {}
        self._number = self._starts = self._answers = 0
        self._before = 0.0  # seconds that earlier processes worked
        self._start()
        self.traits = self._built()
        self.weights = self.traits.weights

    @property
    def present(self) -> bool:
        """Whether the process is there and its drafter is built, as far as was heard."""
        return self._ready

    @property
    def pid(self) -> int:
        """Of the process at present, or of the last one."""
        return self._process.pid

    def submit(self, method: str, *args: Any) -> ProcessFuture:
        """Send a call; ``commit`` and ``free`` count as done when they are sent."""
        promise = ProcessFuture(self)
        self.attend(0.0)
        self._number += 1
        sent = self._ready and self._send((self._number, method, args))
        if method in SILENT:
            promise.keep(None)
        elif sent:
            self._promises[self._number] = promise
        else:
            promise.lose()
        return promise

    def attend(self, seconds: float) -> None:
        """Take in what the process says within ``seconds``, the first message and all that are there with it."""
        if self._connection.closed:
            return
        try:
            while self._connection.poll(seconds):
                self._take(receive(self._connection))
                seconds = 0.0
        except (EOFError, OSError):
            self._bury(_epitaph(self._process))
            return
        oldest = next(iter(self._promises.values()), None)
        if oldest is not None and self.clock() - oldest.asked_at > HUNG_SECONDS:
            self._bury(f"did not answer for {HUNG_SECONDS:.0f} s")

    def close(self) -> None:
        """End the process."""
        self._ready = False
        self._finalizer()

    def _start(self) -> None:
        """Start a process and tell it what to build; it says when that is done."""
        ours, theirs = Pipe()
        command = [sys.executable, "-P", "-c", MAIN, str(theirs.fileno()), *self._cores]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with theirs:
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        self._connection, self._ready = ours, False
        self._finalizer = weakref.finalize(self, _end, self._process, ours)
        self._starts, self._answers = self._starts + 1, 0
        self._send(self._build)

    def _built(self) -> DrafterInfo:
        """Wait for the first process, whose failure is the user's to know."""
        try:
            message = receive(self._connection)
        except (EOFError, OSError):
            message = Refused(f"The drafter's process {_epitaph(self._process)} while it was started.")
        if isinstance(message, Refused):
            self.close()
            raise ModelError(message.sentence)
        self._ready = True
        traits: DrafterInfo = message.traits
        return traits

    def _send(self, message: Any) -> bool:
        """Whether the process could be told; how it ended is heard when it is next attended to."""
        try:
            send(self._connection, message)
        except OSError:
            return False
        return True

    def _take(self, message: DrafterReady | Refused | Answer) -> None:
        match message:
            case DrafterReady(traits):
                self._ready, self.weights = True, traits.weights
                log.warning("the drafter is back, in process %d", self.pid)
            case Refused(sentence):
                log.warning("the drafter cannot be built again: %s", sentence)
            case Answer(number, result, busy, weights):
                self.weights = self.weights if weights is None else weights
                self.busy = self._before + busy
                self._answers += 1
                if self._answers == PROVEN:
                    self._starts = 1
                self._promises.pop(number).keep(result)

    def _bury(self, cause: str) -> None:
        """Lose what the process was asked for, and start another unless too many died already."""
        self._process.kill()
        self.close()
        for promise in self._promises.values():
            promise.lose()
        self._promises.clear()
        self._before = self.busy
        if self._starts < STARTS:
            log.warning("the drafter's process %s; another is started, and nothing is drafted until then", cause)
            self._start()
        else:
            log.warning("the drafter's process %s, as %d before it; nothing is drafted any more", cause, STARTS - 1)


def _epitaph(process: subprocess.Popen[bytes]) -> str:
    """How a process ended that has closed its connection."""
    try:
        code = process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        return "closed its connection"
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    """A process whose connection is closed ends by itself, unless it cannot."""
    connection.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
