"""The command that a benchmark stores with its figures."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest
from benchmarks.common import ROOT, command


@pytest.mark.parametrize(
    ("without", "found"),
    [
        ("", ["--target-ms", "100", "--only", "goodput", "no drafts", "--seed", "1"]),
        ("--only", ["--target-ms", "100", "--seed", "1"]),
        ("--modes", ["--target-ms", "100", "--only", "goodput", "no drafts", "--seed", "1"]),
    ],
)
def test_a_part_that_was_measured_again_is_stored_as_the_whole(
    without: str, found: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--target-ms", "100", "--only", "goodput", "no drafts", "--seed", "1"]
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks" / "cosine_online.py"), *given])
    start = ["python", "-m", "benchmarks.cosine_online"]
    assert command(without) == " ".join([*start, *(f"'{each}'" if " " in each else each for each in found)])
