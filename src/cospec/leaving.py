"""How a process of ours ends: all clean-up is done, and what the system frees by itself is left to it."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def leaving_at_once() -> Iterator[None]:
    """Around all that a process does: it then ends without taking the interpreter's modules apart.

    With torch and its friends loaded that takes a second, and ten of them on a busy machine. What was begun inside is
    ended as ever: threads are joined, and whatever is registered with ``atexit`` inside runs before.
    """
    code = 1

    def leave() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                stream.flush()
        os._exit(code)

    atexit.register(leave)
    try:
        yield
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        raise
