"""The theorems of CoS, the exact count of calls, and the choice of lengths by them."""

from __future__ import annotations

import itertools

import pytest

from cospec.core.stats import StepStats, StepTimes
from cospec.core.types import BatchState, Request, RequestState
from cospec.ensemble.proposer_policy import (
    FIT_EVERY,
    FixedSchedule,
    GoodputProposerPolicy,
    ScheduleOptions,
)
from cospec.ensemble.speedup_model import ProposalProcess
from cospec.policies.latency.call_latency import CallLatency, ModelCall
from cospec.policies.latency.forward import ForwardLatency
from cospec.sampling_params import SamplingParams

ALPHAS = (0.0, 0.3, 0.7, 0.95, 1.0)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_naive_form_is_theorem_3_1(alpha: float) -> None:
    for gamma, c in itertools.product((1, 2, 5), (0.05, 0.5, 1.0)):
        process = ProposalProcess((alpha, 0.5), (gamma, 1), alternate=False)
        factor = sum(alpha**place for place in range(gamma)) * (1 + c) / (1 + c * gamma)
        assert process.factor((c, 1.0)) == pytest.approx(factor)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_alternating_by_ones_takes_two_minus_alpha_calls(alpha: float) -> None:
    assert sum(ProposalProcess((alpha, alpha), (1, 1)).calls_per_token()) == pytest.approx(2 - alpha)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_alternating_is_never_slower(alpha: float) -> None:
    """CoS corollary 3.7."""
    for c in (0.05, 0.5, 1.0):
        assert ProposalProcess((alpha, alpha), (1, 1)).factor((c, 1.0)) >= 1 - 1e-9


def test_all_accepted_takes_one_call_a_token() -> None:
    for count in (2, 3, 4):
        assert sum(ProposalProcess((1.0,) * count, (1,) * count).calls_per_token()) == pytest.approx(1)


def test_without_weight_it_is_speculative_decoding() -> None:
    for alternate in (True, False):
        target = ProposalProcess((0.8, 0.5), (4, 1), members=(1,), alternate=alternate).calls_per_token()[1]
        assert target == pytest.approx(1 / sum(0.8**place for place in range(5)))


FREE = ScheduleOptions(lengths=True, proposer=True)
CHEAP = ForwardLatency(slopes=(0.05,), fixed=1.0)  # rows that come with the pass
DEAR = ForwardLatency(slopes=(1.0,))  # rows that cost as much as passes


class Machine:
    """A virtual clock: what calls take and how often proposals are accepted is known and does not change."""

    def __init__(
        self, alphas: tuple[float, ...], scales: tuple[float, ...], cost: ForwardLatency, batch: int = 1
    ) -> None:
        self.alphas, self.scales, self.cost, self.batch = alphas, scales, cost, batch
        self.seconds = self.tokens = 0.0
        self.turn = 0.0

    def price(self, model: int, rows: int, passes: int) -> float:
        first = self.cost.seconds(0, rows * self.batch, self.batch)
        later = (passes - 1) * self.cost.each(0, self.batch)
        return self.turn + self.scales[model] * (first + later)

    def time(self, proposer_schedule: FixedSchedule) -> float:
        """Seconds of one token of every sequence."""
        if not proposer_schedule.proposes:
            return sum(self.price(model, 1, 1) for model in range(len(self.scales)))
        process = ProposalProcess(
            self.alphas, proposer_schedule.gammas, proposer_schedule.order[0], proposer_schedule.alternate
        )
        return process.seconds_per_token(self.price)

    def run(self, policy: GoodputProposerPolicy, rounds: int) -> None:
        """Rounds of three tokens a sequence, as ``policy`` wants them."""
        policy.plan(BatchState(sequences(self.batch)))
        times = {proposer_schedule: self.time(proposer_schedule) for proposer_schedule in policy.schedules}
        for number in range(rounds):
            proposer_schedule = policy.proposer_schedule
            tokens = (3 if proposer_schedule.proposes else 1) * self.batch
            for model, gamma in enumerate(proposer_schedule.gammas):
                for rows, passes in {(1, 1), (2, 1), (1, max(1, gamma))}:
                    seconds = self.price(model, rows, passes) - self.turn
                    policy.observe_call(model, ModelCall(rows * self.batch, self.batch, passes), seconds)
                    policy.observe_turn(model, ModelCall(rows * self.batch, self.batch, passes), seconds)
                if gamma:
                    policy.observe_acceptance(model, number % 100 < 100 * self.alphas[model])
            policy.observe_step(2, 2 * self.turn)
            seconds = times[proposer_schedule] * tokens / self.batch
            self.seconds, self.tokens = self.seconds + seconds, self.tokens + tokens
            inside = StepTimes(0.0, seconds)
            policy.observe(StepStats(0, self.batch, self.batch, 0, 0, 0, 0, tokens, inside, seconds), [])


def sequences(count: int) -> list[RequestState]:
    return [RequestState(Request(str(n), (1, 2), SamplingParams(), 0), [1, 2], 1) for n in range(count)]


def free(count: int = 2) -> GoodputProposerPolicy:
    return GoodputProposerPolicy(FixedSchedule((1,) * count, tuple(range(count))), range(count), FREE)


MACHINES = [
    Machine((0.5, 0.9), (1.0, 0.05), CHEAP),
    Machine((0.9, 0.75), (1.0, 0.12), CHEAP),
    Machine((0.5, 0.5), (1.0, 1.0), CHEAP),
    Machine((0.8, 0.9), (1.0, 1.0), ForwardLatency(slopes=(0.3,), fixed=0.7), 2),
    Machine((0.7, 0.7, 0.9), (1.0, 1.0, 1.0), CHEAP),
    Machine((0.6, 0.6), (1.0, 0.5), DEAR, 4),
]


