"""A stage on a processor that does not exist: each window takes a time that is given, and sleeps what is left of it.

A stage that sleeps uses no core, so a few cores can stand for many machines. ``benchmarks.dsd`` starts such stages.
"""

from __future__ import annotations

from cospec.distributed.stage_worker import run
from cospec.runtime.transport import inherited


def main(arguments: list[str]) -> None:
    """Serve an engine as ``cospec.distributed.stage_worker`` does.

    Args:
        arguments: the connection's file descriptor, seconds of a window, and the name of the plan's function.
    """
    descriptor, seconds, name = arguments
    run(inherited(descriptor), name, float(seconds))
