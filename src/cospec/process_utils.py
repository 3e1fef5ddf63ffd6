"""Start and end of a long-lived process: freeze objects for garbage collection, exit without module teardown."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
from collections.abc import Iterator


def freeze_gc() -> None:
    """Exclude all existing objects from garbage collection.

    With torch and transformers loaded a full collection scans 400,000 objects: 0.16 s without a step. Use only in
    processes that serve until they end: frozen objects are never freed.
    """
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def fast_exit() -> Iterator[None]:
    """Exit at the end of the block without tearing down the interpreter's modules.

    With torch loaded the teardown takes one second, and ten seconds on a busy machine. The exit still joins threads and
    runs the ``atexit`` functions that were registered inside the block.
    """
    code = 1

    def leave() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # the reader may be gone
                stream.flush()
        os._exit(code)

    atexit.register(leave)
    try:
        yield
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        raise
