"""Who proposes how much when several models speak as one (CoS 3.2 to 3.4): what theory says, and then what time says.

From what calls cost and how often proposals are accepted follows how quick each casting should be; ``policies.trials``
tries what looks best, and standard decoding beside it, and keeps what took the least time per token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from cospec.core.plugins import Policy
from cospec.core.stats import ModelCall, StepStats
from cospec.core.types import BatchState, Commit, Draft, DraftBudget
from cospec.ensemble.speedup_model import ProposalProcess
from cospec.policies.bandit import Bandit
from cospec.policies.latency.call_latency import CallLatency

LENGTHS = (1, 2, 3, 5, 8)  # tokens of a proposal that a free choice is among
LONGEST = LENGTHS[-1]
PRIOR, PRIOR_WEIGHT = 0.7, 4.0  # acceptance before anything was seen, in proposals
FORGET = 0.998  # per judged token, so that acceptance follows the text
BETWEEN = 15  # rounds that the time outside of turns is the median of
LOOK_EVERY = 256  # rounds; and at powers of two below


@dataclass(frozen=True, slots=True)
class FixedSchedule:
    """Who does what.

    Attributes:
        gammas: tokens of a proposal, per model.
        order: the models in the order of their turns; the first is the default proposer.
        alternate: scorers go on proposing (CoS 3.3); otherwise only the default proposer does. All gammas 0: nobody
            proposes, and every model is asked for every token (standard collaborative decoding).
    """

    gammas: tuple[int, ...]
    order: tuple[int, ...]
    alternate: bool = True

    @property
    def proposes(self) -> bool:
        """Whether there are proposals at all."""
        return any(self.gammas)


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """What of a casting may be chosen.

    Attributes:
        lengths: the lengths, and with them whether anybody proposes.
        proposer: the default proposer.
    """

    lengths: bool = False
    proposer: bool = False


class GoodputProposerPolicy(Policy):
    """Implements ``protocols.Policy`` and ``protocols.ProposerPolicy``, for rounds in which the members of a blend
    propose.

    Args:
        casting: where to begin, and for good what is not free.
        members: the models that the law reads.
    """

    def __init__(
        self, proposer_schedule: FixedSchedule, members: Sequence[int], free: ScheduleOptions = ScheduleOptions()
    ) -> None:
        count = len(proposer_schedule.gammas)
        self._members, self._free = tuple(members), free
        self.castings = _castings(proposer_schedule, free, len(self._members) == 1)
        ways = [(each.proposes, each.order, each.alternate) for each in self.castings]
        first = ways.index((True, proposer_schedule.order, proposer_schedule.alternate)) if free.lengths else 0
        self._trials = {1: Bandit(len(self.castings), first)}  # by the batch size in binary places
        self._latest: FixedSchedule | None = None  # of the last round
        self._accepted, self._judged = [PRIOR * PRIOR_WEIGHT] * count, [PRIOR_WEIGHT] * count
        self._calls, self._turns = [CallLatency() for _ in range(count)], [CallLatency() for _ in range(count)]
        self._between: deque[float] = deque(maxlen=BETWEEN)  # of the latest rounds, seconds outside of turns, per turn
        self._latest_round = (0, 0.0)  # turns, and seconds outside of them
        self._overhead = 0.0  # seconds that come with a turn
        self._batch = 1
        self._predicted = False
        self._rounds = 0

    @property
    def proposer_schedule(self) -> FixedSchedule:
        """For the next round."""
        return self.castings[self._trial.now]

    @property
    def best(self) -> FixedSchedule:
        """The casting that proved the quickest at the present batch size, whether or not another is being tried."""
        return self.castings[self._trial.best]

    @property
    def _trial(self) -> Bandit:
        return self._trials[self._batch.bit_length()]

    @property
    def alphas(self) -> tuple[float, ...]:
        """The acceptance rate of each model's proposals."""
        return tuple(a / n for a, n in zip(self._accepted, self._judged, strict=True))

    @property
    def costs(self) -> tuple[float, ...]:
        """Seconds of a pass of each model over one token of each sequence of the present batch, as last learned."""
        return tuple(call_latency.price(ModelCall(self._batch, self._batch)) for call_latency in self._calls)

    def serve(self, batch: int) -> None:
        """So many sequences at once; costs, predictions and the choice are for them."""
        begin = self._trial.best
        self._batch = batch
        if batch.bit_length() not in self._trials:  # what was best so far is where to begin
            self._trials[batch.bit_length()] = Bandit(len(self.castings), begin)
            self._predicted = False

    def plan(self, load: BatchState) -> list[DraftBudget]:
        """Room for what may stand ahead of the last committed token within a round."""
        if load.ready:
            self.serve(len(load.ready))
        longest = LONGEST if self._free.lengths else 0
        most = (
            2 * sum(max(longest, gamma) for gamma in self.proposer_schedule.gammas)
            if self.proposer_schedule.proposes
            else 0
        )
        return [DraftBudget(depth=most, max_nodes=most)] * len(load.ready)

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        """Nothing is cut."""
        return drafts

    def timed(self, model: int, call: ModelCall, seconds: float) -> None:
        """A call of the model took so long; those with prompts tell little about the others."""
        if seconds > 0 and call.rows <= (2 * LONGEST + 1) * call.sequences:
            self._calls[model].read(call, seconds)

    def turned(self, model: int, call: ModelCall, seconds: float) -> None:
        """A turn of the model took so long, with all that came with it."""
        if seconds > 0 and call.rows <= (2 * LONGEST + 1) * call.sequences:
            self._turns[model].read(call, seconds)

    def ran(self, turns: int, seconds: float) -> None:
        """A round took so long outside of its turns."""
        self._latest_round = turns, seconds

    def judged(self, author: int, accepted: bool) -> None:
        """A proposal of the model was judged."""
        self._accepted[author] = FORGET * self._accepted[author] + accepted
        self._judged[author] = FORGET * self._judged[author] + 1

    def observe(self, stats: StepStats, commits: Sequence[Commit]) -> None:
        """Time the round, and now and then predict anew."""
        self._rounds += 1
        turns, seconds = self._latest_round
        if turns:
            self._between.append((seconds + stats.total - stats.times.draft - stats.times.target) / turns)
        if self._rounds % LOOK_EVERY == 0 or (self._rounds < LOOK_EVERY and self._rounds.bit_count() == 1):
            self._look()
        if not self._free.lengths:
            return
        proposer_schedule, trial = self.proposer_schedule, self._trial
        if not self._predicted:
            self._predict()
        prompts = stats.batched_tokens - stats.proposed > stats.sequences
        if stats.committed and stats.total > 0 and not prompts:
            trial.ran(stats.total, stats.committed, proposer_schedule == self._latest)
        self._latest = proposer_schedule

    def _look(self) -> None:
        for call_latency in (*self._calls, *self._turns):
            call_latency.learn()
        self._overhead = max(0.0, median(self._between)) if self._between else 0.0
        self._predicted = False

    def _predict(self) -> None:
        """How quick every casting should be, at the present batch size."""
        self._trial.expect([self.seconds(proposer_schedule) / self._batch for proposer_schedule in self.castings])
        self._predicted = True

    def seconds(self, proposer_schedule: FixedSchedule) -> float:
        """Predicted, for one token of every sequence of the present batch."""
        if not proposer_schedule.proposes:
            return sum(self._price(member, 1, 1) for member in self._members)
        process = ProposalProcess(
            self.alphas,
            proposer_schedule.gammas,
            proposer_schedule.order[0],
            proposer_schedule.alternate,
            self._members,
        )
        return process.seconds_per_token(self._price)

    def predicted(self, proposer_schedule: FixedSchedule) -> float:
        """Speed of ``proposer_schedule`` over standard collaborative decoding under what was seen; 1 where nobody
        proposes.
        """
        return self.seconds(replace(proposer_schedule, gammas=(0,) * len(proposer_schedule.gammas))) / self.seconds(
            proposer_schedule
        )

    def _price(self, model: int, rows: int, passes: int) -> float:
        """Of a turn that all sequences of the batch take at once."""
        return self._overhead + self._turns[model].price(ModelCall(self._batch * rows, self._batch, passes))

    def gauges(self) -> Mapping[str, float]:
        """The default proposer's length."""
        return {"speculation_length": self.best.gammas[self.best.order[0]]}


def rotations(count: int) -> list[tuple[int, ...]]:
    """Every order of turns that goes round, by its first."""
    return [tuple((first + turn) % count for turn in range(count)) for first in range(count)]


def _castings(begun: FixedSchedule, free: ScheduleOptions, bonus: bool) -> list[FixedSchedule]:
    """What the choice is among, standard decoding first: one model proposes at length, the others by ones or not.

    Where no bonus token comes behind a proposal, one of a single token by one model gains nothing.
    """
    if not free.lengths:
        return [begun]
    count = len(begun.gammas)
    found = [replace(begun, gammas=(0,) * count)]
    for order in rotations(count) if free.proposer else [begun.order]:
        for alternate in sorted({False, begun.alternate}):
            for length in LENGTHS if alternate or bonus else LENGTHS[1:]:
                gammas = tuple(length if model == order[0] else int(alternate) for model in range(count))
                found.append(FixedSchedule(gammas, order, alternate))
    return found
