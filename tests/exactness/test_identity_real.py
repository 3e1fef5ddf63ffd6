"""The same on models with attention: tiny random Llamas, and the shipped family where it is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import cospec
from cospec.core.plugin_base import Drafter
from cospec.core.types import Request
from cospec.drafters.model import ModelDrafter
from cospec.drafters.ngram import NgramDrafter
from cospec.sampling_params import SamplingParams
from cospec.text.input_processor import make_requests
from harness.ensembles import Mix, adaptive, powers, weighted
from harness.llamas import VOCAB, blended_greedy_choices, llama_engine, load, plain_model, write_pair
from harness.toys import ScriptedDrafter, run_all, tokens_of

GREEDY = SamplingParams(temperature=0, max_tokens=20)
SEEDED = SamplingParams(
    temperature=1.0, max_tokens=20, seed=3, top_p=0.95, repetition_penalty=1.1, frequency_penalty=0.1, n=2
)
ZOO = Path(cospec.__file__).parent / "zoo" / "target"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp(name) for name in ("target", "drafter")}
    write_pair(found["target"], found["drafter"])
    return found


def requests(params: SamplingParams, count: int = 5) -> list[Request]:
    prompts = [[(7 * n + i * i * 3) % VOCAB if i > 6 else i for i in range(3 + 4 * n)] for n in range(count)]
    return [each for n, prompt in enumerate(prompts) for each in make_requests(f"r{n}", prompt, params)]


@pytest.fixture(scope="module", params=["auto", "never"], ids=["fused", "transformers"])
def fused(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path], fused: str) -> dict[str, dict[str, tuple[int, ...]]]:
    """Each output alone and without drafts."""
    found = {}
    for name, params in (("greedy", GREEDY), ("seeded", SEEDED)):
        outputs: dict[str, tuple[int, ...]] = {}
        for request in requests(params):
            outputs |= tokens_of(run_all(llama_engine(load(folders["target"], fused), None), [request]))
        found[name] = outputs
    return found


def drafter(name: str, folders: dict[str, Path], fused: str, native: str = "auto") -> Drafter | None:
    if name in ("target", "drafter"):
        return ModelDrafter(load(folders[name], fused), native=native == "auto")
    tree = ScriptedDrafter([5, 9, 40, 1, 2, 3], [-1, -1, 0, 1, 1, 4])
    return {"none": None, "ngram": NgramDrafter(1, 3), "tree": tree}[name]


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("name", ["none", "target", "drafter", "ngram", "tree"])
def test_drafters_lengths_and_batches(
    folders: dict[str, Path], fused: str, plain: dict[str, dict[str, tuple[int, ...]]], name: str, native: str
) -> None:
    made = load(folders["target"], fused)
    for params, k, seqs in (("greedy", 1, 8), ("greedy", 4, 3), ("seeded", 3, 8), ("seeded", 8, 1)):
        proposing = drafter(name, folders, fused, native)
        running = llama_engine(made, proposing, k, max_num_seqs=seqs, native=native)
        listed = requests(GREEDY if params == "greedy" else SEEDED)
        assert tokens_of(run_all(running, listed)) == plain[params], (params, k, seqs)
        metrics = running.metrics()
        if name == "target":
            assert sum(metrics.accepted_tokens.values()) > 0.99 * sum(metrics.draft_tokens.values())
        if name == "drafter":
            share = sum(metrics.accepted_tokens.values()) / sum(metrics.draft_tokens.values())
            assert 0.1 < share < 0.99


@pytest.mark.parametrize("shape", [{"max_nodes": 9}, {"widths": (3, 2, 1)}], ids=["free", "widths"])
def test_trees_of_a_model_with_attention(
    folders: dict[str, Path], fused: str, plain: dict[str, dict[str, tuple[int, ...]]], shape: dict[str, Any]
) -> None:
    """Side paths move in two caches, the target's and the drafter's: a target that drafts for itself agrees always."""
    made = load(folders["target"], fused)
    for params, listed in (("greedy", requests(GREEDY)), ("seeded", requests(SEEDED))):
        for name in ("drafter", "target"):
            running = llama_engine(made, drafter(name, folders, fused), 3, max_num_seqs=6, **shape)
            events = run_all(running, listed)
            assert tokens_of(events) == plain[params], (params, name)
            stats = [own[-1].stats for own in events.values()]
            drafts = sum(one.drafts for one in stats if one)
            assert sum(one.accepted for one in stats if one) > (drafts if name == "target" else 0)
            if name == "target":
                assert sum(one.rejections for one in stats if one) < 0.02 * drafts


@pytest.mark.parametrize("name", ["none", "drafter", "tree"])
def test_a_small_cache_and_small_rounds(
    folders: dict[str, Path], fused: str, plain: dict[str, dict[str, tuple[int, ...]]], name: str
) -> None:
    preempted = 0
    for pages, chunk in itertools.product((8, 12), (7, 64)):
        small = load(folders["target"], fused, pages)
        running = llama_engine(small, drafter(name, folders, fused), 3, max_num_batched_tokens=chunk)
        assert tokens_of(run_all(running, requests(SEEDED))) == plain["seeded"], (pages, chunk)
        preempted += running.metrics().num_preemptions
    assert preempted > 0


@pytest.mark.parametrize("acceptance_method", ["rejection", "block"])
def test_greedy_under_the_other_rules(
    folders: dict[str, Path], fused: str, plain: dict[str, dict[str, tuple[int, ...]]], acceptance_method: str
) -> None:
    running = llama_engine(load(folders["target"], fused), drafter("drafter", folders, fused), 4, acceptance_method)
    assert tokens_of(run_all(running, requests(GREEDY))) == plain["greedy"]


def generated(model: Any, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The same greedy output from transformers' own ``generate``."""
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None
        )
    return tuple(out[0, len(prompt) :].tolist())


