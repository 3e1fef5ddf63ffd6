"""Fixtures of the tests of the multi-step call."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.llamas import write_pair


@pytest.fixture
def no_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls run as many steps on a busy machine."""
    monkeypatch.setattr("cospec.native.multi_step.SECONDS", 1e9)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a small target and of a similar drafter."""
    found = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter")
    write_pair(*found)
    return found
