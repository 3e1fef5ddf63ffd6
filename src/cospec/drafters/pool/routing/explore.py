"""CoSine's routing by confidence and verified accuracy, corrected (CoSine section 4.2, eq. 1 to 3; spec section 11).

Each request has a score per drafter (the routing vector M_r). When the latest round went well (at least tau tokens
accepted) the best-scoring drafters work with probability beta, otherwise with the smaller probability alpha; random
ones in the other cases. The paper has alpha > beta, which would exploit most when exploring is called for. In eq. 2
confidence c and accuracy d are kept off 0 and 1, where it is not defined. d compares tokens, not embeddings: drafters
need not share the target's embedding, so d is 1 for the committed token and 0 for any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from cospec.drafters.pool.routing.selection import Feedback, Routing, RoutingInput
from cospec.drafters.pool.routing.weights import DrafterWeights, total

ALPHA, BETA = 0.3, 0.8  # how likely the best are chosen after a bad and after a good round
TAU = 2  # accepted tokens of a good round
EPSILON = 0.05  # distance of c and d from 0 and 1
RATE = 0.3  # how far a round moves a score


class Explore(Routing):
    """Routing ``explore``: half of the drafters, or as many as the policy says."""

    name: ClassVar[str] = "explore"
    looks: ClassVar[bool] = False
    learns: ClassVar[bool] = True
    weighs: ClassVar[bool] = False
    native_id: ClassVar[int | None] = 2

    def route(self, standing: DrafterWeights, choice: RoutingInput) -> list[int]:
        """The best or random ones, by draws of this round."""
        count = (len(choice.able) + 1) // 2 if choice.most is None else choice.most
        count = min(max(1, count), len(choice.able))
        uniforms = choice.uniforms(1 + count)
        if uniforms[0] < (BETA if standing.accepted >= TAU else ALPHA):
            return sorted(choice.able, key=lambda member: -standing.scores[member])[:count]
        left, chosen = list(choice.able), []
        for uniform in uniforms[1:]:
            place = next((n for n in range(len(left) - 1) if uniform < (n + 1) / len(left)), len(left) - 1)
            chosen.append(left.pop(place))
        return chosen

    def learn(self, standing: DrafterWeights, parts: Mapping[int, Feedback]) -> None:
        """Eq. 2, averaged over the positions of a drafter's draft; a position behind a mismatch counts as wrong."""
        for member, part in parts.items():
            if part.lessons:
                wrong = max(0, part.proposed - len(part.lessons)) * _agreement(0.5, 0.0)
                right = total(_agreement(confidence, value) for confidence, value in part.lessons)
                mean = (right + wrong) / max(part.proposed, len(part.lessons))
                standing.scores[member] += RATE * (mean - standing.scores[member])


def _agreement(confidence: float, accuracy: float) -> float:
    """One term of eq. 2."""
    c, d = (min(max(x, EPSILON), 1.0 - EPSILON) for x in (confidence, accuracy))
    return c * d / (c * d + (1.0 - c) * (1.0 - d))
