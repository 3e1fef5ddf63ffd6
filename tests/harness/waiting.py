"""Waiting for something that happens in another thread or process."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object], what: str = "the condition", seconds: float = 60.0) -> None:
    """Wait until ``condition`` holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} was never true"
        time.sleep(0.01)
