"""Latency of a step, corrected by measured steps (SmartSpec section 4.3, equations 4 to 7).

T_step = T_draft + T_target + rest, or max(T_draft, T_target) + rest if measurements show that both overlap. Each part
is an online fit. A part that stays wrong by more than a fifth is refitted to the latest steps, if the new fit explains
the steps much better.
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

# Initial shapes without measurements: a target that reads its weights once, and a drafter of an eighth of its cost.
# Steps correct the speed, a refit corrects the shape.
UNMEASURED_TARGET = ForwardLatency(context=1e-7, slopes=(1e-4,), sequence=1e-4, fixed=5e-3)
UNMEASURED_DRAFT = UNMEASURED_TARGET.scaled(1 / 8)
REST = ForwardLatency(
    slopes=(1e-6,), sequence=2e-5, fixed=4e-5
)  # the shape of everything else; tokens are draft tokens

UPDATE_RATE = 0.05  # weight of a step in the learned overlap
WARM_STEPS = 2  # steps of a kind after which the caches are in the steady state of this kind
CHECK_EVERY = 32  # steps between two checks of the errors
FIRST_BATCH, MAX_BATCH = 32, 256  # maximum number of stored steps before learning, initially and later
BATCH_SECONDS = 0.8  # seconds of stored steps before learning: learning then takes the same share of all time
SCORING_MEMORY = 0.99  # weight of the past in the seconds of scoring per draft, per step with drafts
ERROR_WINDOW = 9  # latest predictions that give the error
MAX_ERROR = 0.2  # median relative error
MAX_DOUBT = 0.05  # maximum relative advantage that drafts must have
COST_CHANGE = 0.03  # relative change of a typical step that outdates plans


@dataclass(frozen=True, slots=True)
class LatencyModels:
    """Measured fits of the target's forward and of one step of the drafter; None without measurements."""

    target: ForwardLatency | None = None
    draft: ForwardLatency | None = None


