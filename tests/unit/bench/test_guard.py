"""The guard of deterministic costs: repeatable, and it fails when something is done more often."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cospec.drafters.model import ModelDrafter
from cospec.models.toy import ToyModel

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def guard() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cospec_guard", ROOT / "benchmarks" / "guard.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def found(guard: ModuleType) -> dict[str, Any]:
    costs: dict[str, Any] = guard.measure()
    return costs


def test_same_code_same_costs(guard: ModuleType, found: dict[str, Any]) -> None:
    assert guard.measure() == found
    assert guard.regressions(found, found) == []


def test_stored_file_has_every_cost(guard: ModuleType, found: dict[str, Any]) -> None:
    stored = json.loads(guard.STORED.read_text(encoding="utf-8"))
    assert {name: set(costs) for name, costs in stored.items()} == {name: set(costs) for name, costs in found.items()}


def test_only_a_tree_moves_cache_entries(found: dict[str, Any]) -> None:
    assert found["chain, cache"]["tensor_operations_per_commit"] == 0
    assert found["tree, cache"]["tensor_operations_per_commit"] > 0


def test_second_target_forward(guard: ModuleType, found: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    forward = ToyModel.forward

    def twice(self: ToyModel, batch: Any) -> Any:
        forward(self, batch)
        return forward(self, batch)

    monkeypatch.setattr(ToyModel, "forward", twice)
    complaints = guard.regressions(guard.measure(), found)
    assert any(text.startswith("plain: target_forwards_per_round rose from 1 to 2") for text in complaints)


def test_second_proposal(guard: ModuleType, found: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that proposes twice a round and drops the first draft costs drafter forwards and nothing else."""
    propose = ModelDrafter.propose

    def twice(self: ModelDrafter, contexts: Any, budgets: Any) -> Any:
        propose(self, contexts, budgets)
        return propose(self, contexts, budgets)

    monkeypatch.setattr(ModelDrafter, "propose", twice)
    mutated = guard.measure()
    complaints = guard.regressions(mutated, found)
    assert any(text.startswith("draft_model, greedy: drafter_forwards_per_round") for text in complaints)
    assert all("target_" not in text for text in complaints)
    assert mutated["plain"] == found["plain"]


def test_less_accepted(guard: ModuleType, found: dict[str, Any]) -> None:
    worse = {name: dict(costs) for name, costs in found.items()}
    worse["ngram, greedy"]["target_forwards_per_token"] *= 1.01
    (complaint,) = guard.regressions(worse, found)
    assert complaint.startswith("ngram, greedy: target_forwards_per_token")
