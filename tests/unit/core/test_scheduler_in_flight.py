"""Several steps in flight: shares, limits of all steps together, pages, and failed steps. No model at all."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import pytest

from cospec.core.scheduler import MAX_FAILURES, Scheduler, SchedulerLimits
from cospec.core.types import (
    AssumedTokens,
    BatchState,
    Commit,
    DraftBudget,
    FinishReason,
    Request,
    RequestState,
    RequestStatus,
    ScheduledRequest,
    SchedulerOutput,
)
from cospec.models.block_manager import BlockPool
from cospec.policies.fixed import Fixed
from cospec.sampling_params import SamplingParams


def scheduler(count: int, pages: int = 64, k: int = 0, seqs: int = 64, tokens: int = 64) -> Scheduler:
    return Scheduler(BlockPool(pages, 4), Fixed(k), SchedulerLimits(seqs, tokens, 200, max_in_flight=count))


def add(made: Scheduler, count: int, length: int = 3) -> list[RequestState]:
    params = SamplingParams(max_tokens=50)
    prompts = [tuple((n * 7 + i * i) % 50 for i in range(length)) for n in range(count)]
    found = [
        RequestState(Request(f"r{n}", prompt, params, 0, float(n), f"r{n}"), list(prompt))
        for n, prompt in enumerate(prompts)
    ]
    for sequence in found:
        made.add(sequence)
    return found


def submit(made: Scheduler) -> SchedulerOutput:
    plan = made.plan()
    if plan.entries:
        made.start_step(plan.entries)
    return plan


def ids(plan: SchedulerOutput) -> list[str]:
    return [entry.sequence.id for entry in plan.entries]


def collect(made: Scheduler, plan: SchedulerOutput, accepted: int = 0) -> None:
    """Compute what was planned; sequences that reach their end gain one token and the accepted ones."""
    made.clear_in_flight(plan.entries)
    commits = []
    for entry in plan.entries:
        one, base, kept = entry.sequence, len(entry.sequence.tokens), min(accepted, entry.budget.max_nodes)
        gained = tuple(range(kept + 1)) if entry.samples_token else ()
        one.computed = base + kept if gained else one.computed + entry.num_tokens
        one.tokens.extend(gained)
        commits.append(Commit(one.id, base, gained, tuple(range(max(0, len(gained) - 1))), one.computed))
    made.apply_commits(commits, [entry.sequence for entry in plan.entries])
    made.pages.check_integrity()


@pytest.mark.parametrize(("requests", "sizes"), [(8, [2, 2, 2, 2]), (10, [3, 3, 2, 2]), (3, [1, 1, 1, 0])])
def test_every_step_gets_an_equal_share(requests: int, sizes: list[int]) -> None:
    made = scheduler(4)
    add(made, requests)
    plans = [submit(made) for _ in range(4)]
    assert [len(plan.entries) for plan in plans] == sizes
    assert sorted(id for plan in plans for id in ids(plan)) == sorted(f"r{n}" for n in range(requests))


def test_an_uneven_microbatch_is_divided() -> None:
    made = scheduler(1)
    add(made, 5)
    collect(made, submit(made))
    made.limits = SchedulerLimits(64, 64, 200, max_in_flight=2)
    assert [len(submit(made).entries) for _ in range(2)] == [3, 2]


def test_newcomers_get_a_step_of_their_own() -> None:
    made = scheduler(2)
    first, second = add(made, 2)
    plans = [submit(made), submit(made)]
    assert [ids(plan) for plan in plans] == [["r0"], ["r1"]]
    collect(made, plans[0])
    assert ids(submit(made)) == ["r0"]
    assert first.status is second.status is RequestStatus.RUNNING


class LeavingOut(Fixed):
    """Drafts of three tokens; each step leaves out some sequences by chance."""

    def __init__(self, chance: random.Random, share: float) -> None:
        super().__init__(3)
        self._chance, self._share = chance, share

    def plan(self, load: BatchState) -> list[DraftBudget]:
        leaves = [self._chance.random() < self._share for _ in load.ready]
        return [DraftBudget(skip_step=True) if out else DraftBudget(3, 3) for out in leaves]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
def test_limits_hold_for_all_steps_together(share: float) -> None:
    """Steps arrive in order, with drafts, chunks, a small cache, and requests that end or are left out at any time."""
    preempted = 0
    for seed in range(20):
        chance = random.Random(seed)
        made = scheduler(chance.choice([2, 3, 4]), pages=14, k=3, seqs=6, tokens=chance.choice([6, 17, 40]))
        made.policy = LeavingOut(chance, share)
        overall = add(made, 12, length=9)
        steps: deque[SchedulerOutput] = deque()
        for _ in range(5_000):
            while len(steps) < made.limits.max_in_flight and (plan := submit(made)).entries:
                steps.append(plan)
            if not steps:
                break
            check(made, steps)
            plan = steps.popleft()
            collect(made, plan, accepted=chance.randrange(4))
            made.remove([entry.sequence.id for entry in plan.entries if entry.sequence.output_len >= 9])
        assert all(one.output_len >= 9 for one in overall)
        assert made.pages.usage == 0
        preempted += made.preempted
    assert preempted > 20


def check(made: Scheduler, steps: Sequence[SchedulerOutput]) -> None:
    entries = [entry for plan in steps for entry in plan.entries]
    names = [entry.sequence.id for entry in entries]
    assert len(set(names)) == len(names) <= made.limits.max_num_seqs
    assert sum(entry.num_tokens + entry.budget.max_nodes for entry in entries) <= made.limits.max_num_batched_tokens
    for entry in entries:
        assert entry.sequence.status is RequestStatus.RUNNING, "a sequence in flight was preempted"
        assert made.pages.can_allocate([(entry.sequence.id, entry.sequence.computed + entry.num_tokens)])


def test_an_old_request_waits_for_younger_ones_in_flight() -> None:
    made = scheduler(2, pages=4)
    add(made, 2, length=8)
    plans = [submit(made), submit(made)]
    collect(made, plans[0])  # r0 needs a third page; r1 holds the last ones
    assert submit(made).entries == () and made.preempted == 0
    collect(made, plans[1])
    assert ids(submit(made)) == ["r0"] and made.preempted == 1


def test_a_request_of_a_failed_step_runs_alone_until_it_has_a_token() -> None:
    made = scheduler(2)
    sequences = add(made, 6)
    plans = [submit(made), submit(made)]
    failed = [entry.sequence for entry in plans[0].entries]
    made.clear_in_flight(plans[0].entries)
    assert made.retry(failed) == []
    assert [(one.status, one.computed) for one in failed] == [(RequestStatus.WAITING, 0)] * 3
    assert not submit(made).entries  # another step is in flight
    collect(made, plans[1])
    for one in failed:
        plan = submit(made)
        assert ids(plan) == [one.id] and not submit(made).entries
        collect(made, plan)
    assert ids(submit(made)) == ["r3", "r4", "r5"], "their latest step is the longest ago"
    assert {one.status for one in sequences} == {RequestStatus.RUNNING}


def test_a_request_is_given_up_after_failures_in_a_row() -> None:
    made = scheduler(1)
    (sequence,) = add(made, 1)
    for attempt in range(1, MAX_FAILURES + 1):
        plan = submit(made)
        made.clear_in_flight(plan.entries)
        assert made.retry([sequence]) == ([sequence] if attempt == MAX_FAILURES else [])
    made.remove([sequence.id])
    assert made.plan().entries == () and made.pages.usage == 0


def test_after_a_joint_failure_only_the_first_request_runs_again() -> None:
    made = scheduler(3)
    sequences = add(made, 3)
    for plan in [submit(made), submit(made), submit(made)]:
        made.clear_in_flight(plan.entries)
    assert made.retry(sequences) == []
    for attempt in range(2, MAX_FAILURES + 1):
        plan = submit(made)
        assert ids(plan) == ["r0"] and not submit(made).entries
        made.clear_in_flight(plan.entries)
        assert made.retry(sequences[:1]) == (sequences[:1] if attempt == MAX_FAILURES else [])
    made.remove(["r0"])
    assert ids(submit(made)) == ["r1"]


@pytest.mark.parametrize(
    ("tokens", "finish", "current"),
    [((8, 9), None, True), ((8, 7), None, False), ((8,), None, False), ((8, 9), FinishReason.STOP, False)],
)
def test_other_tokens_and_the_end_of_a_request_refute_its_next_window(
    tokens: tuple[int, ...], finish: FinishReason | None, current: bool
) -> None:
    made = scheduler(3, k=2)
    [sequence] = add(made, 1)
    plan = submit(made)
    window = ScheduledRequest(sequence, 1, DraftBudget(), AssumedTokens(3, (8, 9)))
    made.start_step([window])
    made.clear_in_flight(plan.entries)
    sequence.tokens.extend(tokens)
    sequence.finish = finish
    made.drop_refuted([sequence])
    assert made.is_current(window) is current
