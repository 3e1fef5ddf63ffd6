"""Scenario files: each mistake is named by key and value, and the shipped files can be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cospec.errors import InvalidInput
from cospec.plugin_options import parse
from cospec.simulation.run import simulate
from cospec.simulation.scenario import Scenario

ROOT = Path(__file__).resolve().parents[3]
SCENARIOS = ROOT / "examples" / "scenarios"
TARGET = {"cost": {"slopes": [1e-5], "fixed": 0.01}}
OFF = [{"name": "off", "policy": "off"}]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"seeds": 1}, "key seeds is 1"),
    ({"requests": "many"}, "requests is 'many'"),
    ({"requests": 0}, "requests is 0"),
    ({"target": "a100"}, "target is 'a100'"),
    ({"target": {}}, "target.cost is missing"),
    ({"target": {**TARGET, "replicas": 0}}, "target.replicas is 0"),
    ({"target": {"cost": {"fixed": -1}}}, "target.cost.fixed is -1"),
    ({"target": {"cost": {"knees": [8]}}}, "slopes is (0.0,)"),
    ({"target": {"cost": {"fixed": float("inf")}}}, "fixed is inf"),
    ({"target": {"cost": {"profile": "no.json"}}}, "profile is no.json ("),
    ({"drafting": {"kind": "medusa"}}, "drafting.kind is 'medusa'"),
    ({"domains": [{"acceptance": 1.2}]}, "domains[0].acceptance is 1.2"),
    ({"domains": [{"acceptance": [0.5, "x"]}]}, "domains[0].acceptance[1] is 'x'"),
    ({"domains": [{"trace": "no.txt"}]}, "trace is 'no.txt'"),
    ({"arrivals": {"kind": "poisson"}}, "arrivals.kind is 'poisson'"),
    ({"arrivals": {"rates": [0]}}, "arrivals.rates[0] is 0"),
    ({"arrivals": {"kind": "trace"}}, "arrivals is {'kind': 'trace'}"),
    ({"arrivals": {"kind": "trace", "trace": "no.txt"}}, "trace is 'no.txt'"),
    ({"variants": []}, "variants is []"),
    ({"variants": ["off"]}, "variants[0] is 'off'"),
    ({"variants": [{"name": "x", "policy": True}]}, "variants[0].policy is True"),
    (
        {"variants": [{"name": "x", "polcy": "off"}]},
        "key variants[0].polcy is 'off'; allowed is one of name, policy, num_speculative_tokens, ",
    ),
    (
        {"drafting": {"cost": {"slope": 1}}},
        "key drafting.cost.slope is 1; allowed is one of context, slopes, knees, sequence, fixed, start, profile, ",
    ),
    (
        {"variants": [{"name": "x", "policy": "fixed", "policy_options": {"nosuch": 1}}]},
        "key variants[0].policy_options.nosuch is 1; allowed is ",
    ),
    (
        {"recording": "r.npz", "drafting": {"combiner": "vote", "members": [{"name": "a"}]}},
        "drafting is {'combiner': 'vote', 'members': [{'name': 'a'}]}; allowed is kind 'recorded' with members, and ",
    ),
    (
        {"variants": [{"name": "x", "num_speculative_tokens": "some"}]},
        "variants[0].num_speculative_tokens is 'some'",
    ),
    ({"domains": [{"prompt": {"mean": 8, "least": 9, "most": 3}}]}, "domains[0].prompt is {'least': 9, "),
    ({"domains": [{"name": "a"}, {"name": "a"}]}, "domains.name is 'a'"),
    ({"variants": [*OFF, *OFF]}, "variants.name is 'off'"),
    (
        {"domains": [{"name": "a"}, {"name": "b"}], "variants": [{"name": "x", "acceptance": {"c": 0.5}}]},
        "acceptance of variant x is 'c'",
    ),
    ({"target": {"cost": {}}}, "target.cost is nothing"),
    (
        {"variants": [{"name": "x", "policy": "oracle", "policy_options": {"t_max": 1}}]},
        "variants[0].policy_options is {'t_max': 1}",
    ),
    (
        {"variants": [{"name": "x", "policy": "oracle", "num_speculative_tokens": -1}]},
        "variants[0].num_speculative_tokens is -1",
    ),
    (
        {"variants": [{"name": "x", "policy": "best"}]},
        "variants[0].policy is 'best'; allowed is one of fixed, off, goodput, slope, confidence, milp, auto, oracle, ",
    ),
    ({"variants": [{"name": "x", "execution_mode": "pipe"}]}, "variants[0].execution_mode is 'pipe'"),
]


@pytest.mark.parametrize(("changes", "sentence"), WRONG, ids=lambda value: str(value)[:50])
def test_mistakes_are_named(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        simulate(parse(Scenario, {"requests": 4, "target": TARGET, "variants": OFF, **changes}))
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_off_needs_no_quotes_in_yaml(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("target: {cost: {fixed: 0.01}}\nvariants: [{name: off, policy: off}]\n")
    (variant,) = Scenario.read(tmp_path / "s.yaml").variants
    assert (variant.name, variant.policy) == ("off", "off")


def test_lengths_of_less_than_a_token_are_one_token() -> None:
    domains = [{"prompt": {"mean": 0.2}, "output": {"mean": 0.2}}]
    (found,) = simulate(parse(Scenario, {"requests": 4, "target": TARGET, "variants": OFF, "domains": domains}))["runs"]
    assert found["requests"] == 4


def test_wide_tree_is_cut_at_max_nodes() -> None:
    variants = [{"name": "x", "policy": "fixed", "num_speculative_tokens": 64, "widths": [64] * 64, "max_nodes": 8}]
    domains = [{"output": {"mean": 8}}]
    given = {"requests": 2, "target": TARGET, "variants": variants, "domains": domains}
    (found,) = simulate(parse(Scenario, {**given, "drafting": {"kind": "heads"}}))["runs"]
    assert found["requests"] == 2


def test_failing_nodes_cost_drafts_only() -> None:
    runs = simulate(Scenario.read(SCENARIOS / "failing-nodes.yaml"), SCENARIOS)["runs"]
    speed = {run["variant"]: run["throughput"] for run in runs}
    assert {run["requests"] for run in runs} == {96}, "every request ends"
    assert speed["off"] < speed["all fail"] < min(speed["one fails"], speed["nodes"])


def test_failing_machines_of_the_target_cost_time_only() -> None:
    runs = simulate(Scenario.read(SCENARIOS / "failing-machines.yaml"), SCENARIOS)["runs"]
    latency = {run["variant"]: run["latency"]["mean"] for run in runs}
    assert {run["requests"] for run in runs} == {200}, "every request ends"
    assert latency["whole"] < min(latency["a stage"], latency["an engine"]) < latency["both engines"]


@pytest.mark.parametrize("file", sorted(SCENARIOS.glob("*.yaml")), ids=lambda file: file.stem)
def test_shipped_scenarios_can_be_read(file: Path) -> None:
    assert Scenario.read(file).variants
