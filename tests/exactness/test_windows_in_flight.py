"""Several windows of one request in flight keep text and distribution, whatever is accepted, aborted or lost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from threading import Event
from unittest.mock import PropertyMock, patch

import pytest

from cospec.core.engine import Engine
from cospec.core.types import Draft, DraftBudget, DraftContext, ScheduledRequest
from cospec.drafters.model import ModelDrafter
from cospec.execution.overlapped_base import OverlappedMode
from cospec.execution.windows_in_flight import WindowsInFlight
from cospec.models.toy import ToyModel
from cospec.sampling_params import SamplingParams
from cospec.text.input_processor import make_requests
from harness.enumerated_draws import Unsound, total_variation
from harness.in_flight import cancelled, most_in_flight, run_disturbed, with_steps_in_flight
from harness.methods import override
from harness.overlap import under
from harness.reference import joint_distribution_of
from harness.toys import (
    enumerated_distribution,
    enumerated_distribution_after,
    make_request,
    run_all,
    tokens_of,
    toy_engine,
    with_pool,
)

EXACT = 1e-12
VOCAB = 6
PROMPT = [1, 2, 3]
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=40),
    "edited": SamplingParams(
        temperature=0.8, seed=5, max_tokens=40, repetition_penalty=1.3, min_tokens=9, stop_token_ids=(3,), logprobs=2
    ),
    "seeded": SamplingParams(temperature=0.9, max_tokens=40, seed=11),
}


def target(pages: int = 64) -> ToyModel:
    return with_pool(ToyModel(VOCAB, order=2, seed=1, sharpness=2.0), pages, 4)


def ahead(drafter: ToyModel, count: int, executor: str = "inline", acceptance_method: str = "auto") -> Engine:
    made = toy_engine(target(), ModelDrafter(drafter), acceptance_method, k=2)
    return always(with_steps_in_flight(under(made, "draft-ahead", executor), count))


def always(engine: Engine) -> Engine:
    """Windows are submitted whatever the drafter's acceptance."""
    windows = engine.execution_mode.windows_ahead
    assert isinstance(windows, WindowsInFlight)
    windows.least_probability = 0.0
    return engine


def written(engine: Engine, params: SamplingParams, check: bool = True) -> dict[str, tuple[int, ...]]:
    return tokens_of(run_all(engine, make_requests("r", PROMPT, params), check=check))


@pytest.mark.parametrize("executor", ["inline", "worker"])
@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("params", PARAMS)
def test_one_request_fills_the_pipeline(params: str, count: int, executor: str) -> None:
    wanted = written(toy_engine(target(), None), PARAMS[params])
    for drafter in (ToyModel(VOCAB, order=2, seed=1, sharpness=2.0), ToyModel(VOCAB, order=1, seed=3)):
        engine = ahead(drafter, count, executor)
        assert written(engine, PARAMS[params]) == wanted
        assert most_in_flight(engine) == count
        assert engine.metrics().drafts_ahead["in flight"] > 0
        assert engine.metrics().steps_in_flight == 0 == engine.metrics().kv_cache_usage
    assert engine.metrics().cancelled_steps == cancelled(engine) > 0  # the second drafter is often wrong


def test_a_right_drafter_gets_every_window_accepted() -> None:
    """One traversal commits three tokens, and the pipeline takes a window in every turn."""
    engine = ahead(ToyModel(VOCAB, order=2, seed=1, sharpness=2.0), 4)
    written(engine, PARAMS["greedy"])
    metrics = engine.metrics()
    assert metrics.steps <= 2 + 40 // 3 + 1
    assert metrics.drafts_ahead["in flight"] >= 10


