"""Fixtures of the tests of the multi-step call."""

from __future__ import annotations

import pytest


@pytest.fixture
def no_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls run as many steps on a busy machine."""
    monkeypatch.setattr("cospec.native.multi_step.SECONDS", 1e9)
