"""An ensemble's joint distribution of three tokens is the blend's, by enumeration.

Greedy and seeded outputs equal standard decoding, token for token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from cospec import register_blend
from cospec.core.engine import Engine
from cospec.core.types import Request, SpeculationParams
from cospec.drafters.model import ModelDrafter
from cospec.drafters.ngram import NgramDrafter
from cospec.models.toy import ToyModel
from cospec.sampling_params import SamplingParams
from harness.ensembles import Blended, Mix, adaptive, contrastive, ensemble_engine, powers, rolling, toys, weighted
from harness.enumerated_draws import total_variation
from harness.reference import joint_distribution_of
from harness.toys import (
    ScriptedDrafter,
    enumerated_distribution,
    enumerated_distribution_among,
    make_request,
    run_all,
    tokens_of,
    toy_engine,
    with_pool,
)

EXACT = 1e-12
PROMPT = (0, 1, 0)
PLAIN = SamplingParams(max_tokens=8)
ALL = SamplingParams(
    max_tokens=8, temperature=0.8, top_k=3, top_p=0.95, min_p=0.05, repetition_penalty=1.3, presence_penalty=0.4,
    frequency_penalty=0.3, logit_bias={1: 0.5}, min_tokens=1, stop_token_ids=(2,),
)  # fmt: skip

register_blend(
    "geometric-test", lambda logits: torch.stack([torch.log_softmax(rows.double(), -1) for rows in logits]).mean(0)
)

BLENDS: dict[str, tuple[int, dict[str, Any], Mix]] = {
    "weighted": (2, {"method": "weighted", "weights": [0.6, 0.4]}, weighted(0.6, 0.4)),
    "lambda": (2, {"method": "weighted", "lambda": 0.3}, weighted(0.7, 0.3)),
    "contrastive": (2, {"method": "contrastive", "mu": 0.5, "plausibility": 0.3}, contrastive(0.5, 0.3)),
    "realign": (2, {"method": "realign", "weights": [-0.5, 1.5]}, powers(-0.5, 1.5)),
    "adaptive": (
        2, {"method": "adaptive", "max_divergence": 0.05, "lambda1": 1.1, "lambda2": 0.25, "lambda3": 0.5},
        adaptive(0.05, 1.1, 0.25, 0.5),
    ),
    "custom": (2, {"method": "geometric-test"}, powers(0.5, 0.5)),
    "single": (2, {"method": "single"}, weighted(1.0, 0.0)),
    "three": (3, {"method": "weighted", "weights": [0.5, 0.3, 0.2]}, weighted(0.5, 0.3, 0.2)),
    "three-realigned": (3, {"method": "realign", "weights": [0.5, 0.8, -0.3]}, powers(0.5, 0.8, -0.3)),
}  # fmt: skip


def error(
    name: str, proposal: str, gamma: Any, params: SamplingParams = PLAIN, vocab: int = 2, length: int = 3, **more: Any
) -> float:
    """Total variation between what the engine writes and the blend by the book."""
    count, ensemble, mix = BLENDS[name]
    change = more.pop("change", lambda model: model)
    models = [change(model) for model in toys(count, vocab)]
    engine = ensemble_engine(models, ensemble, proposal, gamma, **more)
    prompt = PROMPT[:2]
    found = enumerated_distribution(engine, prompt, params, length)
    engine.check_integrity()
    assert engine.metrics().kv_cache_usage == 0
    return total_variation(found, joint_distribution_of(Blended(models, mix), params, prompt, length))


SHORT = SamplingParams(max_tokens=5)


@pytest.mark.parametrize("proposal", ["naive", "alternate"])
@pytest.mark.parametrize("name", [name for name in BLENDS if BLENDS[name][0] == 2])
def test_every_blend_and_length(name: str, proposal: str) -> None:
    """Four tokens: the first comes with the prompt, from the blend, so proposals of three reach the end."""
    for gamma in (1, 2, 3):
        assert error(name, proposal, gamma, SHORT, length=4, acceptance_method="rejection") < EXACT, gamma


@pytest.mark.parametrize("proposal", ["naive", "alternate"])
@pytest.mark.parametrize("acceptance_method", ["rejection", "block"])
def test_models_with_a_loop_of_their_own(acceptance_method: str, proposal: str) -> None:
    """Proposals of a native call keep the distribution, batched with greedy requests and ones that need Python."""
    params = SamplingParams(max_tokens=5, temperature=0.8)
    for name, gamma in (("weighted", [3, 2]), ("contrastive", [1, 4]), ("three", [2, 3, 1])):
        assert (
            error(name, proposal, gamma, params, 2, 3, acceptance_method=acceptance_method, change=rolling) < EXACT
        ), gamma
    assert (
        error("weighted", proposal, [2, 1], ALL, vocab=3, acceptance_method=acceptance_method, change=rolling) < EXACT
    )


@pytest.mark.parametrize("proposal", ["naive", "alternate"])
@pytest.mark.parametrize("acceptance_method", ["match", "rejection", "block"])
def test_a_loop_is_stepping(acceptance_method: str, proposal: str) -> None:
    """The same tokens and calls, at different temperatures side by side."""
    ensemble = BLENDS["weighted"][1]
    listed = [
        replace(request, seed=n, sampling=replace(request.sampling, temperature=(1.0, 0.0, 0.7)[n % 3]))
        for n, request in enumerate(requests(SamplingParams(max_tokens=30), 9, acceptance_method))
    ]
    found = []
    for change in (rolling, lambda model: model):
        engine = ensemble_engine([change(model) for model in members()], ensemble, proposal, [3, 4])
        events = run_all(engine, listed)
        calls = {id: own[-1].stats.model_calls for id, own in events.items() if own[-1].stats}
        found.append((tokens_of(events), calls))
    assert found[0] == found[1]


@pytest.mark.parametrize("proposal", ["naive", "alternate"])
@pytest.mark.parametrize("name", ["three", "three-realigned"])
def test_three_models(name: str, proposal: str) -> None:
    for gamma in (1, [2, 1, 1], [1, 3, 1], [4, 1, 2]):
        assert error(name, proposal, gamma, SamplingParams(max_tokens=4), acceptance_method="rejection") < EXACT, gamma


@pytest.mark.parametrize("proposal", ["naive", "alternate"])
@pytest.mark.parametrize("acceptance_method", ["rejection", "block", "recursive"])
@pytest.mark.parametrize("name", ["weighted", "contrastive"])
def test_every_rule_with_every_parameter(name: str, acceptance_method: str, proposal: str) -> None:
    """Penalties, bias and truncation apply to the blend, at every proposed position."""
    for gamma in ([1, 1], [2, 1]):
        assert error(name, proposal, gamma, ALL, vocab=3, acceptance_method=acceptance_method) < EXACT, gamma


@pytest.mark.parametrize("acceptance_method", ["rejection", "block"])
def test_the_other_model_proposes_first(acceptance_method: str) -> None:
    assert (
        error("weighted", "alternate", [1, 3], SHORT, length=4, acceptance_method=acceptance_method, proposer=1) < EXACT
    )
    assert error("three", "naive", [1, 2, 1], SHORT, acceptance_method=acceptance_method, proposer=2) < EXACT


@pytest.mark.parametrize("proposal", ["standard", "parallel"])
def test_the_baselines(proposal: str) -> None:
    assert error("weighted", proposal, 2, ALL, vocab=3) < EXACT
    assert error("three", proposal, 2, PLAIN, vocab=3) < EXACT


@pytest.mark.parametrize("acceptance_method", ["match", "rejection", "block"])
def test_a_drafter_that_is_no_member(acceptance_method: str) -> None:
    """The distribution after the last token is known, so a bonus token follows; methods for chains take no trees."""
    tree = ScriptedDrafter([0, 1, 1], [-1, -1, 1])
    sampling = (
        [ModelDrafter(ToyModel(2, order=1, seed=5))] if acceptance_method != "match" else []
    )  # draws from the blend
    for drafter in (*sampling, NgramDrafter(1, 3), tree):
        assert (
            error("weighted", "alternate", 2, SHORT, length=4, acceptance_method=acceptance_method, drafter=drafter)
            < EXACT
        )


@pytest.mark.parametrize("proposal", ["naive", "alternate"])
def test_crowded_caches(proposal: str) -> None:
    """Preemption drops what stood ahead of a sequence; chunks; rounds without room for a proposal."""
    engines: list[Engine] = []

    def build() -> Engine:
        models = [with_pool(model, num_pages=8, page_size=2) for model in toys(2, 2)]
        engines.append(ensemble_engine(models, BLENDS["weighted"][1], proposal, 1, max_num_batched_tokens=12))
        return engines[-1]

    chosen = SpeculationParams(acceptance_method="rejection")
    company = [Request(f"a{n}", (n, 1, 1, 0), SamplingParams(max_tokens=7), n, speculation=chosen) for n in range(2)]
    request = Request("z", PROMPT, SamplingParams(max_tokens=4), 99, arrival=1.0, speculation=chosen)
    found = enumerated_distribution_among(build, company, request, 3)
    wanted = joint_distribution_of(Blended(toys(2, 2), BLENDS["weighted"][2]), request.sampling, PROMPT, 3)
    assert total_variation(found, wanted) < EXACT
    assert any(engine.metrics().num_preemptions for engine in engines)


# ---- token for token

IDENTITY = {
    "greedy": SamplingParams(temperature=0, max_tokens=24),
    "greedy-penalised": SamplingParams(
        temperature=0, max_tokens=24, repetition_penalty=1.2, frequency_penalty=0.3, min_tokens=5, stop_token_ids=(3,)
    ),
    "seeded": SamplingParams(temperature=0.9, max_tokens=24, seed=11, top_p=0.9, logprobs=2),
}


def requests(params: SamplingParams, count: int, acceptance_method: str | None = None) -> list[Request]:
    """Prompts of different lengths, some of which begin alike."""
    prompts = [[(3 * n + i * i) % 6 if i > 5 else i for i in range(2 + 3 * n)] for n in range(count)]
    chosen = SpeculationParams(acceptance_method=acceptance_method)
    return [make_request(f"r{n}", prompt, params, speculation=chosen) for n, prompt in enumerate(prompts)]


def members(count: int = 2, pages: int = 256) -> list[ToyModel]:
    return [with_pool(model, pages, 4) for model in toys(count, 6, sharpness=2.0)]


@cache
def standard(name: str, params: str, requested: int) -> Mapping[str, tuple[int, ...]]:
    """Each output alone by standard collaborative decoding."""
    count, ensemble, _ = BLENDS[name]
    found: dict[str, tuple[int, ...]] = {}
    for request in requests(IDENTITY[params], requested):
        found |= tokens_of(run_all(ensemble_engine(members(count), ensemble, "standard"), [request]))
    return found


@pytest.mark.parametrize("proposal", ["naive", "alternate", "parallel"])
@pytest.mark.parametrize("name", ["weighted", "contrastive", "three"])
@pytest.mark.parametrize("params", IDENTITY)
def test_the_tokens_of_standard_decoding(name: str, proposal: str, params: str) -> None:
    count, ensemble, _ = BLENDS[name]
    listed = requests(IDENTITY[params], 5)
    wanted = standard(name, params, len(listed))
    gammas: list[Any] = [1, 3, [2, 1, 4][:count], "auto"]
    configs: list[dict[str, int]] = [{}, {"max_num_batched_tokens": 7}, {"max_num_seqs": 2}]
    for gamma, config in zip(gammas * 2, configs * 3, strict=False):
        engine = ensemble_engine(members(count), ensemble, proposal, gamma, **config)
        assert tokens_of(run_all(engine, listed)) == wanted, (gamma, config)
    preempted = 0
    for pages in (10, 12):
        engine = ensemble_engine(members(count, pages), ensemble, proposal, 3)
        assert tokens_of(run_all(engine, listed)) == wanted, pages
        preempted += engine.metrics().num_preemptions
        assert engine.metrics().kv_cache_usage == 0
    assert preempted


@pytest.mark.parametrize("acceptance_method", ["rejection", "block"])
def test_greedy_under_the_other_rules(acceptance_method: str) -> None:
    ensemble = BLENDS["weighted"][1]
    for params in ("greedy", "greedy-penalised"):
        wanted = standard("weighted", params, 4)
        for proposal, gamma in (("naive", 3), ("alternate", [2, 3])):
            engine = ensemble_engine(members(), ensemble, proposal, gamma)
            assert tokens_of(run_all(engine, requests(IDENTITY[params], 4, acceptance_method))) == wanted


@pytest.mark.parametrize("acceptance_method", ["match", "rejection", "block"])
@pytest.mark.parametrize("name", ["weighted", "three"])
def test_sixteen_with_arrivals_are_sixteen_alone(name: str, acceptance_method: str) -> None:
    """Sequences stand at different stages with different proposers; none notices the others."""
    count, ensemble, _ = BLENDS[name]
    params = SamplingParams(max_tokens=30, temperature=1.1)
    listed = [replace(request, seed=n) for n, request in enumerate(requests(params, 16, acceptance_method))]
    alone: dict[str, tuple[int, ...]] = {}
    for request in listed:
        alone |= tokens_of(run_all(ensemble_engine(members(count), ensemble, gamma=[2, 1, 3][:count]), [request]))
    engine = ensemble_engine(members(count), ensemble, gamma=[2, 1, 3][:count])
    found: dict[str, tuple[int, ...]] = {request.id: () for request in listed}
    arriving, step = list(listed), 0
    while arriving or engine.has_work:
        if arriving and step % 2 == 0:
            engine.add(arriving.pop(0))
        for event in engine.step():
            found[event.id] += event.tokens
        engine.check_integrity()
        step += 1
    assert found == alone


@pytest.mark.parametrize("proposal", ["naive", "alternate"])
def test_without_weight_it_is_plain_speculative_decoding(proposal: str) -> None:
    """lambda = 0: the same tokens and the same calls of the target as a drafter that is no member, bonus included."""
    params = SamplingParams(max_tokens=60, temperature=1.0)
    for acceptance_method in ("match", "rejection", "block"):
        calls, outputs = [], []
        target, small = (ToyModel(6, order=2, seed=seed, sharpness=0.5) for seed in (1, 2))
        plain = toy_engine(target, ModelDrafter(small), acceptance_method, 3)
        listed = [replace(request, seed=n) for n, request in enumerate(requests(params, 6, acceptance_method))]
        outputs.append(tokens_of(run_all(plain, listed)))
        calls.append(target.calls)
        target, small = (ToyModel(6, order=2, seed=seed, sharpness=0.5) for seed in (1, 2))
        ensemble = {"method": "weighted", "lambda": 0.0}
        engine = ensemble_engine([target, small], ensemble, proposal, [1, 3], proposer=1)
        outputs.append(tokens_of(run_all(engine, listed)))
        calls.append(target.calls)
        assert engine.distribution == "weighted(1, 0)"
        assert outputs[0] == outputs[1], acceptance_method
        assert calls[0] == calls[1], acceptance_method


def test_logprobs_are_the_blends() -> None:
    """Of prompt and output, the same as standard collaborative decoding gives."""
    params = SamplingParams(max_tokens=12, temperature=0.7, seed=3, logprobs=2, prompt_logprobs=1)
    ensemble = BLENDS["weighted"][1]
    rows = []
    for proposal in ("standard", "alternate"):
        engine = ensemble_engine(members(), ensemble, proposal, 3, max_num_batched_tokens=9)
        events = run_all(engine, requests(params, 3))["r2"]
        prompts = next(event.prompt_logprobs for event in events if event.prompt_logprobs is not None)
        rows.append((prompts, [row for event in events for row in event.logprobs]))
    assert rows[0] == rows[1]
    assert len(rows[0][0]) == 8
    assert len(rows[0][1]) == 12
