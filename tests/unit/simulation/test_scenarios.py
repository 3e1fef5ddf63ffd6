"""Scenario files: each mistake is one sentence, and what the shipped ones say of themselves is what comes out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cospec.errors import InvalidInput
from cospec.options import parse
from cospec.simulation.run import simulate
from cospec.simulation.scenario import Scenario

ROOT = Path(__file__).resolve().parents[3]
SCENARIOS, RECORDED = ROOT / "examples" / "scenarios", ROOT / "benchmarks" / "results" / "simulations"
TARGET = {"cost": {"slopes": [1e-5], "fixed": 0.01}}
OFF = [{"name": "off", "policy": "off"}]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"seeds": 1}, "key seeds is 1; allowed is one of description, seed, "),
    ({"requests": "many"}, "requests is 'many'; allowed is a whole number."),
    ({"requests": 0}, "requests is 0; allowed is a number from 1 up."),
    ({"target": "a100"}, "target is 'a100'; allowed is an object."),
    ({"target": {}}, "target.cost is missing; allowed is a value."),
    ({"target": {**TARGET, "replicas": 0}}, "target.replicas is 0; allowed is a number from 1 up."),
    ({"target": {"cost": {"fixed": -1}}}, "target.cost.fixed is -1; allowed is a number from 0.0 up."),
    ({"target": {"cost": {"knees": [8]}}}, "slopes is (0.0,); allowed is one more than the knees, here 2."),
    ({"target": {"cost": {"fixed": float("inf")}}}, "fixed is inf; allowed is finite."),
    ({"target": {"cost": {"profile": "no.json"}}}, "profile is no.json ("),
    ({"drafting": {"kind": "medusa"}}, "drafting.kind is 'medusa'; allowed is 'model', 'heads' or 'lookup'."),
    ({"domains": [{"acceptance": 1.2}]}, "domains.0.acceptance is 1.2; allowed is a number up to 1.0 or a list."),
    ({"domains": [{"acceptance": [0.5, "x"]}]}, "domains.0.acceptance.1 is 'x'; allowed is a number."),
    ({"domains": [{"trace": "no.txt"}]}, "trace is 'no.txt'; allowed is a file with one JSON list of 0 and 1 per line"),
    ({"arrivals": {"kind": "poisson"}}, "arrivals.kind is 'poisson'; allowed is 'open', 'closed', 'trace' or 'segm"),
    ({"arrivals": {"rates": [0]}}, "arrivals.rates.0 is 0; allowed is a number above 0.0."),
    ({"arrivals": {"kind": "trace"}}, "arrivals is {'kind': 'trace'}; allowed is the file of a trace where arrivals"),
    ({"arrivals": {"kind": "trace", "trace": "no.txt"}}, "trace is 'no.txt'; allowed is a readable text file ("),
    ({"variants": []}, "variants is []; allowed is a list of at least 1."),
    ({"variants": ["off"]}, "variants.0 is 'off'; allowed is an object."),
    ({"variants": [{"name": "x", "policy": False}]}, "variants.0.policy is False; allowed is a text."),
    (
        {"variants": [{"name": "x", "num_speculative_tokens": "some"}]},
        "variants.0.num_speculative_tokens is 'some'; allowed is a whole number or 'auto'.",
    ),
    ({"domains": [{"prompt": {"mean": 8, "least": 9, "most": 3}}]}, "domains.0.prompt is {'least': 9, "),
    ({"domains": [{"name": "a"}, {"name": "a"}]}, "domains.name is 'a'; allowed is a name that no other of them has."),
    ({"variants": [*OFF, *OFF]}, "variants.name is 'off'; allowed is a name that no other of them has."),
    (
        {"domains": [{"name": "a"}, {"name": "b"}], "variants": [{"name": "x", "acceptance": {"c": 0.5}}]},
        "acceptance of variant x is 'c'; allowed is for a, b.",
    ),
    ({"target": {"cost": {}}}, "target.cost is nothing; allowed is seconds for a token."),
    (
        {"variants": [{"name": "x", "policy": "oracle", "policy_options": {"t_max": 1}}]},
        "policy_options is {'t_max': 1}; allowed is left out for policy oracle.",
    ),
    (
        {"variants": [{"name": "x", "policy": "oracle", "num_speculative_tokens": -1}]},
        "variants.0.num_speculative_tokens is -1; allowed is a number from 0 up or 'auto'.",
    ),
    ({"variants": [{"name": "x", "policy": "best"}]}, "speculative_config.policy is 'best'; allowed is one of fixed, "),
    ({"variants": [{"name": "x", "round": "pipe"}]}, "speculative_config.round is 'pipe'; allowed is one of auto, "),
]


@pytest.mark.parametrize(("changes", "sentence"), WRONG, ids=lambda value: str(value)[:50])
def test_mistakes_are_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        simulate(parse(Scenario, {"requests": 4, "target": TARGET, "variants": OFF, **changes}))
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_lengths_of_less_than_a_token_are_one_token() -> None:
    domains = [{"prompt": {"mean": 0.2}, "output": {"mean": 0.2}}]
    (found,) = simulate(parse(Scenario, {"requests": 4, "target": TARGET, "variants": OFF, "domains": domains}))["runs"]
    assert found["requests"] == 4


def test_a_tree_that_is_wider_than_its_nodes_is_cut_where_they_end() -> None:
    variants = [{"name": "x", "policy": "fixed", "num_speculative_tokens": 64, "widths": [64] * 64, "max_nodes": 8}]
    domains = [{"output": {"mean": 8}}]
    given = {"requests": 2, "target": TARGET, "variants": variants, "domains": domains}
    (found,) = simulate(parse(Scenario, {**given, "drafting": {"kind": "heads"}}))["runs"]
    assert found["requests"] == 2


@pytest.mark.parametrize("file", sorted(SCENARIOS.glob("*.yaml")), ids=lambda file: file.stem)
def test_what_a_scenario_says_of_itself_is_what_came_out(file: Path) -> None:
    """Seconds and tokens per second in the paragraph above it are latencies and throughputs of the recorded run."""
    words = " ".join(line.lstrip("# ") for line in file.read_text().splitlines() if line.startswith("#"))
    paper, said = words.split("What comes out here")
    assert "aper" in paper or file.stem == "zoo"
    runs = json.loads((RECORDED / file.name).with_suffix(".json").read_text())["runs"]
    latencies = [run["latency"][kind] for run in runs for kind in ("mean", "p99")]
    throughputs = [run["throughput"] for run in runs]
    named = re.findall(r"(?<![\w.])(\d+(?:\.\d+)?) (s|tokens/s)\b", said)
    assert named
    for number, unit in named:
        digits = len(number.partition(".")[2])
        found = latencies if unit == "s" else throughputs
        assert any(f"{each:.{digits}f}" == number for each in found), f"no run has {number} {unit}"