def distance(acceptance_method: str, count: int, length: int = 4) -> float:
    """The total variation between the engine's distribution of the first tokens, by enumeration, and the target's."""
    plain = SamplingParams(max_tokens=length + 1)
    made = toy_engine(ToyModel(2, order=1, seed=1), ModelDrafter(ToyModel(2, order=1, seed=5)), acceptance_method, 1)
    engine = always(with_steps_in_flight(under(made, "draft-ahead"), count))
    found = enumerated_distribution(engine, (0, 1), plain, length, at_once=1)
    assert engine.metrics().drafts_ahead["in flight"] > 0 < cancelled(engine)
    return total_variation(found, joint_distribution_of(ToyModel(2, order=1, seed=1), plain, (0, 1), length))


@pytest.mark.parametrize("acceptance_method", ["rejection", "block"])
@pytest.mark.parametrize("count", [2, 3])
def test_the_distribution_is_kept(acceptance_method: str, count: int) -> None:
    """Every path through the random choices of drafts and verification; no random number serves twice."""
    assert distance(acceptance_method, count) < EXACT


@pytest.mark.parametrize("acceptance_method", ["rejection", "block"])
def test_the_distribution_is_kept_when_a_neighbour_ends(acceptance_method: str) -> None:
    """Drafts ahead and further windows begin in the middle of an output, when the request runs alone."""
    plain, greedy = SamplingParams(max_tokens=6), SamplingParams(temperature=0, max_tokens=3, seed=1 << 20)
    model, drafter = ToyModel(2, order=1, seed=1), ModelDrafter(ToyModel(2, order=1, seed=5))
    engine = always(with_steps_in_flight(under(toy_engine(model, drafter, acceptance_method, 1), "draft-ahead"), 3))
    found = enumerated_distribution_after(engine, make_request("neighbour", (1, 0), greedy), (0, 1), plain, 5)
    assert engine.metrics().drafts_ahead["in flight"] > 0 < cancelled(engine)
    assert total_variation(found, joint_distribution_of(ToyModel(2, order=1, seed=1), plain, (0, 1), 5)) < EXACT


def keeps_refuted_windows() -> AbstractContextManager[object]:
    """Wrong on purpose: a window counts whatever the windows before have committed."""
    return patch.object(ScheduledRequest, "holds", new_callable=PropertyMock, return_value=True)


@pytest.mark.parametrize("acceptance_method", ["rejection", "block"])
def test_a_refuted_window_that_counts_is_seen(acceptance_method: str) -> None:
    with keeps_refuted_windows(), pytest.raises((AssertionError, Unsound)):
        assert distance(acceptance_method, 3) < EXACT


def test_a_refuted_window_that_counts_changes_the_text() -> None:
    wanted = written(toy_engine(target(), None), PARAMS["greedy"])
    with keeps_refuted_windows():
        assert written(ahead(ToyModel(VOCAB, order=1, seed=3), 4), PARAMS["greedy"], check=False) != wanted


def test_one_seed_for_two_windows_is_seen() -> None:
    """A refuted window and a later window may have the same base."""
    with patch("cospec.execution.draft_dispatcher.AHEAD_SEEDS", 0), pytest.raises(Unsound, match="twice"):
        distance("rejection", 3, length=6)


@pytest.mark.parametrize("seed", range(8))
def test_aborts_and_errors_change_no_other_request(seed: int) -> None:
    """One request or two share four steps in flight; a request alone has several windows in flight while steps fail."""
    chance, at_once = random.Random(seed), 1 + seed % 2
    asked = [each for n in range(8) for each in make_requests(f"r{n}", [n % VOCAB, 1, 2], PARAMS["seeded"])]
    wanted = tokens_of(run_all(toy_engine(target(), None), asked))
    made = toy_engine(target(24), ModelDrafter(ToyModel(VOCAB, order=1, seed=3)), k=2, max_num_seqs=at_once)
    engine = with_steps_in_flight(
        under(made, "draft-ahead", chance.choice(["inline", "worker"])),
        4,
        lambda: chance.choice(["before", "after"]) if chance.random() < 0.05 else None,
    )
    always(engine)
    found = run_disturbed(engine, asked, seed, aborts=0.02)
    assert set(found.ends) == {request.id for request in asked}, "a request was lost"
    assert all(tokens == wanted[id][: len(tokens)] for id, tokens in found.tokens.items())
    assert engine.metrics().drafts_ahead["in flight"] > 0 or at_once == 2
    assert engine.metrics().kv_cache_usage == 0 == engine.metrics().steps_in_flight