@pytest.mark.parametrize("machine", MACHINES)
def test_nearly_the_best_of_all_is_found(machine: Machine) -> None:
    policy = free(len(machine.scales))
    machine.run(policy, 1500)
    best = min(machine.time(proposer_schedule) for proposer_schedule in policy.schedules)
    assert machine.time(policy.best) <= 1.05 * best
    assert machine.seconds / machine.tokens * machine.batch <= 1.1 * best


def test_a_cheap_agreeable_model_proposes_much() -> None:
    policy, machine = free(), Machine((0.5, 0.9), (1.0, 0.05), CHEAP)
    machine.run(policy, 400)
    assert policy.best.order == (1, 0)
    assert policy.best.gammas[1] >= 5
    assert policy.predicted(policy.best) > policy.predicted(FixedSchedule((1, 1), (0, 1)))
    assert policy.plan(BatchState([])) == []


def test_what_is_given_stays() -> None:
    proposer_schedule = FixedSchedule((2, 3), (1, 0))
    kept = GoodputProposerPolicy(proposer_schedule, (0, 1))
    pinned = GoodputProposerPolicy(FixedSchedule((1, 1), (0, 1)), (0, 1), ScheduleOptions(lengths=True))
    for policy in (kept, pinned):
        Machine((0.5, 0.9), (1.0, 0.05), CHEAP).run(policy, 400)
    assert kept.proposer_schedule == kept.best == proposer_schedule
    assert pinned.best.order == (0, 1)
    assert {proposer_schedule.order for proposer_schedule in pinned.schedules} == {(0, 1)}


def test_no_model_proposes_where_rows_are_expensive() -> None:
    """Standard decoding is kept, and looking for something better costs next to nothing."""
    policy, machine = free(), Machine((0.7, 0.7), (1.0, 1.0), DEAR, 4)
    machine.run(policy, 300)
    machine.seconds = machine.tokens = 0.0
    machine.run(policy, 3000)
    assert not policy.best.proposes
    standard = machine.time(policy.schedules[0]) / machine.batch
    assert machine.seconds / machine.tokens <= 1.015 * standard


def test_each_batch_size_has_a_choice_of_its_own() -> None:
    policy = free()
    Machine((0.7, 0.7), (1.0, 1.0), CHEAP).run(policy, 300)
    assert policy.best.proposes
    Machine((0.7, 0.7), (1.0, 1.0), DEAR, 8).run(policy, 300)
    assert not policy.best.proposes
    Machine((0.7, 0.7), (1.0, 1.0), CHEAP).run(policy, 1)
    assert policy.best.proposes


def test_turns_that_cost_much_make_proposals_longer() -> None:
    lengths = []
    for turn in (0.0, 10.0):
        policy, machine = free(), Machine((0.8, 0.8), (1.0, 0.5), ForwardLatency(slopes=(0.5,), fixed=0.5))
        machine.turn = turn
        machine.run(policy, 600)
        lengths.append(sum(policy.best.gammas))
    assert lengths[1] > lengths[0]


def test_prompts_do_not_count_as_calls() -> None:
    policy = free()
    policy.observe_call(0, ModelCall(1, 1), 2.0)
    policy.observe_call(0, ModelCall(200, 1), 50.0)
    for _ in range(FIT_EVERY):
        policy.observe(StepStats(0, 1, 1, 0, 0, 0, 0, 1, StepTimes(), 0.1), [])
    assert policy.costs[0] == pytest.approx(2.0)


def test_reading_the_costs_learns_nothing() -> None:
    policy = free()
    before = policy.costs
    policy.observe_call(0, ModelCall(1, 1), 2.0)
    assert policy.costs == before
    for _ in range(FIT_EVERY):
        policy.observe(StepStats(0, 1, 1, 0, 0, 0, 0, 1, StepTimes(), 0.1), [])
    assert policy.costs != before


def test_passes_that_were_not_seen_are_not_free() -> None:
    """While every turn was one pass, what it took is what a pass takes."""
    call_latency = CallLatency()
    for rows in (1, 2, 3, 4):
        for _ in range(4):
            call_latency.read(ModelCall(rows, 1), 1.0 + 0.05 * rows)
    call_latency.learn()
    assert call_latency.price(ModelCall(1, 1, 8)) == pytest.approx(8 * call_latency.price(ModelCall(1, 1)), rel=0.1)


def test_rounds_with_prompts_are_not_timed() -> None:
    policy = free()
    begun = policy.proposer_schedule
    for _ in range(100):
        policy.observe(StepStats(0, 1, 50, 0, 0, 0, 0, 1, StepTimes(), 0.1), [])
    assert policy.proposer_schedule == begun


@pytest.mark.parametrize("alternate", [True, False])
def test_the_rows_of_a_round(alternate: bool) -> None:
    """With everything accepted: by ones in turn two rows a call; the naive form's scorer reads a whole proposal."""
    process = ProposalProcess((1.0, 1.0), (1, 1) if alternate else (4, 1), alternate=alternate)
    rows = process.seconds_per_token(lambda model, rows, passes: rows + passes - 1)
    assert rows == pytest.approx(2.0)
    calls = process.seconds_per_token(lambda model, rows, passes: passes)
    assert calls == pytest.approx(sum(process.calls_per_token()))
