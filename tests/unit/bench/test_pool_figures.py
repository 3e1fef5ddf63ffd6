"""The pool benchmark compares like with like: pools and single drafters within one budget of nodes."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from cospec.stats import RequestStats

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.pool")


def test_every_drafter_alone_has_a_tree_of_as_many_nodes_as_a_pool(pool: ModuleType) -> None:
    found = pool.systems(("generic", "code"), 4, 8)
    for name in ("generic", "code"):
        assert (found[name]["max_nodes"], found[f"{name} tree"]["max_nodes"]) == (4, 8)
        assert found[name]["model"] == found[f"{name} tree"]["model"]
    assert found["copy"]["max_nodes"] == 4 and "copy tree" not in found
    for name, config in found.items():
        assert config["num_speculative_tokens"] == 4
        assert config["max_nodes"] == 8 or config["method"] != "pool", name


def test_pools_are_held_against_the_best_tree_in_hindsight(pool: ModuleType) -> None:
    def runs(accepted: int) -> object:
        found = pool.Runs()
        found.stats = [RequestStats(accepted=accepted, drafts=10, drafted=40)] * 4
        return found

    accepted = {
        "generic": 30,
        "generic tree": 10,
        "code tree": 20,
        "fuse hedge": 50,
        "fuse all": 60,
        "1: fuse hedge": 5,
    }
    (row,) = pool.beside_trees({(name, "mixed", 0.0): runs(count) for name, count in accepted.items()})
    assert (row["combiner"], row["workload"], row["of"]) == ("fuse", "mixed", "code")
    assert row["best tree"] == pytest.approx((2.0, 2.0, 2.0))
    assert pool.beside_trees({("fuse hedge", "mixed", 0.0): runs(50)}) == []
