"""Cores of a process, while its threads come and go."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection

import pytest

from cospec.process_utils import keep_to


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="cores are chosen on Linux alone")
def test_a_thread_that_ends_meanwhile_keeps_no_other_from_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def ended(task: int, cores: Collection[int]) -> None:
        asked.append(task)
        raise ProcessLookupError

    monkeypatch.setattr(os, "sched_setaffinity", ended)
    keep_to([0])
    assert os.getpid() in asked
