"""Steps in flight on the shipped family: every drafter and execution mode, with the forward in another thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import cospec
from cospec.sampling_params import SamplingParams
from harness.in_flight import most_in_flight, with_steps_in_flight
from harness.overlap import MODES

ZOO = Path(cospec.__file__).parent / "zoo" / "target"
METHODS: dict[str, dict[str, Any]] = {
    "draft_model": {"method": "draft_model"},
    "tree": {"method": "draft_model", "max_nodes": 6, "acceptance_method": "match"},
    "suffix": {"method": "suffix"},
    "heads": {"method": "heads"},
    "pool": {
        "method": "pool",
        "drafters": [{"name": "a", "method": "draft_model", "model": "zoo:drafter"}, {"name": "b", "method": "ngram"}],
    },
}
PROMPTS = ["def add(a, b):", "Tom has 3 apples.", "It was a dark", "import os", "Two plus two", "class Tree:"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=16),
    SamplingParams(temperature=0.8, seed=1, top_p=0.95, repetition_penalty=1.1, max_tokens=16),
]
COUNTS = dict(zip(MODES, (2, 4, 2, 4, 2), strict=True))  # steps in flight; toys try each mode with each number


@pytest.mark.skipif(not (ZOO / "config.json").exists(), reason="the zoo's target is not there yet")
@pytest.mark.parametrize("method", METHODS)
def test_the_zoo_writes_the_same(method: str) -> None:
    speculative = {**METHODS[method], "num_speculative_tokens": 3, "drafter_executor": "thread"}
    llm = cospec.LLM("zoo", speculative, dtype="float32", max_num_seqs=6, kv_cache_memory_bytes=64 << 20, threads=1)
    plain = cospec.SpeculationParams(enabled=False)
    wanted = [[each.outputs[0].token_ids for each in llm.generate(PROMPTS, params, plain)] for params in PARAMS]
    engine, components = llm.engine, llm.engine.execution_mode.components
    for execution_mode, cls in MODES.items():
        engine.execution_mode = cls(components)
        with_steps_in_flight(engine, COUNTS[execution_mode])
        for params, texts in zip(PARAMS, wanted, strict=True):
            found = [each.outputs[0].token_ids for each in llm.generate(PROMPTS, params)]
            assert found == texts, execution_mode
        assert most_in_flight(engine) == COUNTS[execution_mode]
        engine.check_integrity()
        engine.execution_mode.close()
    assert sum(engine.metrics().accepted_tokens.values()) > 0
