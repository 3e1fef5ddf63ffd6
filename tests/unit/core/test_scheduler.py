"""Who goes when: order, ageing, pieces of prompts, room, and who gives way. No model at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from cospec.core.scheduler import AGEING_SECONDS, Scheduler, SchedulerLimits
from cospec.core.types import (
    BatchState,
    Commit,
    DraftBudget,
    Request,
    RequestState,
    RequestStatus,
    SchedulerOutput,
    SpeculationParams,
)
from cospec.models.block_manager import BlockPool
from cospec.policies.fixed import Fixed
from cospec.sampling_params import SamplingParams
from harness.methods import override


def scheduler(pages: int = 64, k: int = 0, seqs: int = 64, tokens: int = 64, max_len: int = 200) -> Scheduler:
    return Scheduler(BlockPool(pages, 4), Fixed(k), SchedulerLimits(seqs, tokens, max_len))


def sequence(id: str, length: int, max_tokens: int = 50, **more: Any) -> RequestState:
    prompt = tuple((ord(id[0]) * 7 + i * i) % 50 for i in range(length))
    more.setdefault("parent", id)
    return RequestState(Request(id, prompt, SamplingParams(max_tokens=max_tokens), 0, **more), list(prompt))


def shares(plan: SchedulerOutput) -> dict[str, tuple[int, int]]:
    return {entry.sequence.id: (entry.num_tokens, entry.budget.max_nodes) for entry in plan.entries}


def play(made: Scheduler, plan: SchedulerOutput, accepted: int = 0) -> None:
    """Compute what was planned; sequences that reach their end gain one token and the accepted ones."""
    commits = []
    for entry in plan.entries:
        one = entry.sequence
        base = len(one.tokens)
        gained: tuple[int, ...] = ()
        if entry.samples_token:
            kept = min(accepted, entry.budget.max_nodes)
            gained = tuple(range(kept + 1))
            one.computed = base + kept
        else:
            one.computed += entry.num_tokens
        one.tokens.extend(gained)
        commits.append(Commit(one.id, base, gained, tuple(range(max(0, len(gained) - 1))), one.computed))
    made.apply_commits(commits, [entry.sequence for entry in plan.entries])
    made.pages.check_integrity()


def rounds(made: Scheduler, count: int) -> list[dict[str, tuple[int, int]]]:
    found = []
    for _ in range(count):
        plan = made.plan()
        assert (
            sum(entry.num_tokens + entry.budget.max_nodes for entry in plan.entries)
            <= made.limits.max_num_batched_tokens
        )
        assert len({entry.sequence.id for entry in plan.entries}) == len(plan.entries)
        assert len(made.running) <= made.limits.max_num_seqs
        found.append(shares(plan))
        play(made, plan)
    return found


def add(made: Scheduler, *sequences: RequestState) -> Sequence[RequestState]:
    for one in sequences:
        made.add(one)
    return sequences


def test_first_come_first_served() -> None:
    made = scheduler(seqs=2)
    add(made, sequence("c", 3, arrival=3.0), sequence("a", 3, arrival=1.0), sequence("b", 3, arrival=2.0))
    assert list(shares(made.plan())) == ["a", "b"]
    assert [one.id for one in made.waiting] == ["c"]


def test_a_priority_is_worth_some_waiting_and_no_more() -> None:
    made = scheduler(seqs=1)
    add(made, sequence("low", 3, arrival=0.0, priority=1), sequence("early", 3, arrival=AGEING_SECONDS - 1))
    add(made, sequence("late", 3, arrival=AGEING_SECONDS + 1))
    assert [one.id for one in made.waiting] == ["early", "low", "late"]


def test_a_prompt_is_computed_in_pieces_during_other_requests() -> None:
    made = scheduler(tokens=8)
    add(made, sequence("a", 3, arrival=0.0), sequence("b", 17, arrival=1.0))
    assert rounds(made, 4) == [
        {"a": (3, 0), "b": (5, 0)},
        {"a": (1, 0), "b": (7, 0)},
        {"a": (1, 0), "b": (5, 0)},
        {"a": (1, 0), "b": (1, 0)},
    ]


def test_drafts_count_as_tokens_of_the_round() -> None:
    made = scheduler(tokens=7, k=3)
    add(made, sequence("a", 2, arrival=0.0), sequence("b", 2, arrival=1.0))
    found = rounds(made, 2)
    assert found[1] == {"a": (1, 3), "b": (1, 0)}


def test_a_draft_never_goes_beyond_what_may_be_written() -> None:
    made = scheduler(k=5)
    add(made, sequence("a", 3, max_tokens=4), sequence("b", 3, max_tokens=50))
    made.limits = SchedulerLimits(8, 64, 7)
    wanted = [{"a": 0, "b": 0}, {"a": 2, "b": 2}, {"a": 1, "b": 1}, {"a": 0, "b": 0}]
    for each in wanted:
        assert {id: nodes for id, (_, nodes) in rounds(made, 1)[0].items()} == each


def test_a_request_may_choose_its_draft_length() -> None:
    made = scheduler(k=3)
    for id, chosen in {
        "off": SpeculationParams(enabled=False),
        "zero": SpeculationParams(length=0),
        "five": SpeculationParams(length=5),
        "default": SpeculationParams(),
    }.items():
        made.add(sequence(id, 3, speculation=chosen))
    found = rounds(made, 2)[1]
    assert {id: nodes for id, (_, nodes) in found.items()} == {"off": 0, "zero": 0, "five": 5, "default": 3}


@pytest.mark.parametrize(
    ("asked", "shape"),
    [
        (None, DraftBudget(3, 9, (2, 2))),
        (1, DraftBudget(1, 2, (2,))),
        (2, DraftBudget(2, 6, (2, 2))),
        (5, DraftBudget(5, 9, (2, 2))),
    ],
)
def test_a_tree_of_another_depth_keeps_its_shape(asked: int | None, shape: DraftBudget) -> None:
    made = scheduler()
    made.policy = Fixed(3, 9, (2, 2))
    made.add(sequence("a", 3, speculation=SpeculationParams(length=asked, acceptance_method="match")))
    made.add(sequence("b", 3, speculation=SpeculationParams(length=asked, acceptance_method="block")))
    made.limits = replace(made.limits, chain_methods=frozenset(("block",)))
    found = {}
    for _ in range(2):
        plan = made.plan()
        found = {entry.sequence.id: entry.budget for entry in plan.entries}
        for entry in plan.entries:
            entry.sequence.computed += entry.num_tokens
            entry.sequence.tokens.append(1)
    assert found == {"a": shape, "b": DraftBudget(shape.depth, shape.depth)}


def test_no_draft_before_the_prompt_is_computed() -> None:
    made = scheduler(tokens=4, k=2)
    add(made, sequence("a", 7))
    assert rounds(made, 3) == [{"a": (4, 0)}, {"a": (3, 0)}, {"a": (1, 2)}]


def test_the_youngest_gives_way_and_comes_back() -> None:
    made = scheduler(pages=6)
    old, young = add(made, sequence("o", 8, arrival=0.0), sequence("y", 7, arrival=1.0))
    rounds(made, 9)
    assert young.stats.preemptions == 1
    assert {young.status} == {RequestStatus.WAITING}
    assert young.computed == 0
    known = list(young.tokens)
    assert len(known) > 7
    assert old.stats.preemptions == 0
    made.remove([old.id])
    found = rounds(made, 1)[0]
    assert young.tokens[: len(known)] == known
    assert found["y"][0] + young.stats.cached_prompt_tokens >= len(known) - 7
    assert {young.status} == {RequestStatus.RUNNING}


def test_a_draft_is_given_up_before_a_neighbour_is() -> None:
    made = scheduler(pages=4, k=4)
    add(made, sequence("o", 8, arrival=0.0), sequence("y", 6, arrival=1.0))
    found = rounds(made, 2)
    assert found[1] == {"o": (1, 0), "y": (1, 0)} or found[1]["o"] == (1, 0)
    assert made.preempted == 0 or len(found[1]) == 1


def test_what_was_taken_from_one_is_not_given_to_a_newcomer() -> None:
    made = scheduler(pages=4)
    add(made, sequence("o", 8, arrival=0.0), sequence("y", 8, arrival=1.0))
    made.add(sequence("z", 1, arrival=2.0))
    found = rounds(made, 2)
    assert set(found[0]) == {"o", "y"}
    assert set(found[1]) == {"o"}


def test_siblings_share_the_prompt() -> None:
    made = scheduler(tokens=6)
    add(made, *(sequence(f"s{n}", 14, parent="p", index=n) for n in range(3)))
    found = rounds(made, 6)
    assert found[0] == {"s0": (6, 0)}
    assert found[1] == {"s0": (6, 0)}
    assert found[2]["s0"] == (2, 0)
    later = [tokens for each in found for id, (tokens, _) in each.items() if id != "s0" and tokens > 1]
    assert later == [2, 2]
    assert {one.stats.cached_prompt_tokens for one in made.running} == {0, 12}


def test_no_request_starves() -> None:
    """Much more work than room: every request ends."""
    made = scheduler(pages=8, k=3, seqs=5, tokens=9)
    overall = [sequence(chr(97 + n), 3 + n, max_tokens=9, arrival=float(n)) for n in range(9)]
    add(made, *overall)
    for _ in range(400):
        plan = made.plan()
        if not plan.entries and not made.waiting:
            break
        play(made, plan, accepted=1)
        made.remove([one.id for one in overall if one.output_len >= 9])
    assert all(one.output_len >= 9 for one in overall)
    assert made.pages.usage == 0
    made.pages.check_integrity()


def test_a_removed_sequence_leaves_nothing() -> None:
    made = scheduler()
    running, waiting = add(made, sequence("r", 9), sequence("w", 9))
    made.limits = SchedulerLimits(1, 64, 200)
    rounds(made, 1)
    made.remove([running.id, waiting.id, "unknown"])
    assert made.plan().entries == ()
    assert made.pages.usage == 0


def test_rounds_are_run_as_one_where_no_request_waits() -> None:
    def allowed(*more: RequestState, pages: int = 64, seqs: int = 64) -> int:
        made = Scheduler(BlockPool(pages, 4), Fixed(3), SchedulerLimits(seqs, 64, 200, max_steps=8))
        add(made, sequence("a", 8, arrival=1.0), *more)
        play(made, made.plan())
        plan = made.plan()
        made.pages.check_integrity()
        return plan.max_steps

    quiet = SamplingParams(max_tokens=50, stop=("x",))
    assert allowed() == 8 and allowed(sequence("b", 5, arrival=2.0)) == 8
    assert allowed(sequence("b", 5, arrival=2.0), seqs=1) == 1
    assert allowed(sequence("b", 80, arrival=2.0)) == 1  # its prompt is computed in pieces
    assert allowed(pages=10) == 4 and allowed(pages=11) == 8  # 9 known tokens, and 32 that may come
    (request,) = [replace(sequence("b", 5, arrival=2.0).request, sampling=quiet)]
    assert allowed(RequestState(request, list(request.prompt))) == 1


def test_no_more_rounds_are_run_as_one_than_the_plan_lasts() -> None:
    policy = Fixed(3)
    made = Scheduler(BlockPool(64, 4), policy, SchedulerLimits(64, 64, 200, max_steps=8))
    add(made, sequence("a", 8))
    play(made, made.plan())
    for horizon, rounds in ((1, 1), (3, 3), (100, 8)):
        override(policy, horizon=horizon)
        assert made.plan().max_steps == rounds


def test_rounds_with_drafts_run_singly_without_multi_step_drafts() -> None:
    for length, rounds in ((3, 1), (0, 8)):
        made = Scheduler(
            BlockPool(64, 4), Fixed(length), SchedulerLimits(64, 64, 200, max_steps=8, multi_step_drafts=False)
        )
        add(made, sequence("a", 8))
        play(made, made.plan())
        assert made.plan().max_steps == rounds


class WaitsForAll(Fixed):
    """Leaves out every sequence, or all but some."""

    kept: tuple[str, ...] = ()

    def plan(self, load: BatchState) -> list[DraftBudget]:
        return [DraftBudget(2, 2, skip_step=one.id not in self.kept) for one in load.ready]


class Releases(Fixed):
    """Plans no draft, and releases every draft KV cache."""

    def plan(self, load: BatchState) -> list[DraftBudget]:
        return [DraftBudget(release=True)] * len(load.ready)


def test_a_policy_that_leaves_out_all_sequences_stops_nothing() -> None:
    policy = WaitsForAll(2)
    made = Scheduler(BlockPool(64, 4), policy, SchedulerLimits(64, 64, 200))
    add(made, sequence("a", 3, 4), sequence("b", 3, 4), sequence("c", 3, 4))
    play(made, made.plan())  # the prompts
    assert rounds(made, 1) == [{"a": (1, 2)}], "the most urgent sequence runs, with its draft"
    policy.kept = ("b",)
    assert rounds(made, 1) == [{"b": (1, 2)}], "a step with a sequence of its own stays as the policy planned"


def test_a_request_with_its_own_length_waits_too() -> None:
    """A policy may leave it out of a step, and may release its draft KV cache only if it wants no draft."""
    policy = WaitsForAll(2)
    policy.kept = ("a",)
    made = Scheduler(BlockPool(64, 4), policy, SchedulerLimits(64, 64, 200))
    add(made, sequence("a", 3, speculation=SpeculationParams(length=5)))
    add(made, sequence("b", 3, speculation=SpeculationParams(length=5)))
    play(made, made.plan())  # the prompts
    assert rounds(made, 1) == [{"a": (1, 5)}]
    policy.kept = ()
    assert rounds(made, 1) == [{"a": (1, 5)}], "the step of the most urgent sequence has the length that it asks for"


@pytest.mark.parametrize("length", [0, 5])
def test_only_a_request_without_drafts_loses_its_draft_cache(length: int) -> None:
    made = Scheduler(BlockPool(64, 4), Releases(2), SchedulerLimits(64, 64, 200))
    add(made, sequence("a", 3, speculation=SpeculationParams(length=length)))
    play(made, made.plan())  # the prompt
    (entry,) = made.plan().entries
    assert (entry.budget.depth, entry.budget.release) == (length, length == 0)
