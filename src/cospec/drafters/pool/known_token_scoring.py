"""When the drafters of a pool score known tokens, and which of them: the evidence about drafters that did not draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cospec.core.drafter_capabilities import TokenScores
from cospec.core.interfaces import Clock
from cospec.core.types import DraftContext
from cospec.drafters.pool.members import Member
from cospec.drafters.pool.routing.drafter_weights import DrafterWeights, WeightPrior
from cospec.drafters.pool.routing.routing import Routing
from cospec.drafters.pool.state import PoolRequestState

CLEAR_LEAD = 0.6  # share of the weight of drafters with a cost at which scores seldom change the choice
PLAUSIBLE = 0.3  # share of the best drafter's weight below which a drafter is not scored again
RESCORE_AFTER = 32  # steps between the first two scorings of a request; doubles each time
LOOK_AFTER = 32  # steps after which a clear lead is looked at again


class KnownTokenScoring:
    """Lets the drafters of a pool score known tokens.

    All drafters of a request score its prompt before the first draft, unless earlier prompts show the best drafter.
    Later only drafters that may become the best score, because each of them then reads the tokens of the steps that it
    missed.
    """

    def __init__(self, members: Sequence[Member], routing: Routing, prior: WeightPrior, clock: Clock) -> None:
        self._members, self._on, self._prior, self._clock = members, routing.scores_known_tokens, prior, clock

    def is_due(self, weights: DrafterWeights) -> bool:
        """Return whether drafters score before the next draft: at first, and at times while none leads clearly.

        A clear lead is looked at again ``LOOK_AFTER`` steps later.
        """
        if not self._on or weights.steps < weights.score_at:
            return False
        if not (weights.steps or weights.is_foreseen):
            return True
        values = weights.weights(self._prior)
        priced = [value for value, member in zip(values, self._members, strict=True) if not member.costless]
        if priced and max(priced) < CLEAR_LEAD * sum(priced):
            return True
        weights.score_at = weights.steps + LOOK_AFTER
        return False

    def score(self, due: Sequence[DraftContext], records: Mapping[str, PoolRequestState]) -> float:
        """Let drafters score; scores of asynchronous drafters count when they arrive.

        Returns:
            Seconds until the local drafters had scored.
        """
        started = self._clock()
        asked = [self._plausible(records[context.id].weights) for context in due]
        found: list[Mapping[str, TokenScores]] = []
        for number, member in enumerate(self._members):
            # A request that names drafters is for the machines of these drafters only.
            named = {context.id for context in due if context.drafters is None or member.name in context.drafters}
            own = [
                context
                for context, members in zip(due, asked, strict=True)
                if number in members and context.id in named
            ]
            if member.later and member.present and named:
                member.start_scoring([context for context in due if context.id in named])  # idle machines score all
            local = bool(own) and member.present and not member.later
            found.append(member.score_known_tokens(own) if local else {})
        for context in due:
            weights = records[context.id].weights
            weights.score_at += RESCORE_AFTER + weights.score_at
            weights.score_known_tokens([scores.get(context.id) for scores in found])
        return self._clock() - started

    def collect(self, records: Mapping[str, PoolRequestState]) -> None:
        """Read the scores that asynchronous drafters have sent since the latest step."""
        for number, member in enumerate(self._members):
            for scores in member.collect_scores() if member.scoring else ():
                for id, own in scores.items():
                    if id in records:
                        known = [own if place == number else None for place in range(len(self._members))]
                        records[id].weights.score_known_tokens(known)

    def _plausible(self, weights: DrafterWeights) -> list[int]:
        """Return the drafters whose scores may change the choice; all before the first scores."""
        values = weights.weights(self._prior)
        least = PLAUSIBLE * max(values) if any(weights.looked) else 0.0
        return [number for number, value in enumerate(values) if value >= least]
