"""With a pool the same text comes, token for token: greedy and seeded requests, tiny Llamas and the shipped family."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import cospec
from cospec.core.types import Request
from cospec.drafters.model import ModelDrafter
from cospec.drafters.ngram import NgramDrafter
from cospec.drafters.pool.pool import PoolContext, PoolDrafter
from cospec.models.toy import ToyModel
from cospec.registry import COMBINERS, ROUTINGS
from cospec.sampling_params import SamplingParams
from cospec.text.input_processor import make_requests
from harness.llamas import VOCAB, llama_engine, load, write_pair
from harness.pools import pool_engine, pool_of, toy_drafters
from harness.toys import ScriptedDrafter, make_request, run_all, tokens_of, toy_engine, with_pool

GREEDY = SamplingParams(temperature=0, max_tokens=20)
SEEDED = SamplingParams(temperature=1.0, max_tokens=20, seed=3, top_p=0.95, repetition_penalty=1.1, n=2)
ZOO = Path(cospec.__file__).parent / "zoo" / "target"


def toy() -> ToyModel:
    return ToyModel(6, order=2, seed=1, sharpness=2.0)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("combiner", COMBINERS)
def test_toys(combiner: str, routing: str) -> None:
    drafters = toy_drafters(6) | {"tree": ScriptedDrafter([0, 1, 2, 3, 4], [-1, -1, 0, 1, 1])}
    if combiner == "mix":
        del drafters["tree"]
    for params, seqs in itertools.product((GREEDY, SEEDED), (1, 5)):
        listed = [each for n in range(5) for each in make_requests(f"r{n}", [n, 1, 2, n][: n + 1], params)]
        wanted = tokens_of(run_all(toy_engine(toy(), None), listed))
        engine = pool_engine(toy(), pool_of(drafters, combiner, routing, 6), max_num_seqs=seqs)
        assert tokens_of(run_all(engine, listed)) == wanted
        metrics = engine.metrics()
        assert sum(metrics.accepted_tokens.values()) > 0
        assert metrics.kv_cache_usage == 0


@pytest.mark.parametrize("combiner", COMBINERS)
def test_similar_tokens_change_the_routing_and_no_output(combiner: str) -> None:
    scores = []
    listed = [each for n in range(5) for each in make_requests(f"r{n}", [n, 1, 2], SEEDED if n % 2 else GREEDY)]
    wanted = tokens_of(run_all(toy_engine(toy(), None), listed))
    for similarity in (None, lambda one, other: 0.9):
        plain = pool_of(toy_drafters(6), combiner, "explore", 6)
        context = PoolContext(6, plain.setting.clock, similarity=similarity)
        pool = PoolDrafter(plain.members, plain.combiner, plain.routing, context)
        engine = pool_engine(toy(), pool)
        for request in listed:
            engine.add(request)
        found: dict[str, tuple[int, ...]] = {request.id: () for request in listed}
        steps = 0
        while engine.has_work:
            for event in engine.step():
                found[event.id] += event.tokens
            steps += 1
            if steps == 6:
                scores.append([record.weights.scores for record in pool.records.values()])
        assert found == wanted
    assert scores[0] != scores[1]


@pytest.mark.parametrize("combiner", COMBINERS)
def test_a_small_cache_of_a_drafter(combiner: str) -> None:
    """A drafter without room takes part where it can, and takes nothing from anybody."""
    small = with_pool(toy(), 6, 4)
    pool = pool_of({"small": ModelDrafter(small), **toy_drafters(6, ("second",))}, combiner, "all", 6)
    listed = [make_request(f"r{n}", (n, 1, 2), GREEDY) for n in range(5)]
    assert tokens_of(run_all(pool_engine(toy(), pool), listed)) == tokens_of(run_all(toy_engine(toy(), None), listed))
    small.pages.check_integrity()
    assert small.pages.usage == 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp(name) for name in ("target", "drafter")}
    write_pair(found["target"], found["drafter"])
    return found


def llama_requests(params: SamplingParams) -> list[Request]:
    prompts = [[(7 * n + i * i * 3) % VOCAB if i > 6 else i for i in range(3 + 4 * n)] for n in range(4)]
    return [each for n, prompt in enumerate(prompts) for each in make_requests(f"r{n}", prompt, params)]


@pytest.mark.parametrize("combiner", COMBINERS)
def test_tiny_llamas(folders: dict[str, Path], combiner: str) -> None:
    target = load(folders["target"])
    for params in (GREEDY, SEEDED):
        wanted = tokens_of(run_all(llama_engine(load(folders["target"]), None), llama_requests(params)))
        pool: PoolDrafter = pool_of(
            {
                "near": ModelDrafter(load(folders["drafter"])),
                "itself": ModelDrafter(load(folders["target"])),
                "copy": NgramDrafter(1, 3),
            },
            combiner,
            "all",
            VOCAB,
        )
        engine = pool_engine(target, pool, k=4, max_nodes=12)
        assert tokens_of(run_all(engine, llama_requests(params))) == wanted
        accepted = engine.metrics().accepted_tokens
        assert sum(accepted.values()) > 0.3 * sum(len(tokens) for tokens in wanted.values())


@pytest.mark.skipif(not (ZOO / "config.json").exists(), reason="the zoo's target is not there yet")
@pytest.mark.parametrize("combiner", COMBINERS)
def test_the_zoo(combiner: str) -> None:
    speculation = {
        "method": "pool",
        "combiner": combiner,
        "drafters": [
            {"name": "generic", "method": "draft_model", "model": "zoo:drafter"},
            {"name": "copy", "method": "ngram"},
        ],
        "num_speculative_tokens": 4,
        "max_nodes": 8,
    }
    llm = cospec.LLM("zoo", speculation, dtype="float32", max_num_seqs=8, kv_cache_memory_bytes=64 << 20, threads=1)
    prompts = ["def add(a, b):", "Tom has 3 apples.", "It was a dark", "import os"]
    for params in (
        SamplingParams(temperature=0, max_tokens=24),
        SamplingParams(temperature=0.8, seed=1, max_tokens=24),
    ):
        drafted = llm.generate(prompts, params)
        plain = llm.generate(prompts, params, cospec.SpeculationParams(enabled=False))
        assert [each.outputs[0].token_ids for each in drafted] == [each.outputs[0].token_ids for each in plain]
        assert sum(each.stats.accepted for each in drafted) > 0
