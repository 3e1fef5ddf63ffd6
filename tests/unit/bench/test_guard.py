"""The guard of deterministic costs: repeatable, and it fails when something is done more often."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cospec.engine.scheduler import Scheduler
from cospec.models.toy import ToyModel
from cospec.types import Plan

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


def test_the_same_code_costs_the_same(guard: ModuleType, found: dict[str, Any]) -> None:
    assert guard.measure() == found
    assert guard.regressions(found, found) == []


def test_the_stored_file_knows_every_cost(guard: ModuleType, found: dict[str, Any]) -> None:
    stored = json.loads(guard.STORED.read_text(encoding="utf-8"))
    assert {name: set(costs) for name, costs in stored.items()} == {name: set(costs) for name, costs in found.items()}


def test_a_chain_moves_nothing_and_a_tree_does(found: dict[str, Any]) -> None:
    assert found["chain, cache"]["tensor_operations_per_commit"] == 0
    assert found["tree, cache"]["tensor_operations_per_commit"] > 0


def test_a_second_forward_is_seen(guard: ModuleType, found: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    forward = ToyModel.forward

    def twice(self: ToyModel, batch: Any) -> Any:
        forward(self, batch)
        return forward(self, batch)

    monkeypatch.setattr(ToyModel, "forward", twice)
    complaints = guard.regressions(guard.measure(), found)
    assert any(text.startswith("plain: forwards_per_round rose from 1 to 2") for text in complaints)


def test_more_python_calls_are_seen(guard: ModuleType, found: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Scheduler.plan

    def wasteful(self: Scheduler) -> Plan:
        for _ in range(60):
            self._budgets()
        return plan(self)

    monkeypatch.setattr(Scheduler, "plan", wasteful)
    complaints = guard.regressions(guard.measure(), found)
    assert any("python_calls_per_round" in text for text in complaints)


def test_a_worse_drafter_is_seen(guard: ModuleType, found: dict[str, Any]) -> None:
    worse = {name: dict(costs) for name, costs in found.items()}
    worse["ngram, greedy"]["target_calls_per_token"] *= 1.01
    assert guard.regressions(worse, found) == [
        f"ngram, greedy: target_calls_per_token rose from {found['ngram, greedy']['target_calls_per_token']:g} "
        f"to {worse['ngram, greedy']['target_calls_per_token']:g}"
    ]