def test_greedy_is_what_transformers_generates(
    folders: dict[str, Path], plain: dict[str, dict[str, tuple[int, ...]]]
) -> None:
    model = plain_model(folders["target"])
    for request in requests(GREEDY):
        assert plain["greedy"][request.id] == generated(model, request.prompt, 20)


PAIR = ["zoo", "zoo:drafter"]
NAIVE = {"proposal": "naive", "proposer": 1, "gamma": 4}
TURNS = {"proposal": "alternate", "gamma": [2, 4]}
DRAFTER_FIRST = {**TURNS, "proposer": 1}  # a blend that reads the target alone has no other proposals
RELAXED = {"method": "adaptive", "max_divergence": 1.0, "lambda1": 1e9, "lambda2": 1.0, "lambda3": 0.0}


def adaptive_setup(collaboration: dict[str, Any] = NAIVE, **options: float) -> dict[str, Any]:
    return {"models": PAIR, "ensemble": {**RELAXED, **options}, "collaboration": collaboration}


def realign_setup(weight: float, **collaboration: Any) -> dict[str, Any]:
    return {"models": PAIR, "ensemble": {"method": "realign", "lambda": weight}, "collaboration": collaboration}


TARGET, DRAFTER = weighted(1.0, 0.0), weighted(0.0, 1.0)
# Options of an engine, and its blend by the book. A draft length of its own choice may be 0 where the machine is busy.
SETUPS: dict[str, tuple[dict[str, Any], Mix]] = {
    "draft_model": ({"speculative_config": {"method": "draft_model", "num_speculative_tokens": 4}}, TARGET),
    "realign alternate": (realign_setup(0.3, proposal="alternate", gamma=[1, 4]), powers(0.7, 0.3)),
    "realign naive": (realign_setup(0.3, **NAIVE), powers(0.7, 0.3)),
    "realign beyond": (realign_setup(-0.5, **NAIVE), powers(1.5, -0.5)),
    "adaptive without divergence": (adaptive_setup(max_divergence=0.0), TARGET),
    "adaptive, key by entropy": (adaptive_setup(lambda1=0.0), TARGET),
    "adaptive, key by distance": (adaptive_setup(lambda2=0.0), TARGET),
    "adaptive, key by overlap": (adaptive_setup(lambda3=1.0), TARGET),
    "adaptive within a bound": (adaptive_setup(max_divergence=0.3), adaptive(0.3, 1e9, 1.0, 0.0)),
    "adaptive without key tokens": (adaptive_setup(), DRAFTER),
    "adaptive in turns without divergence": (adaptive_setup(DRAFTER_FIRST, max_divergence=0.0), TARGET),
    "adaptive in turns, key by distance": (adaptive_setup(TURNS, lambda2=0.0), TARGET),
    "adaptive in turns within a bound": (adaptive_setup(TURNS, max_divergence=0.3), adaptive(0.3, 1e9, 1.0, 0.0)),
    "adaptive in turns without key tokens": (adaptive_setup(TURNS), DRAFTER),
}
BOTH_PROPOSE = {
    "realign alternate",
    "adaptive in turns, key by distance",
    "adaptive in turns within a bound",
    "adaptive in turns without key tokens",
}
TEXTS = ["def add(a, b):", "Tom has 3 apples.", "It was a dark", "import os"]
needs_zoo = pytest.mark.skipif(not (ZOO / "config.json").exists(), reason="the zoo's target is not there yet")


def zoo_of(options: dict[str, Any]) -> cospec.LLM:
    return cospec.LLM(**options, dtype="float32", max_num_seqs=8, kv_cache_memory_bytes=64 << 20, threads=1)


@needs_zoo
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", SETUPS)
def test_the_zoo_writes_the_same_with_and_without_its_drafter(name: str, temperature: float) -> None:
    options, mix = SETUPS[name]
    params = SamplingParams(temperature=temperature, seed=1 if temperature else None, max_tokens=24)
    with zoo_of(options) as llm:
        drafted = llm.generate(TEXTS, params)
        plain = llm.generate(TEXTS, params, cospec.SpeculationParams(enabled=False))
    assert [each.outputs[0].token_ids for each in drafted] == [each.outputs[0].token_ids for each in plain]
    accepted = {proposer for each in drafted for proposer, n in each.stats.accepted_by_drafter.items() if n}
    assert len(accepted) == (2 if name in BOTH_PROPOSE else 1)
    assert sum(each.stats.drafted for each in plain) == 0
    if temperature == 0:
        folders = [ZOO, ZOO.parent / "drafter"]
        for each in plain:
            tokens, prompt = each.outputs[0].token_ids, each.prompt_token_ids
            assert tokens == blended_greedy_choices(folders, mix, prompt, tokens)
            if mix is TARGET:
                assert tokens == generated(plain_model(ZOO), prompt, 24)[: len(tokens)]


@needs_zoo
@pytest.mark.parametrize(
    "name", ["realign naive", "realign beyond", "adaptive without key tokens", "adaptive in turns without key tokens"]
)
def test_a_blend_that_is_not_the_target_is_seen(name: str) -> None:
    with zoo_of(SETUPS[name][0]) as llm:
        outputs = llm.generate(TEXTS, SamplingParams(temperature=0.0, max_tokens=24))
    model = plain_model(ZOO)
    alone = [generated(model, each.prompt_token_ids, 24)[: len(each.outputs[0].token_ids)] for each in outputs]
    assert [each.outputs[0].token_ids for each in outputs] != alone