class StepLatency:
    """Predicts steps and learns from measured steps. ``observe`` only stores a step; ``learn`` does the rest."""

    def __init__(self, costs: LatencyModels, capabilities: DrafterCapabilities = DrafterCapabilities()) -> None:
        self.capabilities = capabilities
        self.refits = 0
        self.learned = 0  # increases with every change of the costs
        self.changed = 0  # increases when the costs changed enough to outdate plans
        self.error = 0.0  # median over the window
        self.predicted = 0.0  # seconds of the latest step
        self._target = OnlineFit(costs.target or UNMEASURED_TARGET, MEASURED if costs.target else GUESSED)
        self.rest = REST.scaled(0.0)  # of a step outside of drafting and verification
        self._outside = 0.0  # factor of ``REST``, learned from steps
        whole, self.drafters = costs.draft or UNMEASURED_DRAFT, capabilities.num_drafters
        trust = MEASURED if costs.draft and capabilities.num_drafters == 1 else GUESSED
        self.correction = DepthCorrection()
        self._fed = 0.0  # seconds per token of a new text, learned from steps
        self._scored = np.zeros(2)  # seconds of scoring, and drafts; both decay
        self._depth, self._repeats = 0, 0  # of the latest step, and the number of equal steps before
        self._drafts = [OnlineFit(whole.scaled(max(1, m) / self.drafters), trust) for m in range(self.drafters + 1)]
        self._overlapped = 0.0  # share of the shorter of both that overlaps with the longer
        self._errors: deque[float] = deque(maxlen=ERROR_WINDOW)
        self._observed: list[tuple[StepStats, int, int]] = []  # with the number of drafters
        self._batch_size = FIRST_BATCH
        self._spent = 0.0  # seconds of these steps
        self._rounds = 0
        self._typical = (0.0, 0.0)  # seconds of a typical step at the costs of the latest plans

    @property
    def target(self) -> ForwardLatency:
        """The target's forward at the machine's current speed."""
        return self._target.cost

    @property
    def draft(self) -> ForwardLatency:
        """One step of the drafter, or of ``drafters`` members of a pool."""
        return self._drafts[self.drafters].cost

    @property
    def overlap(self) -> bool:
        """Whether drafting and verification overlap."""
        return self._overlapped > 0.5

    @property
    def feeding(self) -> float:
        """Seconds in which the drafter reads one token of a new text."""
        return self._fed or self.draft.slopes[-1]

    @property
    def scoring(self) -> float:
        """Seconds per draft in which drafters of a pool score known tokens, in the mean over steps."""
        seconds, drafts = self._scored.tolist()
        return float(seconds / drafts) if drafts else 0.0

    @property
    def doubt(self) -> float:
        """Relative advantage that steps with drafts must have: the prediction error, within bounds."""
        return min(self.error, MAX_DOUBT)

    def drafting(self, depth: float, tokens: float, context: float, drafts: float) -> float:
        """Return the seconds of drafting ``tokens`` of ``drafts`` in ``depth`` passes, with ``context`` cached
        tokens."""
        if self.capabilities.costless or depth <= 0:
            return 0.0
        scoring = self.scoring * drafts
        if self.capabilities.single_pass:
            return self.draft.seconds(0.0, tokens, drafts) + scoring
        return self.draft.seconds(context, tokens / depth, drafts, depth) + scoring

    def predict(self, stats: StepStats) -> float:
        """Return the predicted seconds of a step like ``stats``."""
        target = self.target.seconds(stats.context_tokens, stats.batched_tokens, stats.sequences)
        draft = self.drafting(stats.depth, stats.proposed, stats.context_tokens, stats.drafts)
        rest = self.rest.seconds(0.0, stats.proposed, stats.sequences)
        return (max(draft, target) if self.overlap else draft + target) + rest

    def observe(self, stats: StepStats, fed: int = 0) -> None:
        """Store a measured step; ``fed`` counts tokens of new texts that the drafter read, which are not part of a
        step.
        """
        self._observed.append((stats, fed, self.drafters))
        self._spent += stats.total
        if self._spent >= BATCH_SECONDS or len(self._observed) >= self._batch_size:
            self.learn()

    def learn(self) -> None:
        """Learn from the stored steps."""
        if not self._observed:
            return
        observed, self._observed, self._spent = self._observed, [], 0.0
        self.learned += 1
        self._batch_size = min(2 * self._batch_size, MAX_BATCH)
        last = observed[-1][0]
        self.predicted = self.predict(last)  # before learning from the step
        if last.working > 0:
            self._errors.append(abs(self.predicted - last.working) / last.working)
        observed_steps = np.array([_row(*each) for each in observed], dtype=np.float64)
        self._correct(observed_steps)
        self._follow_rest(observed_steps)
        context, tokens, sequences, depth, _, drafts, draft, target, _, fed, members, scoring = observed_steps.T
        self._target.follow(np.stack([context, tokens, sequences, target, np.ones(len(observed))], 1)[target > 0])
        drafted = (depth > 0) & (fed == 0) & (draft > 0)
        if drafted.any() and not self.capabilities.costless:
            seen = np.array([scoring[drafted].sum(), drafts[drafted].sum()])
            self._scored = SCORING_MEMORY ** float(drafted.sum()) * self._scored + seen
            proposals = self._proposals(observed_steps)
            for m in set(members[drafted].tolist()):
                self._drafts[int(m)].follow(proposals[drafted & (members == m)])
        self._follow_feeding([(stats, fed) for stats, fed, _ in observed if fed and stats.times.draft > 0])
        self._compare(last)
        before, self._rounds = self._rounds, self._rounds + len(observed)
        if before // CHECK_EVERY != self._rounds // CHECK_EVERY:
            self._check_errors()

    def _follow_rest(self, observed_steps: Floats) -> None:
        """Update the overlap of drafting and verification, and the seconds of everything else."""
        _, _, sequences, _, proposed, _, draft, target, total, *_ = observed_steps.T
        shorter, keep = np.minimum(draft, target), (1.0 - UPDATE_RATE) ** len(observed_steps)
        if (shorter > 0).any():
            overlapped = np.clip((draft + target - total)[shorter > 0] / shorter[shorter > 0], 0.0, 1.0)
            keep_overlapped = (1.0 - UPDATE_RATE) ** len(overlapped)
            self._overlapped += (1.0 - keep_overlapped) * (float(overlapped.mean()) - self._overlapped)
        spent = np.maximum(draft, target) if self.overlap else draft + target
        typical = REST.fixed + REST.sequence * sequences + REST.slopes[0] * proposed
        factor = max(0.0, float(np.median((total - spent) / typical)))
        self._outside += (1.0 - keep) * (factor - self._outside)
        self.rest = REST.scaled(self._outside)

    def _correct(self, observed_steps: Floats) -> None:
        """Compare measured and predicted steps of each draft length."""
        context, tokens, sequences, depth, proposed, _, _, _, seconds, *_ = observed_steps.T
        drafted, repeats, once = depth > 0, [], np.ones(len(observed_steps))
        for longest in depth.tolist():
            self._repeats = self._repeats + 1 if longest == self._depth else 0
            self._depth = longest
            repeats.append(self._repeats)
        of_drafts, of_plain = np.minimum(tokens, sequences + proposed), np.minimum(tokens, sequences)
        target, plain = (
            self.target.of_all(np.stack([context, batched, sequences, once, once], 1)) for batched in (tokens, of_plain)
        )
        own = target
        if (of_drafts != tokens).any():  # the steps computed other requests' prompts
            own = self.target.of_all(np.stack([context, of_drafts, sequences, once, once], 1))
        draft = np.zeros(len(observed_steps))
        if not self.capabilities.costless:
            draft = drafted * self.draft.of_all(self._proposals(observed_steps))
        rest = self.rest.of_all(np.stack([once, proposed, sequences, once, once], 1))
        predicted = (np.maximum(draft, target) if self.overlap else draft + target) + rest
        weights = (own / np.maximum(target, 1e-12)) ** 2  # the time of other requests' prompts is less certain
        chosen = np.array(repeats) >= WARM_STEPS
        kinds = sequences[chosen].astype(np.int64), depth[chosen].astype(np.int64)
        plain = plain + self.rest.of_all(np.stack([once, 0 * proposed, sequences, once, once], 1))
        self.correction.follow(kinds, seconds[chosen], predicted[chosen], plain[chosen], weights[chosen])

    def _proposals(self, observed_steps: Floats) -> Floats:
        """Return the drafting of steps as calls, ``[S, 5]``, columns as in ``LatencySample``."""
        context, _, _, depth, proposed, drafts, draft, *_ = observed_steps.T
        if self.capabilities.single_pass:
            return np.stack([0 * context, proposed, drafts, draft, np.ones(len(observed_steps))], 1)
        passes = np.maximum(depth, 1.0)
        return np.stack([context, proposed / passes, drafts, draft, passes], 1)

    def _follow_feeding(self, observed: Sequence[tuple[StepStats, int]]) -> None:
        """Update the drafter's seconds per token of new texts."""
        tokens = sum(fed for _, fed in observed)
        if not tokens or self.capabilities.costless:
            return
        steps = (self.drafting(s.depth, s.proposed, s.context_tokens, s.drafts) for s, _ in observed)
        more = sum(s.times.draft for s, _ in observed) - sum(steps)
        weight = 1.0 - (1.0 - UPDATE_RATE) ** len(observed) if self._fed else 1.0
        self._fed += weight * (max(0.0, more) / tokens - self._fed)

    def _compare(self, last: StepStats) -> None:
        """Increase ``changed`` if the cost of a typical step has changed too much."""
        typical = (
            self.target.seconds(last.context_tokens, last.batched_tokens, last.sequences),
            self.draft.seconds(0, 1, 1),
        )
        if any(abs(now - before) > COST_CHANGE * before for now, before in zip(typical, self._typical, strict=True)):
            self.changed, self._typical = self.changed + 1, typical

    def gauges(self) -> Mapping[str, float]:
        """Return gauges for the metrics, as last learned."""
        return {
            "predicted_step_seconds": self.predicted,
            "prediction_error": self.error,
            "cost_refits": float(self.refits),
        }

    def _check_errors(self) -> None:
        self.error = median(self._errors) if self._errors else 0.0
        if self.error > MAX_ERROR and len(self._errors) == ERROR_WINDOW:
            self._errors.clear()
            if any([part.refit() for part in (self._target, *self._drafts)]):
                self.refits += 1
                self.changed += 1


def _row(stats: StepStats, fed: int, members: int) -> tuple[float, ...]:
    """Return a step without its scoring, whose seconds come last; scores of a new text are part of feeding."""
    times = stats.times
    drafts, scoring = stats.drafts or stats.sequences, 0.0 if fed else times.scoring
    return (
        stats.context_tokens, stats.batched_tokens, stats.sequences, stats.depth, stats.proposed, drafts,
        times.draft - scoring, times.target, stats.working - scoring, fed, members, scoring,
    )  # fmt: skip
