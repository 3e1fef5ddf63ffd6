"""Choose which members propose, and how many tokens (CoS 3.2 to 3.4).

The speed-up model predicts the time per token of each schedule from call times and acceptance rates.
``schedule_bandit`` then tries promising schedules, compares them with standard decoding, and keeps the fastest.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from cospec.core.plugin_base import Policy
from cospec.core.stats import StepStats
from cospec.core.types import BatchState, Commit, Draft, DraftBudget
from cospec.ensemble.schedule_bandit import Bandit
from cospec.ensemble.speedup_model import ProposalProcess
from cospec.policies.latency.call_latency import CallLatency, ModelCall

LENGTHS = (1, 2, 3, 5, 8)  # lengths of a proposal that the policy chooses from
LONGEST = LENGTHS[-1]
PRIOR, PRIOR_WEIGHT = 0.7, 4.0  # initial acceptance rate, and its weight in proposals
DECAY = 0.998  # per verified token, so that the acceptance rate follows the text
OVERHEAD_WINDOW = 15  # steps whose median gives the overhead per turn
FIT_EVERY = 256  # steps between refits; also at each power of two below


@dataclass(frozen=True, slots=True)
class FixedSchedule:
    """A fixed assignment of proposals to models.

    Attributes:
        gammas: tokens of a proposal, per model. If all are 0, no model proposes and every model is called for every
            token (standard collaborative decoding).
        order: the models in the order of their turns; the first is the default proposer.
        alternate: scorers go on proposing (CoS 3.3); otherwise only the default proposer proposes.
    """

    gammas: tuple[int, ...]
    order: tuple[int, ...]
    alternate: bool = True

    @property
    def proposes(self) -> bool:
        """Whether any model proposes."""
        return any(self.gammas)


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """The parts of a schedule that the policy may choose.

    Attributes:
        lengths: the lengths, including 0 for no proposals.
        proposer: the default proposer.
    """

    lengths: bool = False
    proposer: bool = False


class GoodputProposerPolicy(Policy):
    """The policy of an ensemble whose members propose; ``proposer_schedule`` says which, and how many tokens.

    Args:
        proposer_schedule: the initial schedule; parts that are not free stay as given.
        members: the models that the blend reads.
        free: the parts that the policy may choose.
        relaxed: whether the blend is a target that is relaxed towards its proposer.
    """

    def __init__(
        self,
        proposer_schedule: FixedSchedule,
        members: Sequence[int],
        free: ScheduleOptions = ScheduleOptions(),
        relaxed: bool = False,
    ) -> None:
        count = len(proposer_schedule.gammas)
        self._members, self._free, self._relaxed = tuple(members), free, relaxed
        self.schedules = _candidate_schedules(proposer_schedule, free, relaxed or len(self._members) == 1)
        self._kinds = [each.alternate for each in self.schedules]
        ways = [(each.proposes, each.order, each.alternate) for each in self.schedules]
        first = ways.index((True, proposer_schedule.order, proposer_schedule.alternate)) if free.lengths else 0
        self._bandits = {1: Bandit(self._kinds, first)}  # by the bit length of the batch size
        self._latest: FixedSchedule | None = None  # of the last step
        self._accepted, self._verified = [PRIOR * PRIOR_WEIGHT] * count, [PRIOR_WEIGHT] * count
        self._calls, self._turns = [CallLatency() for _ in range(count)], [CallLatency() for _ in range(count)]
        self._overheads: deque[float] = deque(
            maxlen=OVERHEAD_WINDOW
        )  # seconds per turn outside of turns, of the latest steps
        self._latest_step = (0, 0.0)  # turns, and seconds outside of turns
        self._overhead = 0.0  # seconds of overhead per turn
        self._batch = 1
        self._predicted = False
        self._steps = 0

    @property
    def proposer_schedule(self) -> FixedSchedule:
        """The schedule of the next step."""
        return self.schedules[self._bandit.current]

    @property
    def best(self) -> FixedSchedule:
        """The fastest measured schedule at the current batch size; another schedule may be on trial."""
        return self.schedules[self._bandit.best]

    @property
    def _bandit(self) -> Bandit:
        return self._bandits[self._batch.bit_length()]

    @property
    def alphas(self) -> tuple[float, ...]:
        """The acceptance rate of each model's proposals."""
        return tuple(a / n for a, n in zip(self._accepted, self._verified, strict=True))

    @property
    def costs(self) -> tuple[float, ...]:
        """Seconds of one pass of each model over one token per sequence of the current batch, as last fitted."""
        return tuple(call_latency.price(ModelCall(self._batch, self._batch)) for call_latency in self._calls)

    def set_batch_size(self, batch: int) -> None:
        """Set the number of concurrent sequences, to which costs, predictions and the choice refer."""
        begin = self._bandit.best
        self._batch = batch
        if batch.bit_length() not in self._bandits:  # start from the best schedule so far
            self._bandits[batch.bit_length()] = Bandit(self._kinds, begin)
            self._predicted = False

    @property
    def horizon(self) -> int:
        """Every further step, where the schedule is fixed."""
        return 1 if self._free.lengths else sys.maxsize

    def plan(self, load: BatchState) -> list[DraftBudget]:
        """Return budgets with room for all tokens that may be pending in a step."""
        if load.ready:
            self.set_batch_size(len(load.ready))
        longest = LONGEST if self._free.lengths else 0
        most = (
            2 * sum(max(longest, gamma) for gamma in self.proposer_schedule.gammas)
            if self.proposer_schedule.proposes
            else 0
        )
        return [DraftBudget(depth=most, max_nodes=most)] * len(load.ready)

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        """Return the drafts unchanged."""
        return drafts

    def observe_call(self, model: int, call: ModelCall, seconds: float) -> None:
        """Record the time of a call; calls with long prompts are skipped, because they predict other calls badly."""
        if seconds > 0 and call.rows <= (2 * LONGEST + 1) * call.sequences:
            self._calls[model].read(call, seconds)

    def observe_turn(self, model: int, call: ModelCall, seconds: float) -> None:
        """Record the time of a turn, overhead included; turns with long prompts are skipped."""
        if seconds > 0 and call.rows <= (2 * LONGEST + 1) * call.sequences:
            self._turns[model].read(call, seconds)

    def observe_step(self, turns: int, seconds: float) -> None:
        """Record the number of turns in a step, and the step's seconds outside of turns."""
        self._latest_step = turns, seconds

    def observe_acceptance(self, proposer: int, accepted: bool) -> None:
        """Record whether a proposal of the model was accepted."""
        self._accepted[proposer] = DECAY * self._accepted[proposer] + accepted
        self._verified[proposer] = DECAY * self._verified[proposer] + 1

    def observe(self, stats: StepStats, commits: Sequence[Commit]) -> None:
        """Record the time of the step; refit and predict at intervals."""
        self._steps += 1
        turns, seconds = self._latest_step
        if turns:
            self._overheads.append((seconds + stats.total - stats.times.draft - stats.times.target) / turns)
        if self._steps % FIT_EVERY == 0 or (self._steps < FIT_EVERY and self._steps.bit_count() == 1):
            self._refit()
        if not self._free.lengths:
            return
        proposer_schedule, bandit = self.proposer_schedule, self._bandit
        if not self._predicted:
            self._predict()
        prompts = stats.batched_tokens - stats.proposed > stats.sequences
        if stats.committed and stats.total > 0 and not prompts:
            bandit.observe(stats.total, stats.committed, proposer_schedule == self._latest)
        self._latest = proposer_schedule

    def _refit(self) -> None:
        for call_latency in (*self._calls, *self._turns):
            call_latency.learn()
        self._overhead = max(0.0, median(self._overheads)) if self._overheads else 0.0
        self._predicted = False

    def _predict(self) -> None:
        """Predict the time per token of every schedule at the current batch size."""
        self._bandit.predict([self.seconds(proposer_schedule) / self._batch for proposer_schedule in self.schedules])
        self._predicted = True

    def seconds(self, proposer_schedule: FixedSchedule) -> float:
        """Return the predicted seconds for one token of every sequence of the current batch."""
        if not proposer_schedule.proposes:
            return sum(self._price(member, 1, 1) for member in self._members)
        process = ProposalProcess(
            self.alphas,
            proposer_schedule.gammas,
            proposer_schedule.order[0],
            proposer_schedule.alternate,
            self._members,
            self._relaxed and not proposer_schedule.alternate,
        )
        return process.seconds_per_token(self._price)

    def predicted(self, proposer_schedule: FixedSchedule) -> float:
        """Return the predicted speed-up of a schedule over standard collaborative decoding; 1 if no model proposes."""
        return self.seconds(replace(proposer_schedule, gammas=(0,) * len(proposer_schedule.gammas))) / self.seconds(
            proposer_schedule
        )

    def _price(self, model: int, rows: int, passes: int) -> float:
        """Return the seconds of a turn of all sequences in the batch."""
        return self._overhead + self._turns[model].price(ModelCall(self._batch * rows, self._batch, passes))

    def gauges(self) -> Mapping[str, float]:
        """Return the default proposer's length as ``speculation_length``."""
        return {"speculation_length": self.best.gammas[self.best.order[0]]}


def rotations(count: int) -> list[tuple[int, ...]]:
    """Return every cyclic order of turns; the index is the first model."""
    return [tuple((first + turn) % count for turn in range(count)) for first in range(count)]


def _candidate_schedules(drafted: FixedSchedule, free: ScheduleOptions, bonus: bool) -> list[FixedSchedule]:
    """Return the candidate schedules, standard decoding first.

    One model proposes ``LENGTHS`` tokens; the others propose one token each or none. Without a bonus token, a single
    proposal of one token by one model gains nothing, so this schedule is left out.
    """
    if not free.lengths:
        return [drafted]
    count = len(drafted.gammas)
    found = [replace(drafted, gammas=(0,) * count)]
    for order in rotations(count) if free.proposer else [drafted.order]:
        for alternate in sorted({False, drafted.alternate}):
            for length in LENGTHS if alternate or bonus else LENGTHS[1:]:
                gammas = tuple(length if model == order[0] else int(alternate) for model in range(count))
                found.append(FixedSchedule(gammas, order, alternate))
    return found
