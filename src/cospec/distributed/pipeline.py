"""The engine's end of a sharded target: windows in, results out, several at a time, and a new start after a loss.

A lost or frozen process loses every window in flight and all KV caches. Then all futures raise ``VerifierLost``, and
the next submission starts new processes. The engine computes its requests again from their committed tokens.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future as Arrival
from concurrent.futures import InvalidStateError

import torch

from cospec.config import LinkConfig
from cospec.core.model_io import BatchOutput
from cospec.distributed.messages import Array, Moves, Window, WindowOutput
from cospec.distributed.stage_processes import StageProcesses
from cospec.errors import ModelError, VerifierEnded, VerifierLost
from cospec.models.stage import StageBatch
from cospec.runtime.codec import ProtocolError
from cospec.runtime.transport import ChannelClosed

STARTS = 4  # in a row, none of which served for long
PROVEN = 64  # windows after which the processes count as processes that work

log = logging.getLogger(__name__)


class WindowFuture:
    """A window on its way through the stages."""

    def __init__(self, pipeline: Pipeline, number: int, arrival: Arrival[BatchOutput]) -> None:
        self._pipeline, self._number, self._arrival = pipeline, number, arrival

    def done(self) -> bool:
        """Whether the result is here, or lost."""
        return self._arrival.done()

    def result(self, timeout: float | None = None) -> BatchOutput:
        """Return float32 logits and drawn tokens.

        Raises:
            VerifierLost: the processes are lost, or did not answer in time.
            RuntimeError: a stage could not compute the window.
        """
        try:
            return self._arrival.result(self._pipeline.patience if timeout is None else timeout)
        except TimeoutError:
            if timeout is not None or self._arrival.done():
                raise
            self._pipeline.lose(f"no stage answered for {self._pipeline.patience:g} s")
            return self._arrival.result()

    def cancel(self) -> None:
        """Let the stages that the window has not reached pass it on without computing."""
        self._pipeline.cancel(self._number)


class Pipeline:
    """The processes of a target, started again when they are lost. Used by one thread, as an engine is.

    Args:
        start: starts the processes; raises ``ModelError`` or ``VerifierLost``.
        patience: seconds after which a window without an answer counts as lost.

    Attributes:
        starts: how often the processes were started.
    """

    def __init__(self, start: Callable[[], StageProcesses], patience: float) -> None:
        self._start, self.patience = start, patience
        self._lock = threading.Lock()
        self._pending: dict[int, Arrival[BatchOutput]] = {}
        self._number = self._unproven = 0
        self.starts = 0
        self._refusal: VerifierEnded | None = None
        self._running: StageProcesses | None = None
        self._restart()

    @property
    def pids(self) -> list[int]:
        """Of the running processes, stage by stage; empty after a loss."""
        running = self._running
        return [] if running is None else running.pids

    @property
    def result_bytes(self) -> int:
        """Bytes that the last stage of the running processes has sent, as they pass the wire."""
        running = self._running
        return 0 if running is None else running.results.received

    def submit(self, batch: StageBatch, moves: Moves, draws: Array | None = None) -> WindowFuture:
        """Send a window. After a loss this starts the processes again, whose KV caches are empty.

        Raises:
            VerifierLost: the processes are lost.
            VerifierEnded: the processes are lost and cannot be started again.
        """
        running = self._running or self._restart()
        number, arrival = self._number, Arrival[BatchOutput]()
        self._number += 1
        with self._lock:
            self._pending[number] = arrival
        try:
            running.windows.send(Window.of(number, batch, moves, draws))
        except ChannelClosed:
            self.lose(running.endings())
        return WindowFuture(self, number, arrival)

    def cancel(self, number: int) -> None:
        """Drop the result of a window, see ``WindowFuture.cancel``."""
        with self._lock:
            running, arrival = self._running, self._pending.pop(number, None)
        if running is not None and arrival is not None:
            try:
                running.cancel(number)
            except ChannelClosed:
                self.lose(running.endings())

    def set_links(self, links: Sequence[LinkConfig]) -> None:
        """Change the delays that are added to links, see ``EngineConfig.stage_links``; no window is in flight."""
        if self._running is not None:
            self._running.set_links(links)

    def lose(self, cause: str) -> None:
        """End the processes; windows in flight are lost."""
        with self._lock:
            running, self._running = self._running, None
            lost, self._pending = self._pending, {}
        for arrival in lost.values():
            _settle(arrival, VerifierLost(f"The target's processes are lost: {cause}."))
        if running is not None:
            log.warning("the target's processes are lost: %s; %d windows are computed again", cause, len(lost))
            running.kill()

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            running.close()

    def _restart(self) -> StageProcesses:
        running = None
        while running is None:  # a process that dies during the start is no request's failure
            running = self._try_start()
        if self.starts:
            log.warning("the target's processes are back; requests are computed again from their tokens")
        self.starts += 1
        self._running = running
        threading.Thread(target=self._receive, args=(running,), daemon=True).start()
        return running

    def _try_start(self) -> StageProcesses | None:
        """Start the processes; None where one died meanwhile, and another start is allowed."""
        if self._refusal is not None:
            raise self._refusal
        if self._unproven >= STARTS:
            raise VerifierEnded(f"The target's processes were lost {STARTS} times in a row, and are not started again.")
        self._unproven += 1
        try:
            return self._start()
        except ModelError as error:
            if not self.starts:
                raise
            self._refusal = VerifierEnded(f"The target's processes cannot be started again: {error}")
            raise self._refusal from error
        except VerifierLost as error:
            if not self.starts:
                raise
            log.warning("%s", error)
            return None

    def _receive(self, running: StageProcesses) -> None:
        """Take results in until the connection ends, so that the last stage never waits for the engine."""
        try:
            while True:
                self._take(running.results.receive())
        except (ChannelClosed, ProtocolError, ValueError, OSError):
            if self._running is running:
                self.lose(running.endings())

    def _take(self, message: WindowOutput) -> None:
        with self._lock:
            arrival = self._pending.pop(message.number, None)
            self._unproven = 1 if message.number % PROVEN == PROVEN - 1 else self._unproven
        if arrival is None:
            return
        if message.error is not None:
            _settle(arrival, RuntimeError(message.error))
            return
        logits = torch.empty(0, 0) if message.logits is None else torch.from_numpy(message.logits.copy())
        arrival.set_result(BatchOutput(logits, () if message.tokens is None else message.tokens.tolist()))


def _settle(arrival: Arrival[BatchOutput], error: Exception) -> None:
    with contextlib.suppress(InvalidStateError):  # the result came first
        arrival.set_exception(error)
