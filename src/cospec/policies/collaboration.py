"""Who proposes how much when several models speak as one (CoS 3.2 to 3.4), from what calls cost and how often
proposals are accepted."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from cospec.policies.theory import Process
from cospec.stats import RoundStats
from cospec.types import Budget, Commit, Draft, Load

LONGEST = 8  # tokens of one proposal that a free choice goes up to
PRIOR, PRIOR_WEIGHT = 0.6, 8.0  # acceptance before anything was seen, in proposals
FORGET = 0.998  # per judged token, so that acceptance follows the text
SMOOTH = 0.1  # of the cost of a call
CHANGE = 0.1  # relative change of an estimate that is worth another look
LOOK_EVERY = 16  # rounds


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


class Collaboration:
    """Implements ``protocols.Policy`` for rounds in which the members of a blend propose.

    Args:
        casting: where to begin, and for good what ``free`` leaves out.
        members: the models that the law reads.
        free: the lengths are chosen by what is observed; otherwise ``casting`` stays.
        pinned: the default proposer stays all the same.
    """

    def __init__(self, casting: Casting, members: Seq[int], free: bool = False, pinned: bool = False) -> None:
        self.casting, self._members, self._free, self._pinned = casting, tuple(members), free, pinned
        count = len(casting.gammas)
        self._accepted, self._judged = [PRIOR * PRIOR_WEIGHT] * count, [PRIOR_WEIGHT] * count
        self._costs: list[float | None] = [None] * count
        self._basis: tuple[float, ...] = ()
        self._rounds = 0

    @property
    def alphas(self) -> tuple[float, ...]:
        """The acceptance rate of each model's proposals."""
        return tuple(a / n for a, n in zip(self._accepted, self._judged, strict=True))

    @property
    def costs(self) -> tuple[float, ...]:
        """Seconds of a call of each model; 1 where none was timed."""
        return tuple(cost or 1.0 for cost in self._costs)

    def plan(self, load: Load) -> list[Budget]:
        """Room for what may stand ahead of the last committed token within a round."""
        most = 2 * sum(LONGEST if self._free and gamma else gamma for gamma in self.casting.gammas)
        return [Budget(depth=most, max_nodes=most)] * len(load.ready)

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        """Nothing is cut."""
        return drafts

    def timed(self, model: int, seconds: float) -> None:
        """A call of the model took so long."""
        cost = self._costs[model]
        self._costs[model] = seconds if cost is None else cost + SMOOTH * (min(seconds, 3 * cost) - cost)

    def judged(self, author: int, accepted: bool) -> None:
        """A proposal of the model was judged."""
        self._accepted[author] = FORGET * self._accepted[author] + accepted
        self._judged[author] = FORGET * self._judged[author] + 1

    def observe(self, stats: RoundStats, commits: Seq[Commit]) -> None:
        """Now and then, think again."""
        self._rounds += 1
        if not self._free or self._rounds % LOOK_EVERY or None in self._costs:
            return
        basis = (*self.costs, *(alpha / (1.02 - alpha) for alpha in self.alphas))
        if not self._basis or any(abs(new - old) > CHANGE * old for new, old in zip(basis, self._basis, strict=True)):
            self._basis = basis
            turns = [self.casting.order] if self._pinned else rotations(len(self.costs))
            self.casting = best_casting([replace(self.casting, order=order) for order in turns], self)

    def predicted(self, casting: Casting) -> float:
        """Speed of ``casting`` over standard collaborative decoding under what was seen; 1 where nobody proposes."""
        if not casting.proposes:
            return 1.0
        process = Process(self.alphas, casting.gammas, casting.order[0], casting.alternate, self._members)
        return process.factor(self.costs)

    def gauges(self) -> Mapping[str, float]:
        """The default proposer's length."""
        return {"speculation_length": self.casting.gammas[self.casting.order[0]]}


def rotations(count: int) -> list[tuple[int, ...]]:
    """Every order of turns that goes round, by its first."""
    return [tuple((first + turn) % count for turn in range(count)) for first in range(count)]


def best_casting(begun: Seq[Casting], seen: Collaboration) -> Casting:
    """The lengths, and the one of ``begun``, with the highest predicted speed under what was seen."""
    found = [_climb(casting, seen) for casting in begun]
    return max(found, key=lambda each: each[1])[0]


def _climb(casting: Casting, seen: Collaboration) -> tuple[Casting, float]:
    """Make one length longer at a time, from all ones, as long as it helps."""
    count = len(casting.gammas)
    authors = range(count) if casting.alternate else casting.order[:1]
    best = replace(casting, gammas=(1,) * count)
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
