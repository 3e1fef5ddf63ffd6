"""Fixtures of the tests of model files."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptions of model files are kept per test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
