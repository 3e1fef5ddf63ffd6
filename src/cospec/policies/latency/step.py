"""What a round takes, corrected while rounds are measured (SmartSpec section 4.3, equations 4 to 7).

T_round = T_draft + T_target + rest, or max(T_draft, T_target) + rest where the rounds show that the two overlap. Each
part is a fit that follows the rounds. One that stays wrong by more than a fifth is made anew from the latest of them,
where that explains them much better.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from cospec.core.stats import StepStats
from cospec.core.types import DrafterCapabilities
from cospec.policies.latency.depth_correction import DepthCorrection
from cospec.policies.latency.forward import Floats, ForwardLatency
from cospec.policies.latency.online_fit import GUESSED, MEASURED, OnlineFit

# Shapes to begin with where nobody measured: a target that reads its weights once, and a drafter an eighth of it. The
# rounds bring them to the machine's speed, a refit to its shape.
UNMEASURED_TARGET = ForwardLatency(context=1e-7, slopes=(1e-4,), sequence=1e-4, fixed=5e-3)
UNMEASURED_DRAFT = UNMEASURED_TARGET.scaled(1 / 8)
REST = ForwardLatency(
    slopes=(1e-6,), sequence=2e-5, fixed=4e-5
)  # the shape of everything else; tokens are draft tokens

FOLLOW = 0.05  # share of a round in what is known of overlap
SETTLED = 2  # rounds of a kind after which caches, and those of the drafter, are as such rounds leave them
PATIENCE = 32  # rounds between two looks at the errors
FIRST, MOST = 32, 256  # rounds that are kept at most before they are learned from, at first and later
SECONDS = 0.8  # of rounds that are kept before they are learned from: so learning takes the same share of all rounds
LOOKS = 9  # latest predictions that the error is taken of
TOLERATED = 0.2  # median relative error
MOST_DOUBT = 0.05  # share that drafts have to win by at most
CHANGED = 0.03  # relative change of a typical round that makes plans old


@dataclass(frozen=True, slots=True)
class LatencyModels:
    """Measured fits of the target's forward and of one step of the drafter; None where there is none."""

    target: ForwardLatency | None = None
    draft: ForwardLatency | None = None


