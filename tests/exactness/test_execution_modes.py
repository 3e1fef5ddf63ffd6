"""No order of drafting and verification changes the distribution, nor any token of a greedy or seeded request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from cospec.core.interfaces import ModeComponents
from cospec.core.plugin_base import Drafter
from cospec.core.types import Draft, Request, ScheduledRequest, SpeculationParams
from cospec.drafters.model import ModelDrafter
from cospec.drafters.ngram import NgramDrafter
from cospec.execution.draft_ahead import DraftAhead
from cospec.execution.draft_buffer import DraftRequest
from cospec.execution.draft_dispatcher import AHEAD_SEEDS, DraftDispatcher
from cospec.models.toy import ToyModel
from cospec.rng.random_streams import derive_seed
from cospec.sampling_params import SamplingParams
from cospec.text.input_processor import make_requests
from harness.enumerated_draws import Unsound, total_variation
from harness.overlap import MODES, Picky, under
from harness.pools import pool_of
from harness.reference import joint_distribution_of
from harness.toys import (
    ScriptedDrafter,
    enumerated_distribution,
    make_request,
    run_all,
    tokens_of,
    toy_engine,
    with_pool,
)

EXACT, SEEN = 1e-12, 1e-3
PROMPT, LENGTH = (0, 1), 5  # so long that what was drafted ahead is judged
PLAIN = SamplingParams(max_tokens=6)
OVERLAPPED = [name for name in MODES if name != "sequential"]


def target(vocab: int = 2) -> ToyModel:
    return ToyModel(vocab, order=1, seed=1)


def other(vocab: int = 2) -> Drafter:
    return ModelDrafter(ToyModel(vocab, order=1, seed=5))


def error(
    execution_mode: str,
    acceptance_method: str,
    k: int,
    executor: str = "inline",
    cls: Callable[..., object] | None = None,
) -> float:
    engine = under(toy_engine(target(), other(), acceptance_method, k), execution_mode, executor, cls)
    return total_variation(
        enumerated_distribution(engine, PROMPT, PLAIN, LENGTH), joint_distribution_of(target(), PLAIN, PROMPT, LENGTH)
    )


@pytest.mark.parametrize("executor", ["inline", "wired", "slow", "gaps"])
@pytest.mark.parametrize("acceptance_method", ["rejection", "block"])
@pytest.mark.parametrize("execution_mode", OVERLAPPED)
def test_the_distribution_is_kept(execution_mode: str, acceptance_method: str, executor: str) -> None:
    """Every path through drafts made in time, late, ahead and never, here and by wire; no number serves twice."""
    for k in (1, 2) if executor == "inline" else (1,):
        assert error(execution_mode, acceptance_method, k, executor) < EXACT


class OneSeed(DraftDispatcher):
    """Draws what is made ahead with the numbers of the length that it hopes to reach."""

    def continue_draft(self, entry: ScheduledRequest, draft: Draft) -> DraftRequest | None:
        ask = super().continue_draft(entry, draft)
        return ask and replace(ask, context=replace(ask.context, seed=entry.sequence.request.seed))


class AheadWithOneSeed(DraftAhead):
    def __init__(self, components: ModeComponents) -> None:
        super().__init__(components)
        self.dispatcher = OneSeed(components)


def test_numbers_that_serve_twice_are_seen() -> None:
    with pytest.raises(Unsound, match="was used twice"):
        error("draft-ahead", "block", 2, cls=AheadWithOneSeed)


@pytest.mark.parametrize("acceptance_method", ["rejection", "block"])
def test_choosing_drafts_by_their_tokens_is_seen(acceptance_method: str) -> None:
    assert error("draft-ahead", acceptance_method, 2, cls=Picky) > SEEN


def test_seeds_of_drafts_made_ahead_are_their_own() -> None:
    seeds = {derive_seed(seed, AHEAD_SEEDS + base) for seed in range(4) for base in range(200)}
    outputs = {derive_seed(seed, index) for seed in range(4) for index in range(200)}
    assert len(seeds) == 800 and not seeds & outputs


VOCAB = 6
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=20),
    "penalised": SamplingParams(
        temperature=0, max_tokens=20, repetition_penalty=1.3, min_tokens=5, stop_token_ids=(3,)
    ),
    "seeded": SamplingParams(temperature=0.9, max_tokens=20, seed=11, n=2),
}
DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "itself": lambda: ModelDrafter(strong()),
    "other": lambda: ModelDrafter(ToyModel(VOCAB, order=1, seed=3)),
    "ngram": lambda: NgramDrafter(1, 3),
    "tree": lambda: ScriptedDrafter([0, 1, 2, 3, 4, 5, 0, 1], [-1, -1, -1, 0, 1, 1, 5, 2]),
}


def strong(pages: int = 256) -> ToyModel:
    return with_pool(ToyModel(VOCAB, order=2, seed=1, sharpness=2.0), pages, 4)


def requests(params: SamplingParams, acceptance_method: str | None = None) -> list[Request]:
    prompts = [[(3 * n + i * i) % VOCAB if i > 5 else i for i in range(2 + 3 * n)] for n in range(5)]
    chosen = SpeculationParams(acceptance_method=acceptance_method)
    return [each for n, prompt in enumerate(prompts) for each in make_requests(f"r{n}", prompt, params, chosen)]


@cache
def plain(name: str) -> dict[str, tuple[int, ...]]:
    return tokens_of(run_all(toy_engine(strong(), None), requests(PARAMS[name])))


@pytest.mark.parametrize("executor", ["inline", "wired", "worker", "slow", "fragile"])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("execution_mode", OVERLAPPED)
def test_outputs_are_identical(execution_mode: str, drafter: str, executor: str) -> None:
    for name, params in PARAMS.items():
        engine = under(toy_engine(strong(), DRAFTERS[drafter](), k=3), execution_mode, executor)
        assert tokens_of(run_all(engine, requests(params))) == plain(name)
        assert engine.metrics().kv_cache_usage == 0


@pytest.mark.parametrize("executor", ["inline", "wired", "worker", "slow", "fragile"])
@pytest.mark.parametrize("execution_mode", OVERLAPPED)
def test_outputs_are_identical_in_a_small_cache(execution_mode: str, executor: str) -> None:
    """Preempted with drafts in the pool or on the way, and admitted again in pieces."""
    preempted = 0
    for pages, chunk in ((10, 5), (13, 64), (20, 7)):
        engine = under(
            toy_engine(strong(pages), DRAFTERS["other"](), k=4, max_num_batched_tokens=chunk), execution_mode, executor
        )
        assert tokens_of(run_all(engine, requests(PARAMS["seeded"]))) == plain("seeded")
        preempted += engine.metrics().num_preemptions
    assert preempted > 0


@pytest.mark.parametrize("executor", ["inline", "worker", "slow"])
@pytest.mark.parametrize("execution_mode", OVERLAPPED)
def test_arrivals_and_aborts_in_the_middle(execution_mode: str, executor: str) -> None:
    engine = under(
        toy_engine(strong(24), DRAFTERS["itself"](), k=3, max_num_batched_tokens=17), execution_mode, executor
    )
    arriving = requests(PARAMS["seeded"])
    found: dict[str, tuple[int, ...]] = {request.id: () for request in arriving}
    aborted, order = set(), [request.id for request in arriving]
    for step in range(10_000):
        if not arriving and not engine.has_work:
            break
        if arriving and step % 2 == 0:
            engine.add(arriving.pop(0))
        for event in engine.step():
            assert event.id not in aborted
            found[event.id] += event.tokens
        for id in order[1::3]:
            if id not in aborted and 2 <= len(found[id]) < 20:
                engine.abort([id])
                aborted.add(id)
        engine.check_integrity()
    assert aborted
    for id, tokens in plain("seeded").items():
        assert found[id] == (tokens[: len(found[id])] if id in aborted else tokens)


@pytest.mark.parametrize("execution_mode", ["pipelined", "draft-ahead", "draft-for-outcomes"])
def test_a_good_drafter_is_used(execution_mode: str) -> None:
    """The target as its own drafter: everything is accepted, and what was drafted ahead goes on where it was kept."""
    engine = under(toy_engine(strong(), ModelDrafter(strong()), k=3), execution_mode)
    run_all(engine, requests(PARAMS["greedy"], "match"))
    metrics = engine.metrics()
    drafted, accepted = sum(metrics.draft_tokens.values()), sum(metrics.accepted_tokens.values())
    assert drafted > 40 and accepted > 0.95 * drafted


@pytest.mark.parametrize("execution_mode", ["sequential", "draft-for-outcomes"])
def test_a_pool_learns_which_drafter_is_right(execution_mode: str) -> None:
    """Also from drafts that were made during a verification: a branch counts after the outcome alone."""
    drafters = {
        "good": ModelDrafter(with_pool(ToyModel(VOCAB, order=2, seed=1, sharpness=1.7), 256, 4)),
        "bad": ModelDrafter(with_pool(ToyModel(VOCAB, order=1, seed=3), 256, 4)),
    }
    pool = pool_of(drafters, "vote", "all", VOCAB)
    engine = toy_engine(strong(), pool, "match", 4)
    made = engine if execution_mode == "sequential" else under(engine, execution_mode)
    asked = [make_request(f"r{n}", (n, 1, 2), SamplingParams(temperature=0, max_tokens=100)) for n in range(4)]
    assert tokens_of(run_all(made, asked)) == tokens_of(run_all(toy_engine(strong(), None), asked))
    assert pool.weights()["good"] > 0.53 > 0.47 > pool.weights()["bad"]


@pytest.mark.parametrize("names", [("copy",), ("model",), None])
def test_a_request_with_some_drafters_of_a_pool_has_drafts_ahead(names: tuple[str, ...] | None) -> None:
    """A lookup drafts for no outcomes; its drafts continue all tokens in verification."""
    drafters = {"model": ModelDrafter(strong()), "copy": NgramDrafter(1, 3)}
    engine = under(toy_engine(strong(), pool_of(drafters, "union", "all", VOCAB), "match", 3), "draft-for-outcomes")
    chosen = SpeculationParams(drafters=names, acceptance_method="match")
    params = SamplingParams(temperature=0, max_tokens=60)
    asked = [make_request(f"r{n}", (n, 1, 2, n, 1, 2, n), params) for n in range(3)]
    wanted = tokens_of(run_all(toy_engine(strong(), None), asked))
    assert tokens_of(run_all(engine, [replace(each, speculation=chosen) for each in asked])) == wanted
    assert sum(engine.metrics().drafts_ahead.values()) > 10
    assert {name for name, count in engine.metrics().accepted_tokens.items() if count} <= set(names or drafters)
