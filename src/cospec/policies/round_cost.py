"""What a round takes, corrected while rounds are measured (SmartSpec section 4.3, equations 4 to 7).

T_round = T_draft + T_target + rest, or max(T_draft, T_target) + rest where the rounds show that the two overlap. A
measured fit says how the parts grow; a factor for each part follows the machine's present speed. A fit that stays wrong
by more than a fifth is made anew from the latest rounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from statistics import median

from cospec.policies.cost import ForwardCost, Sample, fit
from cospec.stats import RoundStats
from cospec.types import Offer

# Shapes to begin with where nobody measured: a target that reads its weights once, and a drafter an eighth of it. The
# factors bring them to the machine's speed within some rounds, a refit to its shape.
UNMEASURED_TARGET = ForwardCost(context=1e-7, slopes=(1e-4,), sequence=1e-4, fixed=5e-3)
UNMEASURED_DRAFT = UNMEASURED_TARGET.scaled(1 / 8)

FOLLOW = 0.05  # share of a new measurement in each factor
WINDOW = 96  # rounds that errors are judged over and refits are made from
PATIENCE = 32  # rounds between two looks at the errors
TOLERATED = 0.2  # median relative error
ANCHOR = 8  # points of the old fit that a refit keeps, for what the latest rounds do not show


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured fits of the target's forward and of one step of the drafter; None where there is none."""

    target: ForwardCost | None = None
    draft: ForwardCost | None = None


class RoundCost:
    """Predicts rounds and learns from them. Cheap: it is asked and told every round."""

    def __init__(self, costs: Costs, offer: Offer = Offer()) -> None:
        self.offer = offer
        self.refits = 0
        self.changed = 0  # goes up when the costs moved enough that plans made with them are old
        self.error = 0.0  # median over the window
        self.predicted = 0.0  # seconds of the latest round
        self._target = _Part(costs.target or UNMEASURED_TARGET)
        whole, self.drafters = costs.draft or UNMEASURED_DRAFT, offer.members
        self._drafts = [_Part(whole.scaled(max(1, m) / offer.members)) for m in range(offer.members + 1)]
        self._rest = 0.0  # seconds per sequence and round outside of both
        self._hidden = 0.0  # share of the shorter of both that passes beside the longer one
        self._errors: deque[float] = deque(maxlen=WINDOW)
        self._rounds = 0

    @property
    def target(self) -> ForwardCost:
        """Of the target's forward, at the machine's present speed."""
        return self._target.cost

    @property
    def draft(self) -> ForwardCost:
        """Of one step of the drafter, or of as many of a pool as ``drafters`` says."""
        return self._drafts[self.drafters].cost

    @property
    def overlap(self) -> bool:
        """Whether drafting and verification go on at the same time."""
        return self._hidden > 0.5

    def rest(self, sequences: int) -> float:
        """Seconds of a round outside of drafting and verification."""
        return self._rest * (sequences + 1)

    def drafting(self, depth: float, tokens: float, context: float) -> float:
        """Seconds for ``tokens`` drafted in ``depth`` steps, each over ``context`` tokens of cache."""
        if self.offer.free or depth <= 0:
            return 0.0
        if self.offer.at_once:
            return self.draft.start + self.draft.fixed + self.draft.tokens(tokens)
        return self.draft.seconds(context, tokens / depth, tokens / depth, depth)

    def observe(self, stats: RoundStats) -> None:
        """Learn from a measured round."""
        times = stats.times
        target = self.target.seconds(stats.context_tokens, stats.batched_tokens, stats.sequences)
        draft = self.drafting(stats.depth, stats.proposed, stats.context_tokens) if stats.depth else 0.0
        rest = self.rest(stats.sequences)
        self.predicted = (max(draft, target) if self.overlap else draft + target) + rest
        if stats.total > 0:
            self._errors.append(abs(self.predicted - stats.total) / stats.total)
        moved = self._target.follow(
            Sample(stats.context_tokens, stats.batched_tokens, stats.sequences, times.target), target
        )
        if stats.depth and not self.offer.free:
            width = stats.proposed / stats.depth
            proposal = Sample(stats.context_tokens, width, width, times.draft, stats.depth)
            moved |= self._drafts[self.drafters].follow(proposal, draft)
        shorter = min(times.draft, times.target)
        if shorter > 0:
            hidden = min(1.0, max(0.0, (times.draft + times.target - stats.total) / shorter))
            self._hidden += FOLLOW * (hidden - self._hidden)
        spent = max(times.draft, times.target) if self.overlap else times.draft + times.target
        self._rest += FOLLOW * (max(0.0, stats.total - spent) / (stats.sequences + 1) - self._rest)
        self.changed += moved
        self._rounds += 1
        if self._rounds % PATIENCE == 0:
            self._judge()

    def gauges(self) -> Mapping[str, float]:
        """For the metrics."""
        return {
            "predicted_round_seconds": self.predicted,
            "prediction_error": self.error,
            "cost_refits": float(self.refits),
        }

    def _judge(self) -> None:
        self.error = median(self._errors) if self._errors else 0.0
        if self.error > TOLERATED and len(self._errors) == WINDOW:
            for part in (self._target, *self._drafts):
                part.refit()
            self._errors.clear()
            self.refits += 1
            self.changed += 1


class _Part:
    """One fit, its factor and the rounds it was last seen in."""

    def __init__(self, fitted: ForwardCost) -> None:
        self.fitted = self.cost = fitted
        self._factor = self._used = 1.0
        self._seen: deque[Sample] = deque(maxlen=WINDOW)

    def follow(self, sample: Sample, predicted: float) -> bool:
        """Move the factor towards a measurement; True when plans made before are old."""
        if sample.seconds <= 0 or predicted <= 0:
            return False
        self._seen.append(sample)
        ratio = min(4.0, max(0.25, sample.seconds / (predicted * self._factor / self._used)))
        self._factor *= float(ratio) ** FOLLOW
        if abs(self._factor / self._used - 1.0) < 0.05:
            return False
        self._used = self._factor
        self.cost = self.fitted.scaled(self._factor)
        return True

    def refit(self) -> None:
        """A new fit from what was seen; the old one answers for what was not."""
        if len(self._seen) < WINDOW // 2:
            return
        seen = list(self._seen)
        self.fitted = self.cost = fit([*seen, *_anchors(self.cost, seen)])
        self._factor = self._used = 1.0


def _anchors(cost: ForwardCost, seen: Seq[Sample]) -> list[Sample]:
    """Points of a fit around those that were seen, corrected by how wrong it was there."""
    off = median(sample.seconds / cost.predict(sample) for sample in seen)
    *centre, _, passes = [median(column) for column in zip(*seen, strict=True)]
    found = []
    for n in range(ANCHOR):
        context, tokens, sequences = (x * (0.25 if n >> bit & 1 else 4.0) for bit, x in enumerate(centre))
        seconds = off * cost.seconds(context, tokens, sequences, passes)
        found.append(Sample(context, tokens, sequences, seconds, passes))
    return found
