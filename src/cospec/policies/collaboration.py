"""Who proposes how much when several models speak as one (CoS 3.2 to 3.4), from what calls cost and how often
proposals are accepted."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from statistics import median

from cospec.policies.meter import Meter
from cospec.policies.theory import Process
from cospec.stats import Call, RoundStats
from cospec.types import Budget, Commit, Draft, Load

LONGEST = 8  # tokens of one proposal that a free choice goes up to
PRIOR, PRIOR_WEIGHT = 0.7, 4.0  # acceptance before anything was seen, in proposals
FORGET = 0.998  # per judged token, so that acceptance follows the text
TURNS = 15  # rounds that the time outside of the models is the median of
CHANGE = 0.1  # relative change of an estimate that is worth another look
FIRST_LOOK, LOOK_EVERY = 6, 16  # rounds
PROBE_EVERY = 64  # rounds in which nobody proposes
WORTH = 1.05  # predicted speed over standard decoding from which on proposals are made: predictions err


@dataclass(frozen=True, slots=True)
class Casting:
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
class Freedom:
    """What of a casting may be chosen.

    Attributes:
        lengths: the lengths, and with them whether anybody proposes.
        proposer: the default proposer.
    """

    lengths: bool = False
    proposer: bool = False


class Collaboration:
    """Implements ``protocols.Policy`` and ``protocols.Caster``, for rounds in which the members of a blend propose.

    Args:
        casting: where to begin, and for good what is not free.
        members: the models that the law reads.
    """

    def __init__(self, casting: Casting, members: Seq[int], free: Freedom = Freedom()) -> None:
        count = len(casting.gammas)
        self._begun, self._members, self._free = casting, tuple(members), free
        self._chosen = casting
        self._accepted, self._judged = [PRIOR * PRIOR_WEIGHT] * count, [PRIOR_WEIGHT] * count
        self._meters = [Meter() for _ in range(count)]
        self._turns: deque[float] = deque(maxlen=TURNS)
        self._turn = 0.0  # seconds of a turn outside of the models
        self._batch = 1
        self._basis: tuple[float, ...] = ()
        self._rounds = self._quiet = 0

    @property
    def casting(self) -> Casting:
        """For the next round; now and then one with proposals where there are none, to see whether they would pay."""
        probing = self._free.lengths and not self._chosen.proposes and self._quiet % PROBE_EVERY == PROBE_EVERY - 1
        return self._begun if probing else self._chosen

    @property
    def alphas(self) -> tuple[float, ...]:
        """The acceptance rate of each model's proposals."""
        return tuple(a / n for a, n in zip(self._accepted, self._judged, strict=True))

    @property
    def costs(self) -> tuple[float, ...]:
        """Seconds of a pass of each model over one token of each sequence of the present batch."""
        return tuple(meter.price(Call(self._batch, self._batch)) for meter in self._meters)

    def plan(self, load: Load) -> list[Budget]:
        """Room for what may stand ahead of the last committed token within a round."""
        if load.ready and len(load.ready) != self._batch:
            self._batch = len(load.ready)
            if self._rounds >= FIRST_LOOK:
                self._look()
        longest = LONGEST if self._free.lengths else 0
        most = 2 * sum(max(longest, gamma) for gamma in self.casting.gammas) if self.casting.proposes else 0
        return [Budget(depth=most, max_nodes=most)] * len(load.ready)

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        """Nothing is cut."""
        return drafts

    def timed(self, model: int, call: Call, seconds: float) -> None:
        """A call of the model took so long; those with prompts tell little about the others."""
        if seconds > 0 and call.rows <= (2 * LONGEST + 1) * call.sequences:
            self._meters[model].read(call, seconds)

    def ran(self, turns: int, seconds: float) -> None:
        """A round took so long outside of the models."""
        if turns:
            self._turns.append(seconds / turns)

    def judged(self, author: int, accepted: bool) -> None:
        """A proposal of the model was judged."""
        self._accepted[author] = FORGET * self._accepted[author] + accepted
        self._judged[author] = FORGET * self._judged[author] + 1

    def observe(self, stats: RoundStats, commits: Seq[Commit]) -> None:
        """Now and then, think again."""
        self._rounds += 1
        self._quiet += not self._chosen.proposes
        if self._rounds % LOOK_EVERY == 0 or self._rounds == FIRST_LOOK:
            self._look()

    def _look(self) -> None:
        for meter in self._meters:
            meter.learn()
        self._turn = median(self._turns) if self._turns else 0.0
        if not self._free.lengths:
            return
        basis = (float(self._batch), self._turn, *self.costs, *(alpha / (1.02 - alpha) for alpha in self.alphas))
        if not self._basis or any(abs(new - old) > CHANGE * old for new, old in zip(basis, self._basis, strict=True)):
            self._basis = basis
            turns = rotations(len(self._meters)) if self._free.proposer else [self._begun.order]
            forms = {False, self._begun.alternate}
            begun = [replace(self._begun, order=order, alternate=form) for order in turns for form in forms]
            self._chosen = best_casting(begun, self)

    def seconds(self, casting: Casting) -> float:
        """Predicted, for one token of every sequence of the present batch."""
        if not casting.proposes:
            return sum(self._price(member, 1, 1) for member in self._members)
        process = Process(self.alphas, casting.gammas, casting.order[0], casting.alternate, self._members)
        return process.seconds_per_token(self._price)

    def predicted(self, casting: Casting) -> float:
        """Speed of ``casting`` over standard collaborative decoding under what was seen; 1 where nobody proposes."""
        return self.seconds(replace(casting, gammas=(0,) * len(casting.gammas))) / self.seconds(casting)

    def _price(self, model: int, rows: int, passes: int) -> float:
        """Of a turn that all sequences of the batch take at once."""
        return self._turn + self._meters[model].price(Call(self._batch * rows, self._batch, passes))

    def gauges(self) -> Mapping[str, float]:
        """The default proposer's length."""
        return {"speculation_length": self._chosen.gammas[self._chosen.order[0]]}


def rotations(count: int) -> list[tuple[int, ...]]:
    """Every order of turns that goes round, by its first."""
    return [tuple((first + turn) % count for turn in range(count)) for first in range(count)]


def best_casting(begun: Seq[Casting], seen: Collaboration) -> Casting:
    """The lengths, and the one of ``begun``, with the highest predicted speed under what was seen."""
    found = [_climb(casting, seen) for casting in begun]
    best, speed = max(found, key=lambda each: each[1])
    return best if speed >= WORTH else replace(best, gammas=(0,) * len(best.gammas))


def _climb(casting: Casting, seen: Collaboration) -> tuple[Casting, float]:
    """Make one length longer at a time, from all ones, as long as it helps."""
    count = len(casting.gammas)
    authors = range(count) if casting.alternate else casting.order[:1]
    best = replace(casting, gammas=tuple(int(model in authors) for model in range(count)))
    speed = seen.predicted(best)
    while True:
        tried = [
            replace(best, gammas=tuple(gamma + (model == author) for model, gamma in enumerate(best.gammas)))
            for author in authors
            if best.gammas[author] < LONGEST
        ]
        speeds = [seen.predicted(each) for each in tried]
        if not speeds or max(speeds) <= speed:
            return best, speed
        speed = max(speeds)
        best = tried[speeds.index(speed)]
