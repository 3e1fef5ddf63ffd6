"""Drafts after all outcomes of a verification: what is kept, what a step waits for, and how large such drafts are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cospec.core.tree import MAX_NODES
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext, Request, RequestState, ScheduledRequest
from cospec.drafters.model import ModelDrafter
from cospec.execution.acceptance_rate import AcceptanceRate
from cospec.execution.draft_buffer import DraftBuffer, DraftRequest, best_path, fit_to_budget
from cospec.execution.draft_wait import FEWEST, WAIT_EVERY, DraftWait, OutcomeNodes
from cospec.models.toy import ToyModel
from cospec.rng.random_streams import StreamKind
from cospec.sampling_params import SamplingParams
from harness.overlap import under
from harness.toys import make_request, run_all, tokens_of, toy_engine, with_pool

# After 1 2 3 the target verifies 4 5; the drafter has branches after each number of these.
#   4 ── 5 ── 6 ── 16        all accepted, and 6
#   │    └─── 7 ── 17        all accepted, and 7
#   ├─── 8 ── 18 ── 28       one accepted
#   9 ── 19                  none accepted
OUTCOMES = Draft(
    "s", 3, (4, 5, 6, 7, 8, 9, 16, 17, 18, 19, 28), (-1, 0, 1, 1, 0, -1, 2, 3, 4, 5, 8), ("d",) * 11,
    confidence=np.array([0.8, 0.7, 0.6, 0.2, 0.1, 0.1, 0.9, 0.9, 0.9, 0.9, 0.5]),
)  # fmt: skip


def ask() -> DraftRequest:
    context = DraftContext("s", [1, 2, 3, 4, 5], 2, SamplingParams(), 0, StreamKind.TARGET, assumed=2)
    return DraftRequest(context, DraftBudget(3, 12, (4,), outcomes=True))


def entry(tokens: list[int]) -> ScheduledRequest:
    request = Request("s", (1, 2), SamplingParams(), 0)
    return ScheduledRequest(RequestState(request, tokens, len(tokens) - 1), 1, DraftBudget(4, 4))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("tokens", "wanted", "used"),
    [
        ([1, 2, 3, 4, 5, 6], (16,), (1, 0)),
        ([1, 2, 3, 4, 5, 7], (17,), (1, 0)),
        ([1, 2, 3, 4, 8], (18, 28), (0, 1)),
        ([1, 2, 3, 9], (19,), (0, 1)),
        ([1, 2, 3, 8], None, (0, 0)),
        ([1, 2, 3, 4, 9], None, (0, 0)),
        ([1, 2, 3, 4, 5, 8], None, (0, 0)),
        ([1, 2, 3, 4, 5, 6, 16], None, (0, 0)),
    ],
)
def test_the_branch_of_the_outcome_is_kept(
    tokens: list[int], wanted: tuple[int, ...] | None, used: tuple[int, int], late: bool
) -> None:
    buffer, request = DraftBuffer(), ask()
    buffer.add([request])
    if not late:
        buffer.deliver([request], [OUTCOMES])
    buffer.drop_stale(entry(tokens))
    if late:
        buffer.deliver([request], [OUTCOMES])
        buffer.drop_stale(entry(tokens))
    buffer.check_integrity()
    assert bool(buffer.ready) is (wanted is not None)
    found = buffer.take(entry(tokens))
    assert (found.tokens if found else None) == wanted
    assert found is None or (found.base_len == len(tokens) and found.is_chain)
    assert (buffer.used["likeliest"], buffer.used["other"]) == used


def test_tokens_that_the_target_verifies_are_not_verified_again() -> None:
    buffer, request = DraftBuffer(), ask()
    buffer.add([request])
    buffer.deliver([request], [OUTCOMES])
    buffer.drop_stale(entry([1, 2, 3]))
    assert not buffer.ready


@pytest.mark.parametrize(
    ("budget", "wanted"),
    [
        (DraftBudget(3, 3), (4, 5, 6)),  # a chain: the path with the most expected tokens
        (DraftBudget(3, 4), (4, 5, 6, 7)),  # 7 has 0.8 * 0.7 * 0.2
        (DraftBudget(2, 5), (4, 5, 8, 9, 19)),
        (DraftBudget(1, 1), (4,)),
    ],
)
def test_a_tree_is_cut_to_a_budget(budget: DraftBudget, wanted: tuple[int, ...]) -> None:
    found = fit_to_budget(OUTCOMES, budget)
    assert found is not None and found.tokens == wanted
    assert found.depth <= budget.depth
    for node, parent in enumerate(found.parents):
        assert parent < node


def test_a_tree_of_drawn_tokens_is_kept_or_dropped_as_a_whole() -> None:
    tree = Draft("s", 3, (4, 5, 6), (-1, -1, 0), ("d",) * 3, q=np.full((3, 8), 1 / 8), confidence=np.full(3, 0.5))
    assert fit_to_budget(tree, DraftBudget(3, 3)) is tree
    assert fit_to_budget(tree, DraftBudget(2, 2)) is None


@pytest.mark.parametrize(("threshold", "wanted"), [(0.0, (18, 28)), (0.5, (18,)), (0.95, None)])
def test_what_is_less_probable_than_the_threshold_is_not_verified(
    threshold: float, wanted: tuple[int, ...] | None
) -> None:
    """The guess itself may be improbable: 8 has a tenth."""
    buffer, request, tokens = DraftBuffer(), ask(), [1, 2, 3, 4, 8]
    buffer.add([request])
    buffer.deliver([request], [OUTCOMES])
    found = buffer.take(replace(entry(tokens), budget=DraftBudget(4, 4, threshold=threshold)))
    assert (found.tokens if found else None) == wanted


def test_the_best_path_has_the_most_expected_tokens() -> None:
    tree = Draft("s", 3, (4, 5, 6, 7, 8), (-1, -1, 0, 1, 3), ("d",) * 5, confidence=np.array([0.5, 0.4, 0.1, 1, 1]))
    assert best_path(tree) == [1, 3, 4]  # 1.2 expected tokens against 0.55


def test_a_step_waits_where_waiting_commits_more_tokens_per_second() -> None:
    wait = DraftWait()
    assert wait.pays(5, 1), "nothing is known"
    wait.waited(1.0)
    wait.stepped(1.0)
    assert wait.pays(5, 1), "the tokens of a draft are not known"
    wait.committed([Commit("s", 3, (4, 5, 6), (0, 1), 4, drafted=2), Commit("t", 3, (4,), (), 4)])
    assert not wait.pays(5, 1)  # (15 + 1) / 1 against 18 / 2
    assert wait.pays(0, 6)  # 6 / 1 against 18 / 2
    assert not wait.pays(2, 4)  # (6 + 4) / 1 against 18 / 2
    assert any([wait.pays(5, 1) for _ in range(WAIT_EVERY)]), "the time of a draft is measured again"
    wait.waited(1.0)
    assert not wait.pays(5, 1)


@pytest.mark.parametrize(
    ("fixed", "per_node", "least", "most"),
    [
        (0.0, 0.02, 40, 60),  # a node takes 20 ms, so 50 are drafted in a step
        (0.0, 0.2, FEWEST, 25),
        (0.0, 0.01, MAX_NODES, MAX_NODES),
        (3.0, 0.0, 48, MAX_NODES),  # the link is slow: smaller drafts come no sooner
    ],
)
def test_drafts_are_as_large_as_the_time_of_a_step_allows(fixed: float, per_node: float, least: int, most: int) -> None:
    nodes, found = OutcomeNodes(), list[int]()
    nodes.stepped(1.0)
    for _ in range(300):
        nodes.waited(max(0.0, fixed + per_node * nodes.count - 1.0))
        found.append(nodes.count)
    assert least <= np.mean(found[100:]) <= most


def test_the_rate_follows_what_was_accepted() -> None:
    rate = AcceptanceRate()
    before = rate.value
    rate.learn([Commit("s", 3, (4, 9), (0,), 4, drafted=3, rejected=True)] * 200)
    assert before > rate.value == pytest.approx(0.5, abs=0.02)
    rate.learn([Commit("s", 3, (4,), (), 4)] * 50)
    assert rate.value == pytest.approx(0.5, abs=0.02), "a step without a draft teaches nothing"


VOCAB = 6
GREEDY = SamplingParams(temperature=0, max_tokens=60)


def target() -> ToyModel:
    return with_pool(ToyModel(VOCAB, order=2, seed=1, sharpness=2.0), 256, 4)


@pytest.mark.parametrize("executor", ["inline", "slow", "gaps"])
def test_most_drafts_are_made_during_verification(executor: str) -> None:
    """A drafter that is often wrong: branches after other outcomes than the likeliest one are used too."""
    requests = [make_request(f"r{n}", (n, 1, 2), GREEDY) for n in range(4)]
    plain = tokens_of(run_all(toy_engine(target(), None), requests))
    drafter = ModelDrafter(with_pool(ToyModel(VOCAB, order=1, seed=3), 256, 4))
    engine = under(toy_engine(target(), drafter, "match", k=3), "draft-for-outcomes", executor)
    assert tokens_of(run_all(engine, requests)) == plain
    used, steps = engine.metrics().drafts_ahead, engine.metrics().steps
    assert used["other"] > 0
    assert used["other"] + used["likeliest"] > steps
    other = under(toy_engine(target(), drafter, "match", k=3), "draft-ahead", executor)
    assert tokens_of(run_all(other, requests)) == plain
    assert other.metrics().drafts_ahead["other"] == 0
