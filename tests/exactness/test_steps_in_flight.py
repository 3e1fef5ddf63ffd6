"""Steps in flight keep text and distribution of one step at a time, under aborts and errors as well."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest

from cospec.core.plugin_base import Drafter
from cospec.core.scheduler import Scheduler
from cospec.core.types import Commit, FinishReason, Request, ScheduledRequest
from cospec.drafters.model import ModelDrafter
from cospec.drafters.ngram import NgramDrafter
from cospec.drafters.suffix import SuffixDrafter
from cospec.errors import InvalidInput
from cospec.models.toy import ToyModel
from cospec.sampling_params import SamplingParams
from cospec.text.input_processor import make_requests
from harness.enumerated_draws import total_variation
from harness.in_flight import Disturbed, QueuedVerifier, most_in_flight, run_disturbed, with_steps_in_flight
from harness.overlap import MODES, under
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

EXACT = 1e-12
VOCAB = 6
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=20),
    "edited": SamplingParams(
        temperature=0, max_tokens=20, repetition_penalty=1.3, min_tokens=5, stop_token_ids=(3,), logprobs=2
    ),
    "seeded": SamplingParams(temperature=0.9, max_tokens=20, seed=11, n=2),
}
DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "itself": lambda: ModelDrafter(target()),
    "other": lambda: ModelDrafter(ToyModel(VOCAB, order=1, seed=3)),
    "ngram": lambda: NgramDrafter(1, 3),
    "suffix": lambda: SuffixDrafter(),
    "tree": lambda: ScriptedDrafter([0, 1, 2, 3, 4, 5, 0, 1], [-1, -1, -1, 0, 1, 1, 5, 2]),
}


def target(pages: int = 256) -> ToyModel:
    return with_pool(ToyModel(VOCAB, order=2, seed=1, sharpness=2.0), pages, 4)


def requests(params: SamplingParams) -> list[Request]:
    prompts = [[(3 * n + i * i) % VOCAB if i > 5 else i for i in range(2 + 3 * n)] for n in range(6)]
    return [each for n, prompt in enumerate(prompts) for each in make_requests(f"r{n}", prompt, params)]


@cache
def wanted(name: str) -> dict[str, tuple[int, ...]]:
    return tokens_of(run_all(toy_engine(target(), None), requests(PARAMS[name])))


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("execution_mode", MODES)
def test_outputs_are_identical(execution_mode: str, drafter: str, count: int) -> None:
    for executor in ("inline", "worker"):
        for name, params in PARAMS.items():
            made = under(toy_engine(target(), DRAFTERS[drafter](), k=3), execution_mode, executor)
            engine = with_steps_in_flight(made, count)
            assert tokens_of(run_all(engine, requests(params))) == wanted(name)
            assert most_in_flight(engine) == count
            assert engine.metrics().kv_cache_usage == 0 == engine.metrics().steps_in_flight


@pytest.mark.parametrize("acceptance_method", ["rejection", "block"])
@pytest.mark.parametrize("execution_mode", MODES)
def test_the_distribution_is_kept(execution_mode: str, acceptance_method: str) -> None:
    """Every path through the random choices of drafts and verification."""
    model, plain = ToyModel(2, order=1, seed=1), SamplingParams(max_tokens=6)
    made = toy_engine(model, ModelDrafter(ToyModel(2, order=1, seed=5)), acceptance_method, 2)
    engine = with_steps_in_flight(under(made, execution_mode), 3)
    at_once = 1 if execution_mode == "draft-ahead" else 16  # a request that runs alone gets drafts ahead
    found = enumerated_distribution(engine, (0, 1), plain, 4, at_once=at_once)
    assert total_variation(found, joint_distribution_of(ToyModel(2, order=1, seed=1), plain, (0, 1), 4)) < EXACT


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("execution_mode", MODES)
def test_outputs_are_identical_in_a_small_cache(execution_mode: str, count: int) -> None:
    """A request in flight keeps its pages, the others are preempted and admitted again in pieces."""
    preempted = 0
    for pages, chunk in ((12, 16), (14, 64), (20, 7)):
        made = toy_engine(target(pages), DRAFTERS["other"](), k=4, max_num_batched_tokens=chunk)
        engine = with_steps_in_flight(under(made, execution_mode), count)
        assert tokens_of(run_all(engine, requests(PARAMS["seeded"]))) == wanted("seeded")
        preempted += engine.metrics().num_preemptions
    assert preempted > 0


def disturbed(execution_mode: str, count: int, seed: int, drafter: str = "other", pages: int = 24) -> Disturbed:
    chance = random.Random(seed)
    made = toy_engine(target(pages), DRAFTERS[drafter](), k=3, max_num_batched_tokens=40)
    engine = with_steps_in_flight(
        under(made, execution_mode, chance.choice(["inline", "worker"])),
        count,
        lambda: chance.choice(["before", "after"]) if chance.random() < 0.08 else None,
    )
    found = run_disturbed(engine, requests(PARAMS["seeded"]), seed, aborts=0.06)
    assert engine.metrics().kv_cache_usage == 0 == engine.metrics().steps_in_flight
    return found


def differing(found: Disturbed) -> set[str]:
    """The requests whose text is not what it should be, as far as they came."""
    texts = wanted("seeded")
    whole = {FinishReason.LENGTH, FinishReason.STOP}
    return {
        id
        for id, tokens in found.tokens.items()
        if tokens != (texts[id] if found.ends[id] in whole else texts[id][: len(tokens)])
    }


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("drafter", ["none", "other", "tree"])
@pytest.mark.parametrize("execution_mode", MODES)
def test_aborts_and_errors_change_no_other_request(execution_mode: str, drafter: str, count: int) -> None:
    ends: list[FinishReason] = []
    for seed in range(6):
        found = disturbed(execution_mode, count, seed, drafter)
        assert set(found.ends) == set(found.tokens), "a request was lost"
        assert not differing(found)
        ends += found.ends.values()
    assert ends.count(FinishReason.ABORT) > 3
    assert ends.count(FinishReason.LENGTH) > 3 * ends.count(FinishReason.ERROR)


def test_an_error_of_every_step_ends_every_request() -> None:
    engine = with_steps_in_flight(toy_engine(target(), DRAFTERS["other"](), k=3), 2, lambda: "after")
    events = run_all(engine, requests(PARAMS["greedy"]))
    assert all(
        own[-1].finish is FinishReason.ERROR and "unreachable" in (own[-1].error or "") for own in events.values()
    )
    assert engine.metrics().kv_cache_usage == 0


def test_an_aborted_id_can_be_used_again_once_its_step_arrived() -> None:
    engine = with_steps_in_flight(toy_engine(target(), None), 2)
    first, second = requests(PARAMS["greedy"])[:2]
    for request in (first, second):
        engine.add(request)
    engine.step()
    for request in (first, second):
        engine.abort([request.id])
    (left,) = [request for request in (first, second) if engine.scheduler.is_in_flight(request.id)]
    with pytest.raises(InvalidInput, match="request id"):
        engine.add(left)
    assert engine.step() == [] and not engine.has_work
    assert tokens_of(run_all(engine, [left]))[left.id] == wanted("greedy")[left.id]


def test_one_request_is_never_in_two_steps() -> None:
    """The control: a scheduler that does not mark requests in flight is seen."""

    def unmarked(self: Scheduler, entries: Sequence[ScheduledRequest]) -> list[ScheduledRequest]:
        return list(entries)

    def current(self: Scheduler, entry: ScheduledRequest) -> bool:
        return True

    with (
        patch.object(Scheduler, "start_step", unmarked),
        patch.object(Scheduler, "clear_in_flight", unmarked),
        patch.object(Scheduler, "is_current", current),
    ):
        engine = with_steps_in_flight(toy_engine(target(), None), 2)
        with pytest.raises(AssertionError, match="step"):
            run_all(engine, requests(PARAMS["greedy"]))


class LostCommits(QueuedVerifier):
    """Wrong on purpose: accepted branches stay where the draft had them in the cache."""

    def commit(self, commits: Sequence[Commit]) -> None:
        pass


def branching_outputs(cls: type[QueuedVerifier]) -> dict[str, tuple[int, ...]]:
    made = toy_engine(target(), ScriptedDrafter([4, 1, 5, 0], [-1, -1, 1, 2]), "match", k=3, max_nodes=4)
    return tokens_of(run_all(with_steps_in_flight(made, 4, cls=cls), requests(PARAMS["greedy"]), check=False))


def test_a_commit_that_is_lost_is_seen() -> None:
    assert branching_outputs(QueuedVerifier) == wanted("greedy")
    assert branching_outputs(LostCommits) != wanted("greedy")


def test_an_aborted_request_keeps_its_pages_until_its_step_arrives() -> None:
    engine = with_steps_in_flight(toy_engine(target(), DRAFTERS["other"](), k=3), 4)
    asked = requests(PARAMS["greedy"])
    for request in asked:
        engine.add(request)
    engine.step()
    in_flight = [request.id for request in asked if engine.scheduler.is_in_flight(request.id)]
    engine.abort([request.id for request in asked])
    assert len(in_flight) > 2 and engine.metrics().steps_in_flight == 3
    for left in (2, 1, 0):
        assert engine.metrics().kv_cache_usage > 0 and engine.has_work
        engine.check_integrity()
        assert engine.step() == []
        assert engine.metrics().steps_in_flight == left
    assert engine.metrics().kv_cache_usage == 0 and not engine.has_work
    assert engine.metrics().requests_finished == {"abort": len(asked)}


def test_microbatches_share_the_requests_evenly() -> None:
    engine = with_steps_in_flight(toy_engine(target(), None), 4)
    sizes: list[int] = []
    submit = QueuedVerifier.submit

    def noted(self: QueuedVerifier, entries: Sequence[ScheduledRequest], drafts: Any) -> Any:
        sizes.append(len(entries))
        return submit(self, entries, drafts)

    with patch.object(QueuedVerifier, "submit", noted):
        run_all(engine, [make_request(f"r{n}", (n % 5, 1), PARAMS["greedy"]) for n in range(10)])
    assert sizes[:4] == [3, 3, 2, 2]
    assert max(sizes) == 3
