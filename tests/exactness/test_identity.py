"""Speculation changes how fast an output comes, never which: token for token the same text.

Greedy requests under every rule, and seeded ones under ``match``, with every drafter, draft length, batch and cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from cospec.core.plugin_base import Drafter
from cospec.core.types import Draft, DraftBudget, DraftContext, Request, SpeculationParams
from cospec.drafters.model import ModelDrafter
from cospec.drafters.ngram import NgramDrafter
from cospec.models.toy import ToyModel
from cospec.sampling_params import SamplingParams
from cospec.text.input_processor import make_requests
from harness.toys import ScriptedDrafter, make_request, run_all, tokens_of, toy_engine, with_pool

VOCAB = 6
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=24),
    "greedy-penalised": SamplingParams(
        temperature=0, max_tokens=24, repetition_penalty=1.2, frequency_penalty=0.3, min_tokens=5, stop_token_ids=(3,)
    ),
    "seeded": SamplingParams(temperature=0.9, max_tokens=24, seed=11),
    "seeded-all": SamplingParams(
        temperature=1.2, max_tokens=24, seed=12, top_p=0.9, top_k=5, min_p=0.02, repetition_penalty=1.1,
        presence_penalty=0.3, frequency_penalty=0.2, logit_bias={2: 0.5}, min_tokens=9, stop_token_ids=(1,), n=3,
    ),
}  # fmt: skip

DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "itself": lambda: ModelDrafter(ToyModel(VOCAB, order=2, seed=1, sharpness=2.0)),
    "other": lambda: ModelDrafter(ToyModel(VOCAB, order=1, seed=3)),
    "ngram": lambda: NgramDrafter(1, 3),
    "tree": lambda: ScriptedDrafter([0, 1, 2, 3, 4, 5, 0, 1], [-1, -1, -1, 0, 1, 1, 5, 2]),
}


def target(pages: int = 256, prefix_caching: bool = True) -> ToyModel:
    return with_pool(ToyModel(VOCAB, order=2, seed=1, sharpness=2.0), pages, 4, prefix_caching)


def requests(params: SamplingParams, count: int = 5, acceptance_method: str = "auto") -> list[Request]:
    """Prompts of different lengths, some of which begin alike."""
    prompts = [[(3 * n + i * i) % VOCAB if i > 5 else i for i in range(2 + 3 * n)] for n in range(count)]
    chosen = SpeculationParams(acceptance_method=None if acceptance_method == "auto" else acceptance_method)
    return [each for n, prompt in enumerate(prompts) for each in make_requests(f"r{n}", prompt, params, chosen)]


@cache
def plain(name: str, count: int = 5) -> dict[str, tuple[int, ...]]:
    """Each output alone, without drafts, without sharing."""
    outputs: dict[str, tuple[int, ...]] = {}
    for request in requests(PARAMS[name], count):
        outputs |= tokens_of(run_all(toy_engine(target(prefix_caching=False), None), [request]))
    return outputs


def outputs(
    name: str, drafter: str, k: int = 3, model: ToyModel | None = None, **config: Any
) -> dict[str, tuple[int, ...]]:
    engine = toy_engine(model or target(), DRAFTERS[drafter](), k=k, **config)
    found = tokens_of(run_all(engine, requests(PARAMS[name])))
    assert engine.metrics().kv_cache_usage == 0
    return found


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", PARAMS)
def test_drafters_and_lengths(name: str, drafter: str) -> None:
    for k in (0, 1, 2, 3, 5, 8) if drafter != "none" else (0, 3):
        assert outputs(name, drafter, k) == plain(name), k


@pytest.mark.parametrize("acceptance_method", ["rejection", "block"])
@pytest.mark.parametrize("name", ["greedy", "greedy-penalised"])
def test_greedy_under_the_other_rules(name: str, acceptance_method: str) -> None:
    for drafter, k in itertools.product(("itself", "other", "ngram"), (1, 4)):
        engine = toy_engine(target(), DRAFTERS[drafter](), acceptance_method, k)
        assert tokens_of(run_all(engine, requests(PARAMS[name], acceptance_method=acceptance_method))) == plain(name), (
            drafter,
            k,
        )


@pytest.mark.parametrize("drafter", ["none", "other", "tree"])
@pytest.mark.parametrize("name", PARAMS)
def test_batches_and_chunks(name: str, drafter: str) -> None:
    configs: list[dict[str, Any]] = [{"max_num_seqs": n} for n in (1, 2, 5, 8)]
    for config in configs + [{"max_num_batched_tokens": n} for n in (1, 3, 7, 13)]:
        assert outputs(name, drafter, **config) == plain(name), config


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("drafter", ["none", "itself", "other", "ngram", "tree"])
def test_a_small_cache(drafter: str, prefix_caching: bool) -> None:
    """Preemption in the middle of outputs, also of siblings, with and without chunks."""
    preempted = 0
    for name, pages, chunk in itertools.product(("greedy", "seeded-all"), (10, 13, 20), (5, 64)):
        model = target(pages, prefix_caching)
        engine = toy_engine(model, DRAFTERS[drafter](), k=4, max_num_batched_tokens=chunk)
        assert tokens_of(run_all(engine, requests(PARAMS[name]))) == plain(name), (name, pages, chunk)
        preempted += engine.metrics().num_preemptions
    assert preempted > 0


def test_a_small_cache_of_the_drafter() -> None:
    """A drafter without room drafts less, and takes nothing from anybody."""
    for pages, prefix_caching in itertools.product((1, 3, 8, 14), (True, False)):
        small = with_pool(ToyModel(VOCAB, order=2, seed=1, sharpness=2.0), pages, 4, prefix_caching)
        engine = toy_engine(target(), ModelDrafter(small), k=4)
        assert tokens_of(run_all(engine, requests(PARAMS["seeded-all"]))) == plain("seeded-all"), pages
        small.pages.check_integrity()
        assert small.pages.usage == 0


@pytest.mark.parametrize("drafter", ["none", "other", "ngram", "tree"])
@pytest.mark.parametrize("name", PARAMS)
def test_arrivals_and_aborts_in_the_middle(name: str, drafter: str) -> None:
    """Every third request is aborted half way; the others do not notice."""
    engine = toy_engine(target(24), DRAFTERS[drafter](), k=3, max_num_batched_tokens=17)
    listed = requests(PARAMS[name])
    found: dict[str, tuple[int, ...]] = {request.id: () for request in listed}
    arriving, aborted, step = list(listed), set(), 0
    while arriving or engine.has_work:
        if arriving and step % 2 == 0:
            engine.add(arriving.pop(0))
        for event in engine.step():
            assert event.id not in aborted
            found[event.id] += event.tokens
        for number, request in enumerate(listed):
            if number % 3 == 1 and request.id not in aborted and len(found[request.id]) >= 2:
                engine.abort([request.id, "unknown"])
                aborted.add(request.id)
        engine.check_integrity()
        step += 1
    assert aborted
    for id, tokens in plain(name).items():
        assert found[id] == (tokens[: len(found[id])] if id in aborted else tokens)
    assert engine.metrics().kv_cache_usage == 0


def test_mixed_company() -> None:
    """Greedy, seeded, other rules and no speculation at all in one batch."""
    engine = toy_engine(target(), DRAFTERS["other"](), k=3)
    batch, wanted = [], {}
    for number, name in enumerate(PARAMS):
        for request in requests(PARAMS[name], 2):
            id = f"{name}-{request.id}"
            chosen = SpeculationParams(enabled=number % 2 == 0, length=number)
            batch.append(Request(id, request.prompt, request.sampling, request.seed, parent=id, speculation=chosen))
            wanted[id] = plain(name)[request.id]
    assert tokens_of(run_all(engine, batch)) == wanted


@pytest.mark.parametrize("acceptance_method", ["match", "rejection", "block"])
@pytest.mark.parametrize("name", PARAMS)
def test_the_target_as_its_own_drafter_is_accepted(name: str, acceptance_method: str) -> None:
    for prefix_caching, chunk in ((True, 64), (False, 9)):
        own = with_pool(ToyModel(VOCAB, order=2, seed=1, sharpness=2.0), 256, 4, prefix_caching)
        engine = toy_engine(target(), ModelDrafter(own), acceptance_method, 4, max_num_batched_tokens=chunk)
        run_all(engine, requests(PARAMS[name], acceptance_method=acceptance_method))
        metrics = engine.metrics()
        drafted, accepted = sum(metrics.draft_tokens.values()), sum(metrics.accepted_tokens.values())
        assert drafted > 30
        # What is drafted after a stop token is not accepted.
        assert accepted > (0.99 if not PARAMS[name].stop_token_ids else 0.7) * drafted


def test_followers_find_only_what_was_computed() -> None:
    """Prompts that are another output so far and a little more, arriving while that one is being written."""
    engine = toy_engine(target(), DRAFTERS["itself"](), k=2)
    line = make_request("line", (0, 1, 2), SamplingParams(temperature=0, max_tokens=40))
    engine.add(line)
    text, prompts, found = [0, 1, 2], dict[str, Any](), dict[str, Any]()
    for step in range(200):
        for event in engine.step():
            found[event.id] = found.get(event.id, ()) + event.tokens
        text = [0, 1, 2, *found.get("line", ())]
        if step < 12:
            kv_cache = make_request(f"f{step}", (*text, 3, 4), SamplingParams(temperature=1.0, seed=step, max_tokens=6))
            prompts[kv_cache.id] = kv_cache
            engine.add(kv_cache)
        engine.check_integrity()
    assert not engine.has_work
    assert engine.metrics().prefix_cache_hits > 0
    for id, kv_cache in prompts.items():
        alone = run_all(toy_engine(target(prefix_caching=False), None), [kv_cache])
        assert found[id] == tokens_of(alone)[id], id


class Late(ScriptedDrafter):
    """Hands in what it drafted a round ago, as a slow or restarted drafter would."""

    def __init__(self) -> None:
        super().__init__([0, 1, 2])
        self._last: dict[str, Draft] = {}

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        before = dict(self._last)
        self._last = {draft.id: draft for draft in super().propose(contexts, budgets)}
        return list(before.values())


@pytest.mark.parametrize("name", PARAMS)
def test_late_drafts_and_drafts_of_unknown_requests_are_dropped(name: str) -> None:
    engine = toy_engine(target(), Late(), k=3)
    assert tokens_of(run_all(engine, requests(PARAMS[name]))) == plain(name)
    assert engine.metrics().draft_tokens == {}


@pytest.mark.parametrize("drafter", ["none", "itself", "tree"])
def test_a_second_turn_does_not_find_the_last_token_of_the_first(drafter: str) -> None:
    """The last token of an output is known and was never computed, also where it fills a page."""
    for length in range(1, 9):
        engine = toy_engine(target(), DRAFTERS[drafter](), k=4)
        first = make_request("first", (0, 1, 2), SamplingParams(temperature=0, max_tokens=length))
        text = (0, 1, 2, *tokens_of(run_all(engine, [first]))["first"])
        second = make_request("second", (*text, 4), SamplingParams(temperature=1.0, seed=3, max_tokens=6))
        alone = tokens_of(run_all(toy_engine(target(prefix_caching=False), None), [second]))
        assert tokens_of(run_all(engine, [second])) == alone, length
