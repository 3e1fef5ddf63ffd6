"""Enumeration of runs that draw ahead: numbers drawn for later steps branch only where a later step comes.

``oracle.BranchTrace`` branches at every choice in the order of the choices. A draft made ahead is drawn before the
verification of the same step, and is thrown away where that verification rejects a token or ends the run. Branching
there multiplies the runs for nothing. ``StepTrace`` puts the choices made ahead after the other choices of their step,
and forgets those that are of no use. The order is sound as long as no choice of a step depends on what the step drew
ahead. That is checked: a new choice ahead takes an option at random, so that what is forgotten is another option in
almost every run, and every repeated choice has to come with the same probabilities as the first time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

from cospec.rng.random_streams import Floats
from harness.enumerated_draws import BranchTrace, OutputDistribution, Unsound

DEPENDS = "a choice depends on what was drawn ahead in its own step"

Choice = tuple[int, tuple[float, ...]]  # the option taken, and the probabilities of all options
Groups = tuple[tuple[Choice, ...], ...]  # of every step two: the choices for the step, and the choices ahead


@dataclass(eq=False)
class _Branch(BranchTrace):
    """The choices of one kind; the noise of both kinds is used once."""

    owner: StepTrace | None = None
    ahead: bool = False

    def choose(self, probabilities: Sequence[float] | Floats) -> int:
        assert self.owner is not None
        return self.owner.choose(tuple(map(float, probabilities)), self.ahead)


class StepTrace:
    """One run: the choices to repeat, and all choices that were made.

    Attributes:
        now: what branches for the step at hand.
        ahead: what branches for later steps.
    """

    def __init__(self, forced: Groups, chance: random.Random) -> None:
        used: set[Hashable] = set()
        self.now, self.ahead = _Branch(used=used, owner=self), _Branch(used=used, owner=self, ahead=True)
        self._forced, self._chance = forced, chance
        self._made: list[list[Choice]] = []

    def next_step(self) -> None:
        """What is chosen from now on belongs to the next step."""
        self._made += [[], []]

    def forget_ahead(self) -> None:
        """What the step drew ahead is of no use any more."""
        self._made[-1].clear()

    def choose(self, probabilities: tuple[float, ...], ahead: bool) -> int:
        """An option with a positive probability: the one to repeat, or a new one."""
        place = len(self._made) - 1 if ahead else len(self._made) - 2
        group, repeated = self._made[place], self._forced[place] if place < len(self._forced) else ()
        options = [option for option, p in enumerate(probabilities) if p > 0]
        pick = self._chance.choice(options) if ahead else options[0]
        if len(group) < len(repeated):
            pick, before = repeated[len(group)]
            if before != probabilities:
                raise Unsound(DEPENDS)
        group.append((pick, probabilities))
        return pick

    @property
    def kept(self) -> Groups:
        """All choices but those made ahead for nothing."""
        return tuple(tuple(group) for group in self._made)

    @property
    def probability(self) -> float:
        """Of the run."""
        return math.prod(probabilities[pick] for group in self.kept for pick, probabilities in group)

    def left(self) -> Iterator[Groups]:
        """The runs that repeat a part of this one and then choose otherwise."""
        kept, forced = self.kept, self._forced
        for place, group in enumerate(kept):
            if place < len(forced) - 1:
                if len(group) != len(forced[place]):
                    raise Unsound(DEPENDS)
                continue
            first = len(forced[place]) if place == len(forced) - 1 else 0
            for n in range(first, len(group)):
                pick, probabilities = group[n]
                for option, p in enumerate(probabilities):
                    if option != pick and p > 0:
                        yield (*kept[:place], (*group[:n], (option, probabilities)))


def enumerate_steps(run: Callable[[StepTrace], Hashable]) -> OutputDistribution:
    """The exact distribution of what ``run`` returns; ``run`` calls ``next_step`` before each of its steps."""
    distribution: OutputDistribution = {}
    waiting: list[Groups] = [()]
    chance = random.Random(1)
    while waiting:
        trace = StepTrace(waiting.pop(), chance)
        outcome = run(trace)
        distribution[outcome] = distribution.get(outcome, 0.0) + trace.probability
        waiting += trace.left()
    return distribution
