"""The pool benchmark compares like with like: pools and single drafters within one budget of nodes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from cospec.core.stats import RequestStats

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
    (row,) = pool.ratios_to_trees({(name, "mixed", 0.0): runs(count) for name, count in accepted.items()})
    assert (row["combiner"], row["workload"], row["of"]) == ("fuse", "mixed", "code")
    assert row["best tree"] == pytest.approx((2.0, 2.0, 2.0))
    assert pool.ratios_to_trees({("fuse hedge", "mixed", 0.0): runs(50)}) == []


def test_the_page_shows_them_with_their_intervals(pool: ModuleType) -> None:
    stored = json.loads((ROOT / "benchmarks" / "results" / "pool.json").read_text(encoding="utf-8"))
    rows = [
        {"combiner": "fuse", "workload": workload, "temperature": 0.0, "of": "code", "best tree": [1.25, 1.125, 1.5]}
        for workload in ("code", "mixed")
    ]
    table = "\n".join(importlib.import_module("benchmarks.pool_tables").pool(stored | {"same_nodes": rows}))
    assert "| fuse | 0 | 1.25 (1.12 to 1.50) | 1.25 (1.12 to 1.50) |" in table
    text = importlib.import_module("benchmarks.papers.cosine").over_tree({"same_nodes": rows})
    assert text == "acceptance length 1.25× (1.12 to 1.50) of code"
    some = [{key: value for key, value in row.items() if key != "all"} for row in stored["hedge"]]
    assert " /  / " in "\n".join(importlib.import_module("benchmarks.pool_tables").pool(stored | {"hedge": some}))
