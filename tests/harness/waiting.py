"""Waiting for something that happens in another thread or process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")

LEAST_PAUSE, MOST_PAUSE = 0.01, 0.2  # seconds between two looks
LOOK_SHARE = 4  # a pause is this many times as long as the look, so that looking leaves the processors to others


def until(condition: Callable[[], Found], what: str = "the condition", seconds: float = 60.0) -> Found:
    """Wait until ``condition`` returns what is true, and return it."""
    end = time.monotonic() + seconds
    while True:
        began = time.monotonic()
        if found := condition():
            return found
        now = time.monotonic()
        assert now < end, f"{what} was never true"
        time.sleep(min(max(LEAST_PAUSE, LOOK_SHARE * (now - began)), MOST_PAUSE))
