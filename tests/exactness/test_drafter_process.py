"""Outputs are the same whatever the round, with the drafter in a process of its own: toys, and the shipped family."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

import cospec
from cospec.core.types import Request
from cospec.models.toy import ToyModel
from cospec.runtime.drafter_process_executor import ProcessExecutor
from cospec.runtime.drafter_proxy import DrafterProxy
from cospec.sampling_params import SamplingParams
from cospec.text.input_processor import make_requests
from harness.overlap import MODES, under
from harness.remote_drafters import VOCAB, toy
from harness.toys import run_all, tokens_of, toy_engine, with_pool

PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=20),
    "penalised": SamplingParams(
        temperature=0, max_tokens=20, repetition_penalty=1.3, min_tokens=5, stop_token_ids=(3,)
    ),
    "seeded": SamplingParams(temperature=0.9, max_tokens=20, seed=11, n=2),
}
PROMPTS = ["def add(a, b):", "Tom has 3 apples.", "It was a dark", "import os", "class Node:"]
TEXTS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=24),
    "seeded": SamplingParams(temperature=0.8, max_tokens=24, seed=1),
}
Outputs = dict[str, tuple[int, ...]]


def strong(pages: int = 256) -> ToyModel:
    return with_pool(ToyModel(VOCAB, order=2, seed=1, sharpness=2.0), pages, 4)


def requests(params: SamplingParams) -> list[Request]:
    prompts = [[(3 * n + i * i) % VOCAB if i > 5 else i for i in range(2 + 3 * n)] for n in range(5)]
    return [each for n, prompt in enumerate(prompts) for each in make_requests(f"r{n}", prompt, params)]


@cache
def plain(name: str) -> Outputs:
    return tokens_of(run_all(toy_engine(strong(), None), requests(PARAMS[name])))


@pytest.fixture(scope="module", params=["itself", "other", "ngram"])
def drafter(request: pytest.FixtureRequest) -> Iterator[DrafterProxy]:
    executor = ProcessExecutor(toy(request.param))
    yield DrafterProxy(executor)
    executor.close()


@pytest.mark.parametrize("execution_mode", MODES)
def test_outputs_are_identical(execution_mode: str, drafter: DrafterProxy) -> None:
    for name, params in PARAMS.items():
        for pages, chunk in ((256, 64), (13, 7)):  # with room, and preempted while drafts are on their way
            made = toy_engine(strong(pages), drafter, k=3, max_num_batched_tokens=chunk)
            engine = under(made, execution_mode, "process")
            assert tokens_of(run_all(engine, requests(params))) == plain(name)
            assert engine.metrics().kv_cache_usage == 0


@pytest.fixture(scope="module")
def zoo() -> Iterator[cospec.LLM]:
    speculative = {"method": "draft_model", "num_speculative_tokens": 4, "drafter_executor": "process"}
    llm = cospec.LLM("zoo", speculative, dtype="float32", max_num_seqs=8, kv_cache_memory_bytes=64 << 20, threads=1)
    yield llm
    executor = llm.engine.execution_mode.components.executor
    assert executor is not None
    executor.close()


def written(llm: cospec.LLM, name: str, drafts: bool) -> list[tuple[int, ...]]:
    outputs = llm.generate(PROMPTS, TEXTS[name], cospec.SpeculationParams(enabled=drafts))
    assert not drafts or sum(each.stats.accepted for each in outputs) > 0
    return [each.outputs[0].token_ids for each in outputs]


def test_the_zoo_writes_the_same_under_every_round(zoo: cospec.LLM) -> None:
    components = zoo.engine.execution_mode.components
    for name in TEXTS:
        plain = written(zoo, name, drafts=False)
        for cls in MODES.values():
            zoo.engine.execution_mode = cls(components)
            assert written(zoo, name, drafts=True) == plain, (name, cls)
            if hasattr(zoo.engine.execution_mode, "close"):
                zoo.engine.execution_mode.close()
    zoo.engine.execution_mode = MODES["auto"](components)
