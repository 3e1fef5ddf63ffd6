"""What runs in a process that a drafter has for itself; ``rounds.process`` starts it and speaks to it.

It ends when its connection is closed or the engine's process is gone, whatever it does at the time, so that nothing is
left behind by an engine that was killed. An error in the drafter ends it too, with its traceback: nobody can tell what
state a drafter is in that raised.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from cospec.core.plugins import Drafter
from cospec.core.rng import StreamKind
from cospec.core.types import DrafterCapabilities
from cospec.errors import CospecError
from cospec.process_utils import freeze_gc
from cospec.runtime.affinity import keep_to
from cospec.runtime.ipc import receive, send

LOOK_SECONDS = 1.0  # how often a process that nobody speaks to looks whether the engine is there
WEIGHTS_SECONDS = 0.2  # between two times that a pool's weights are sent along
SILENT = ("commit", "free")  # what has no answer

Build = Callable[[], Drafter]
DrafterCall = tuple[int, str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """What a drafter says of itself, for those who only hear of it."""

    name: str
    samples: bool
    drafts_ahead: bool
    reads_states: bool
    learns: bool
    capabilities: DrafterCapabilities
    stream_kinds: frozenset[StreamKind] | None
    names: tuple[str, ...] | None
    weights: Mapping[str, float]  # at the start

    @classmethod
    def of(cls, drafter: Drafter) -> DrafterInfo:
        return cls(
            drafter.name,
            drafter.samples,
            drafter.drafts_ahead,
            drafter.reads_states,
            drafter.learns,
            drafter.capabilities,
            drafter.stream_kinds,
            drafter.names,
            drafter.weights(),
        )


@dataclass(frozen=True, slots=True)
class DrafterReady:
    """The drafter is built."""

    traits: DrafterInfo


@dataclass(frozen=True, slots=True)
class Refused:
    """It cannot be built; one sentence for the user."""

    sentence: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What the call of that number gave, and how many seconds the drafter has worked so far.

    Attributes:
        weights: of a pool's drafters, from time to time; None: those sent before still hold.
    """

    number: int
    result: Any
    busy: float
    weights: Mapping[str, float] | None = None


def main(arguments: list[str]) -> None:
    """Build the drafter that is asked for first, then do what is asked for, one thing at a time.

    Args:
        arguments: the connection's file descriptor, then the processors to keep to; none for all.
    """
    # Signals go to the whole group of a terminal or a container; the engine decides when its drafter ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.excepthook = _end_at_once
    connection, cores = Connection(int(arguments[0])), {int(core) for core in arguments[1:]}
    if cores:
        keep_to(cores)
    calls: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_listen, args=(connection, calls, os.getppid()), daemon=True).start()
    build: Build = calls.get()
    try:
        drafter = build()
    except CospecError as error:
        send(connection, Refused(str(error)))
        return
    freeze_gc()
    send(connection, DrafterReady(DrafterInfo.of(drafter)))
    _serve(drafter, calls, connection)


def _serve(drafter: Drafter, calls: SimpleQueue[DrafterCall], connection: Connection) -> None:
    busy, due = 0.0, 0.0
    while True:
        number, method, arguments = calls.get()
        started = time.monotonic()
        result = getattr(drafter, method)(*arguments)
        ended = time.monotonic()
        busy += ended - started
        if method not in SILENT:
            weights = drafter.weights() if drafter.names is not None and ended >= due else None
            due = ended + WEIGHTS_SECONDS if weights is not None else due
            send(connection, Answer(number, result, busy, weights))


def _end_at_once(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The engine is waiting, and libraries take their time to go."""
    sys.__excepthook__(kind, error, trace)
    os._exit(1)


def _listen(connection: Connection, calls: SimpleQueue[Any], parent: int) -> None:
    """Take in calls at once, so that the engine never waits for the drafter to hear it; end with the engine."""
    try:
        while True:
            while not connection.poll(LOOK_SECONDS):
                if os.getppid() != parent:
                    os._exit(0)
            calls.put(receive(connection))
    except (EOFError, OSError):
        os._exit(0)
