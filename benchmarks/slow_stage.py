"""A stage on a processor that does not exist: each window takes a time that is given, and sleeps what is left of it.

A stage that sleeps uses no core, so a few cores can stand for many machines. ``benchmarks.dsd`` and
``benchmarks.slow_target`` start such stages.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from cospec.distributed.messages import Window
from cospec.distributed.stage_worker import run
from cospec.models.shard import Shard
from cospec.runtime.drafter_process_executor import Worker
from cospec.runtime.transport import ChildProcess, inherited

BUSY, SKIPPED = range(2)  # seconds of computed windows, and windows that the stage need not compute


class Pace(NamedTuple):
    """What a window takes in one stage.

    Attributes:
        seconds: of a window without tokens.
        per_token: seconds more for each token.
        counts: path of float64 ``[stages, 2]``, in which each stage counts; empty for none.
    """

    seconds: float
    per_token: float = 0.0
    counts: str = ""


def launch(pace: Pace, name: str, shard: Shard, before: Sequence[str] = ()) -> Worker:
    """Start the process of a stage, see ``stage_processes.Launch``; ``before``: see ``ChildProcess``."""
    return ChildProcess(__name__, [*map(str, pace), str(shard.stage), name], before=before)


class SlowStage:
    """Makes the windows of one stage slow, and counts windows."""

    def __init__(self, pace: Pace, stage: int) -> None:
        self._pace = pace
        counts = np.memmap(pace.counts, np.float64, "r+").reshape(-1, 2)[stage] if pace.counts else None
        self._counts = np.zeros(2) if counts is None else counts

    @contextmanager
    def window(self, window: Window) -> Iterator[None]:
        """See ``stage_worker.Surround``."""
        started = time.monotonic()
        yield
        if window.error is not None:
            self._counts[SKIPPED] += 1
            return
        due = started + self._pace.seconds + self._pace.per_token * len(window.ids)
        time.sleep(max(0.0, due - time.monotonic()))
        self._counts[BUSY] += time.monotonic() - started


def main(arguments: list[str]) -> None:
    """Serve an engine as ``cospec.distributed.stage_worker`` does.

    Args:
        arguments: the connection's file descriptor, the fields of ``Pace``, the stage, and the name of the plan's
            function.
    """
    descriptor, seconds, per_token, counts, stage, name = arguments
    slow = SlowStage(Pace(float(seconds), float(per_token), counts), int(stage))
    run(inherited(descriptor), name, slow.window)
