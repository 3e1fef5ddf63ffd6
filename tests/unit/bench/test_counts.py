"""The limits on what a reader of the code meets, and that a count finds what it counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.counts import SMALL, SMALL_MODULES, private_uses, static

ROOT = Path(__file__).parents[3]
WORDS = 15_000


@pytest.fixture(scope="module")
def counts() -> dict[str, int]:
    return static(ROOT)


@pytest.mark.parametrize(
    ("count", "most"),
    [
        ("class names defined twice", 0),
        ("private attributes in tests", 0),
        (f"modules under {SMALL} lines that are no plug-in", SMALL_MODULES),
        ("words of docs, reference apart", WORDS),
    ],
)
def test_counts_keep_their_limits(counts: dict[str, int], count: str, most: int) -> None:
    assert 0 <= counts[count] <= most


def test_a_private_attribute_of_another_object_is_found(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test(self):\n    self._own()\n    other._secret = 1\n")
    assert private_uses(tmp_path) == 1