def test_a_drafter_that_is_often_wrong_gets_one_window() -> None:
    """A window that is hardly ever valid would only delay the next one."""
    right, wrong = (ToyModel(VOCAB, order=2, seed=1, sharpness=2.0), ToyModel(VOCAB, order=1, seed=3))
    used = []
    for drafter in (right, wrong):
        made = toy_engine(target(), ModelDrafter(drafter), k=2)
        engine = with_steps_in_flight(under(made, "draft-ahead"), 4)
        for _ in range(5):  # the mode learns the acceptance
            written(engine, PARAMS["greedy"])
        before = engine.metrics().drafts_ahead["in flight"]
        written(engine, PARAMS["greedy"])
        used.append(engine.metrics().drafts_ahead["in flight"] - before)
    assert used[0] > 5 and used[1] == 0


def test_accepted_windows_leave_the_probability_of_later_ones_alone() -> None:
    """A drafter that was right in nine of ten tokens keeps four stages busy to the end of its output."""
    made = toy_engine(target(), ModelDrafter(ToyModel(VOCAB, order=2, seed=1, sharpness=2.0)), k=1)
    engine = with_steps_in_flight(under(made, "draft-ahead"), 4)
    assert isinstance(engine.execution_mode, OverlappedMode)
    override(engine.execution_mode.dispatcher.rate, value=0.9, learn=lambda commits: None)
    written(engine, SamplingParams(temperature=0, max_tokens=120, ignore_eos=True))
    metrics = engine.metrics()
    assert metrics.cancelled_steps == 0
    assert metrics.steps - metrics.drafts_ahead["in flight"] <= 3, "the prompt, the first draft and the end"


class Blocked(ModelDrafter):
    """Drafts ahead when ``released`` is set, or after some seconds."""

    def __init__(self, model: ToyModel) -> None:
        super().__init__(model)
        self.released = Event()

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        if any(context.assumed for context in contexts):
            self.released.wait(5)
        return super().propose(contexts, budgets)


def test_outputs_do_not_wait_for_the_draft_of_a_further_window() -> None:
    drafter = Blocked(ToyModel(VOCAB, order=2, seed=1, sharpness=2.0))
    made = toy_engine(target(), drafter, k=2)
    engine = always(with_steps_in_flight(under(made, "draft-ahead", "worker"), 3))
    mode = engine.execution_mode
    assert isinstance(mode, OverlappedMode) and mode.windows_ahead is not None
    submit, pending = mode.windows_ahead.submit, mode.dispatcher.buffer.pending
    override(mode.windows_ahead, submit=lambda plan, oldest_done: submit(plan, lambda: True))
    [request] = make_requests("r", PROMPT, PARAMS["greedy"])
    engine.add(request)
    while not any(each.context.assumed for each in pending.values()):
        engine.step()
    assert engine.metrics().drafts_ahead["in flight"] == 0
    drafter.released.set()
    tokens: tuple[int, ...] = ()
    while engine.has_work:
        tokens += sum((event.tokens for event in engine.step()), ())
    wanted = written(toy_engine(target(), None), PARAMS["greedy"])
    assert wanted[request.id][-len(tokens) :] == tokens
    engine.close()


def test_an_aborted_request_gets_no_further_windows() -> None:
    engine = ahead(ToyModel(VOCAB, order=2, seed=1, sharpness=2.0), 5)
    [request] = make_requests("r", PROMPT, PARAMS["greedy"])
    engine.add(request)
    while not engine.metrics().drafts_ahead["in flight"]:
        engine.step()
    engine.abort([request.id])
    before = engine.metrics().drafts_ahead["in flight"]
    while engine.has_work:
        engine.step()
    assert engine.metrics().drafts_ahead["in flight"] == before
    engine.check_integrity()
