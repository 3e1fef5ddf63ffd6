"""The baselines of ``examples/baselines``: each can be built, declares its price, and writes the plain output."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cospec import LLM, SamplingParams
from cospec.config import EngineConfig, read_file
from cospec.metrics.engine_counters import EngineMetrics

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
def ran(name: str) -> tuple[list[tuple[int, ...]], EngineMetrics]:
    """The outputs of all prompts at once and of the last prompt alone, and what the engine counted."""
    with LLM(**read_file(FOLDER / f"{name}.yaml"), **SMALL) as llm:
        found = [
            output
            for prompts in (PROMPTS, PROMPTS[-1:])
            for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24))
        ]
        return [tuple(each.outputs[0].token_ids) for each in found], llm.engine.metrics()


@pytest.mark.parametrize("name", NAMES)
def test_baseline_writes_the_plain_output(name: str) -> None:
    assert ran(name)[0] == ran("plain")[0]
    prices = EngineConfig.build(read_file(FOLDER / f"{name}.yaml")).prices
    assert prices["target"] == 4
    assert (sum(prices.values()) > 4) == (name != "plain")


def test_pipeinfer_has_windows_in_flight_and_cancels_refuted_windows() -> None:
    _, metrics = ran("pipeinfer")
    assert metrics.drafts_ahead["in flight"] > 0 < metrics.cancelled_steps


def test_every_file_is_a_named_baseline() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(NAMES)
