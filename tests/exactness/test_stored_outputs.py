"""Outputs that stay the same over versions: tokens, finish reasons and log-probabilities on float64 toy models.

``stored_outputs.json`` was written at commit e84ea3a, with and without drafts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cospec.core.plugin_base import Drafter
from cospec.drafters.model import ModelDrafter
from cospec.drafters.ngram import NgramDrafter
from cospec.models.toy import ToyModel
from cospec.sampling_params import SamplingParams
from harness.toys import make_request, run_all, toy_engine

V = 7
STORED: dict[str, dict[str, dict[str, Any]]] = json.loads(Path(__file__).with_name("stored_outputs.json").read_text())
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 5},
    "top": {"temperature": 0.8, "top_k": 4, "top_p": 0.9, "seed": 6},
    "min_p": {"temperature": 1.3, "min_p": 0.05, "seed": 7},
    "penalties": {
        "temperature": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2, "seed": 8,
    },
    "bias": {"temperature": 1.0, "logit_bias": {1: 1.5, 3: -2.0}, "seed": 9, "min_tokens": 3},
}  # fmt: skip
DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "off": lambda: None,
    "model": lambda: ModelDrafter(ToyModel(V, order=1, seed=2, sharpness=2.0)),
    "ngram": lambda: NgramDrafter(1, 3),
}


def outputs(params: dict[str, Any], drafter: Drafter | None) -> dict[str, dict[str, Any]]:
    """Tokens, finish reason and log-probabilities of four requests."""
    engine = toy_engine(ToyModel(V, order=2, seed=1, sharpness=2.0), drafter, "match", 3)
    asked = []
    for i in range(4):
        own = SamplingParams(max_tokens=24, logprobs=2, stop_token_ids=(6,) if i == 3 else (), **params)
        asked.append(make_request(f"r{i}", [i % V, (i + 2) % V, (3 * i) % V], own))
    return {
        id: {
            "tokens": [token for event in events for token in event.tokens],
            "finish": str(events[-1].finish),
            "logprobs": [each.logprob for event in events for each in event.logprobs],
        }
        for id, events in run_all(engine, asked).items()
    }


@pytest.mark.parametrize("drafting", DRAFTERS)
@pytest.mark.parametrize("name", PARAMS)
def test_outputs_are_the_stored_ones(name: str, drafting: str) -> None:
    found, stored = outputs(PARAMS[name], DRAFTERS[drafting]()), STORED[f"{name}-{drafting}"]
    assert found.keys() == stored.keys()
    for id, one in found.items():
        assert (one["tokens"], one["finish"]) == (stored[id]["tokens"], stored[id]["finish"])
        assert one["logprobs"] == pytest.approx(stored[id]["logprobs"], abs=1e-8)


def test_another_seed_is_seen() -> None:
    found = outputs(PARAMS["seeded"] | {"seed": 6}, None)
    assert [one["tokens"] for one in found.values()] != [one["tokens"] for one in STORED["seeded-off"].values()]
