"""The baselines of ``examples/baselines``: each can be built, declares its price, and writes the plain output."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cospec import LLM, SamplingParams
from cospec.config import EngineConfig, read_file

FOLDER = Path("examples/baselines")
NAMES = ("plain", "one-drafter", "specinfer", "pipeinfer", "cosine")
SMALL: dict[str, Any] = {
    "measure_at_start": False,
    "kv_cache_memory_bytes": 20_000_000,
    "max_model_len": 256,
    "threads": 1,
}
PROMPTS = ["The sum of 2 and 3 is", "def add(a, b):"]


@cache
def written(name: str) -> list[tuple[int, ...]]:
    with LLM(**read_file(FOLDER / f"{name}.yaml"), **SMALL) as llm:
        found = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24))
    return [tuple(each.outputs[0].token_ids) for each in found]


@pytest.mark.parametrize("name", NAMES)
def test_baseline_writes_the_plain_output(name: str) -> None:
    assert written(name) == written("plain")
    prices = EngineConfig.build(read_file(FOLDER / f"{name}.yaml")).prices
    assert prices["target"] == 4
    assert (sum(prices.values()) > 4) == (name != "plain")


def test_every_file_is_a_named_baseline() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(NAMES)