class StepLatency:
    """Predicts rounds and learns from them. A round is only noted when it is observed; ``learn`` does the rest."""

    def __init__(self, costs: LatencyModels, capabilities: DrafterCapabilities = DrafterCapabilities()) -> None:
        self.capabilities = capabilities
        self.refits = 0
        self.changed = 0  # goes up when the costs moved enough that plans made with them are old
        self.error = 0.0  # median over the window
        self.predicted = 0.0  # seconds of the latest round
        self._target = OnlineFit(costs.target or UNMEASURED_TARGET, MEASURED if costs.target else GUESSED)
        self.rest = REST.scaled(0.0)  # of a round outside of drafting and verification
        self._outside = 0.0  # as many times as long as unmeasured; rounds tell
        whole, self.drafters = costs.draft or UNMEASURED_DRAFT, capabilities.members
        trust = MEASURED if costs.draft and capabilities.members == 1 else GUESSED
        self.correction = DepthCorrection()
        self._fed = 0.0  # seconds for each token of a new text; rounds tell
        self._depth, self._going = 0, 0  # of the latest round, and how many like it went before
        self._drafts = [
            OnlineFit(whole.scaled(max(1, m) / capabilities.members), trust) for m in range(capabilities.members + 1)
        ]
        self._hidden = 0.0  # share of the shorter of both that passes beside the longer one
        self._errors: deque[float] = deque(maxlen=LOOKS)
        self._seen: list[tuple[StepStats, int, int]] = []  # with the drafters at work
        self._patience = FIRST
        self._spent = 0.0  # seconds of these rounds
        self._rounds = 0
        self._usual = (0.0, 0.0)  # a typical round by the costs that the latest plans were made with

    @property
    def target(self) -> ForwardLatency:
        """Of the target's forward, at the machine's present speed."""
        return self._target.cost

    @property
    def draft(self) -> ForwardLatency:
        """Of one step of the drafter, or of as many of a pool as ``drafters`` says."""
        return self._drafts[self.drafters].cost

    @property
    def overlap(self) -> bool:
        """Whether drafting and verification go on at the same time."""
        return self._hidden > 0.5

    @property
    def feeding(self) -> float:
        """Seconds in which the drafter reads one token of a text that is new to it."""
        return self._fed or self.draft.slopes[-1]

    @property
    def doubt(self) -> float:
        """By what share rounds with drafts have to be better than those without: by as much as predictions are off."""
        return min(self.error, MOST_DOUBT)

    def drafting(self, depth: float, tokens: float, context: float, drafts: float) -> float:
        """Seconds for ``tokens`` of so many ``drafts``, made in ``depth`` steps over ``context`` tokens of cache."""
        if self.capabilities.free or depth <= 0:
            return 0.0
        if self.capabilities.single_pass:
            return self.draft.seconds(0.0, tokens, drafts)
        return self.draft.seconds(context, tokens / depth, drafts, depth)

    def predict(self, stats: StepStats) -> float:
        """Seconds of a round like ``stats``, whatever it took."""
        target = self.target.seconds(stats.context_tokens, stats.batched_tokens, stats.sequences)
        draft = self.drafting(stats.depth, stats.proposed, stats.context_tokens, stats.drafts)
        rest = self.rest.seconds(0.0, stats.proposed, stats.sequences)
        return (max(draft, target) if self.overlap else draft + target) + rest

    def observe(self, stats: StepStats, fed: int = 0) -> None:
        """A measured round; ``fed``: tokens of texts that were new to the drafter, which are no part of a step."""
        self._seen.append((stats, fed, self.drafters))
        self._spent += stats.total
        if self._spent >= SECONDS or len(self._seen) >= self._patience:
            self.learn()

    def learn(self) -> None:
        """Learn from the rounds that were observed."""
        if not self._seen:
            return
        seen, self._seen, self._spent = self._seen, [], 0.0
        self._patience = min(2 * self._patience, MOST)
        last = seen[-1][0]
        self.predicted = self.predict(last)  # before anything is learned from it
        if last.working > 0:
            self._errors.append(abs(self.predicted - last.working) / last.working)
        rounds = np.array([_row(*each) for each in seen], dtype=np.float64)
        self._correct(rounds)
        self._follow_rest(rounds)
        context, tokens, sequences, depth, _, _, draft, target, _, fed, members = rounds.T
        self._target.follow(np.stack([context, tokens, sequences, target, np.ones(len(seen))], 1)[target > 0])
        drafted = (depth > 0) & (fed == 0) & (draft > 0)
        if drafted.any() and not self.capabilities.free:
            proposals = self._proposals(rounds)
            for m in set(members[drafted].tolist()):
                self._drafts[int(m)].follow(proposals[drafted & (members == m)])
        self._follow_feeding([(stats, fed) for stats, fed, _ in seen if fed and stats.times.draft > 0])
        self._compare(last)
        before, self._rounds = self._rounds, self._rounds + len(seen)
        if before // PATIENCE != self._rounds // PATIENCE:
            self._judge()

    def _follow_rest(self, rounds: Floats) -> None:
        """How far drafting and verification overlap, and how long everything else takes."""
        _, _, sequences, _, proposed, _, draft, target, total, *_ = rounds.T
        shorter, keep = np.minimum(draft, target), (1.0 - FOLLOW) ** len(rounds)
        if (shorter > 0).any():
            hidden = np.clip((draft + target - total)[shorter > 0] / shorter[shorter > 0], 0.0, 1.0)
            keep_hidden = (1.0 - FOLLOW) ** len(hidden)
            self._hidden += (1.0 - keep_hidden) * (float(hidden.mean()) - self._hidden)
        spent = np.maximum(draft, target) if self.overlap else draft + target
        usual = REST.fixed + REST.sequence * sequences + REST.slopes[0] * proposed
        factor = max(0.0, float(np.median((total - spent) / usual)))
        self._outside += (1.0 - keep) * (factor - self._outside)
        self.rest = REST.scaled(self._outside)

    def _correct(self, rounds: Floats) -> None:
        """How rounds of each draft length compare with what is predicted of them."""
        context, tokens, sequences, depth, proposed, _, _, _, seconds, *_ = rounds.T
        drafted, going, once = depth > 0, [], np.ones(len(rounds))
        for longest in depth.tolist():
            self._going = self._going + 1 if longest == self._depth else 0
            self._depth = longest
            going.append(self._going)
        target, own, plain = (
            self.target.of_all(np.stack([context, batched, sequences, once, once], 1))
            for batched in (tokens, np.minimum(tokens, sequences + proposed), np.minimum(tokens, sequences))
        )
        draft = np.zeros(len(rounds))
        if not self.capabilities.free:
            draft = drafted * self.draft.of_all(self._proposals(rounds))
        rest = self.rest.of_all(np.stack([once, proposed, sequences, once, once], 1))
        predicted = (np.maximum(draft, target) if self.overlap else draft + target) + rest
        weights = (own / np.maximum(target, 1e-12)) ** 2  # what others' prompts take is not known that well
        chosen = np.array(going) >= SETTLED
        kinds = sequences[chosen].astype(np.int64), depth[chosen].astype(np.int64)
        plain = plain + self.rest.of_all(np.stack([once, 0 * proposed, sequences, once, once], 1))
        self.correction.follow(kinds, seconds[chosen], predicted[chosen], plain[chosen], weights[chosen])

    def _proposals(self, rounds: Floats) -> Floats:
        """``[S, 5]``: the drafting of rounds as calls, columns as in ``LatencySample``."""
        context, _, _, depth, proposed, drafts, draft, *_ = rounds.T
        if self.capabilities.single_pass:
            return np.stack([0 * context, proposed, drafts, draft, np.ones(len(rounds))], 1)
        passes = np.maximum(depth, 1.0)
        return np.stack([context, proposed / passes, drafts, draft, passes], 1)

    def _follow_feeding(self, seen: Sequence[tuple[StepStats, int]]) -> None:
        """What the drafter takes to read texts that it has not seen."""
        tokens = sum(fed for _, fed in seen)
        if not tokens or self.capabilities.free:
            return
        steps = (self.drafting(s.depth, s.proposed, s.context_tokens, s.drafts) for s, _ in seen)
        more = sum(s.times.draft for s, _ in seen) - sum(steps)
        weight = 1.0 - (1.0 - FOLLOW) ** len(seen) if self._fed else 1.0
        self._fed += weight * (max(0.0, more) / tokens - self._fed)

    def _compare(self, last: StepStats) -> None:
        """Whether a round like the last one costs so much more or less than it did that plans are old."""
        usual = (
            self.target.seconds(last.context_tokens, last.batched_tokens, last.sequences),
            self.draft.seconds(0, 1, 1),
        )
        if any(abs(now - before) > CHANGED * before for now, before in zip(usual, self._usual, strict=True)):
            self.changed, self._usual = self.changed + 1, usual

    def gauges(self) -> Mapping[str, float]:
        """For the metrics, as far as was learned."""
        return {
            "predicted_round_seconds": self.predicted,
            "prediction_error": self.error,
            "cost_refits": float(self.refits),
        }

    def _judge(self) -> None:
        self.error = median(self._errors) if self._errors else 0.0
        if self.error > TOLERATED and len(self._errors) == LOOKS:
            self._errors.clear()
            if any([part.refit() for part in (self._target, *self._drafts)]):
                self.refits += 1
                self.changed += 1


def _row(stats: StepStats, fed: int, members: int) -> tuple[float, ...]:
    times = stats.times
    drafts = stats.drafts or stats.sequences
    return (
        stats.context_tokens, stats.batched_tokens, stats.sequences, stats.depth, stats.proposed, drafts,
        times.draft, times.target, stats.working, fed, members,
    )  # fmt: skip
