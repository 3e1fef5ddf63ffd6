"""Which processors a process runs on, so that drafter and target can each have their own."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from cospec.errors import InvalidInput

FIELD = "speculative_config.drafter_cores"


def others(cores: Collection[int]) -> list[int]:
    """The processors of this process without ``cores``.

    Raises:
        InvalidInput: none is left, some of ``cores`` do not exist, or the system does not let one choose.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise InvalidInput(FIELD, list(cores), "absent, because this system does not let a process choose its cores")
    every = set(range(os.cpu_count() or 1))
    left = sorted(os.sched_getaffinity(0) - set(cores))
    if not set(cores) <= every or not left:
        allowed = f"some of {', '.join(map(str, sorted(every)))}, but not all: the target needs one too"
        raise InvalidInput(FIELD, list(cores), allowed)
    return left


def keep_to(cores: Collection[int]) -> None:
    """Run all threads of this process, and those that come, on ``cores`` only."""
    for task in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(task.name), cores)
