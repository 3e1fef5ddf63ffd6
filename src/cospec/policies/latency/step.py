"""Latency of a step, corrected by measured steps (SmartSpec section 4.3, equations 4 to 7).

T_step = T_draft + T_target + rest, or max(T_draft, T_target) + rest if measurements show that both overlap. Each part
is an online fit. CoSine's equation 7 always adds T_draft and T_target. Where both overlap, as in its own pipeline, the
longer one sets the pace, so the sum is too long. One sequence alone has no other half to overlap with. A part that
stays wrong by more than a fifth is refitted to the latest steps, if the new fit explains the steps much better.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

from cospec.core.drafter_capabilities import DrafterCapabilities
from cospec.core.stats import StepStats
from cospec.policies.latency.depth_correction import DepthCorrection
from cospec.policies.latency.forward import Floats, ForwardLatency, bounded, middle
from cospec.policies.latency.online_fit import GUESSED, MEASURED, OnlineFit
from cospec.policies.latency.step_columns import StepColumns, StepStore

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
        self._depth, self._repeats = 0.0, 0  # of the latest step, and the number of equal steps before
        self._drafts = [OnlineFit(whole.scaled(max(1, m) / self.drafters), trust) for m in range(self.drafters + 1)]
        self._overlapped = 0.0  # share of the shorter of both that overlaps with the longer
        self._drafted = 0  # steps that this share was learned from
        self._errors: deque[float] = deque(maxlen=ERROR_WINDOW)
        self._store = StepStore()
        self._latest: StepStats | None = None
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
        """One step of the drafter, or of ``drafters`` members of a pool.

        Before that number drafted, the time is proportional to the time of the nearest number that did.
        """
        own, m = self._drafts[self.drafters], self.drafters
        known = [] if own.measured else [k for k in range(1, len(self._drafts)) if self._drafts[k].measured]
        if not known:
            return own.cost
        nearest = min(known, key=lambda k: abs(k - m))
        return self._drafts[nearest].cost.scaled(m / nearest)

    def overlaps(self, alone: bool) -> bool:
        """Whether drafting and verification overlap; before any draft, whether the execution mode has groups for it.

        Args:
            alone: whether the step has one sequence, whose draft cannot overlap with another group.
        """
        groups = 1 if self._latest is None else self._latest.groups
        if groups > 1 and alone:
            return False
        return self._overlapped > 0.5 if self._drafted else groups > 1

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
        return (max(draft, target) if self.overlaps(stats.alone) else draft + target) + rest

    def observe(self, stats: StepStats, fed: int = 0) -> None:
        """Store a measured step; ``fed`` counts tokens of new texts that the drafter read, which are not part of a
        step.
        """
        if self._latest is not None and stats.groups != self._latest.groups:
            self.learn()
            self._drafted = 0  # the overlap holds for one execution mode
        stored = self._store.add(stats, fed, self.drafters)
        self._latest = stats
        self._spent += stats.total
        if self._spent >= BATCH_SECONDS or stored >= self._batch_size:
            self.learn()

    def learn(self) -> None:
        """Learn from the stored steps."""
        count, last = len(self._store), self._latest
        if not count or last is None:
            return
        steps, self._spent = self._store.take(), 0.0
        self.learned += 1
        self._batch_size = min(2 * self._batch_size, MAX_BATCH)
        self.predicted = self.predict(last)  # before learning from the step
        if last.working > 0:
            self._errors.append(abs(self.predicted - last.working) / last.working)
        self._correct(steps)
        self._follow_rest(steps)
        calls = np.array([steps.context, steps.tokens, steps.sequences, steps.target, np.ones(count)]).T
        self._target.follow(calls[steps.target > 0])
        if not self.capabilities.costless:
            self._follow_drafts(steps)
        self._compare(last)
        before, self._rounds = self._rounds, self._rounds + count
        if before // CHECK_EVERY != self._rounds // CHECK_EVERY:
            self._check_errors()

    def _follow_rest(self, steps: StepColumns) -> None:
        """Update the overlap of drafting and verification, and the seconds of everything else."""
        draft, target, both = steps.draft, steps.target, steps.draft + steps.target
        shorter, keep = np.minimum(draft, target), (1.0 - UPDATE_RATE) ** len(draft)
        # undrafted steps have some microseconds of the drafter's other calls, whose share is noise
        drafted = (shorter > 0) & (steps.depth > 0) & (steps.alone == 0)
        shares = ((both - steps.working) / np.maximum(shorter, 1e-12))[drafted]
        if len(shares):
            self._drafted += len(shares)
            weight = max(1.0 - (1.0 - UPDATE_RATE) ** len(shares), len(shares) / self._drafted)
            self._overlapped += weight * (float(bounded(shares, 0.0, 1.0).mean()) - self._overlapped)
        spent = self._elapsed(steps, draft, target)
        typical = REST.of_all(0.0, steps.proposed, steps.sequences)
        factor = max(0.0, middle((steps.working - spent) / typical))
        self._outside += (1.0 - keep) * (factor - self._outside)
        self.rest = REST.scaled(self._outside)

    def _elapsed(self, steps: StepColumns, draft: Floats, target: Floats) -> Floats:
        """Return the seconds until drafting and verification have both ended, ``[S]``."""
        one_by_one = draft + target
        if not self.overlaps(alone=False):
            return one_by_one
        return np.where(steps.alone > 0, one_by_one, np.maximum(draft, target))

    def _correct(self, steps: StepColumns) -> None:
        """Compare measured and predicted steps of each draft length."""
        context, tokens, sequences, proposed = steps.context, steps.tokens, steps.sequences, steps.proposed
        chosen = self._warm(steps.depth)
        if self.overlaps(alone=False):
            chosen &= steps.alone > 0  # corrections are for drafting that does not overlap
        plain = self.target.of_all(context, np.minimum(tokens, sequences), sequences)
        target = own = self.target.of_all(context, tokens, sequences)
        of_drafts = np.minimum(tokens, sequences + proposed)
        if (of_drafts != tokens).any():  # the steps computed other requests' prompts
            own = self.target.of_all(context, of_drafts, sequences)
        draft = self._drafting(steps)
        rest = self.rest.of_all(0.0, proposed, sequences)
        predicted = self._elapsed(steps, draft, target) + rest
        plain = plain + rest - self.rest.slopes[0] * proposed
        weights = (own / np.maximum(target, 1e-12)) ** 2  # the time of other requests' prompts is less certain
        kinds = sequences[chosen].astype(np.int64), steps.depth[chosen].astype(np.int64)
        self.correction.follow(kinds, steps.working[chosen], predicted[chosen], plain[chosen], weights[chosen])

    def _warm(self, depth: Floats) -> npt.NDArray[np.bool_]:
        """Return the steps after at least ``WARM_STEPS`` steps of the same ``depth [S]``."""
        places, new = np.arange(len(depth)), np.empty(len(depth), np.bool_)
        new[0], new[1:] = depth[0] != self._depth, depth[1:] != depth[:-1]
        repeats = places - np.maximum.accumulate(np.where(new, places, -1 - self._repeats))
        self._depth, self._repeats = float(depth[-1]), int(repeats[-1])
        return np.asarray(repeats >= WARM_STEPS)

    def _calls(self, steps: StepColumns) -> tuple[Floats, Floats, Floats, Floats]:
        """Return the drafting of steps as calls: context, tokens, sequences and passes, each ``[S]``."""
        if self.capabilities.single_pass:
            return np.zeros_like(steps.context), steps.proposed, steps.drafts, np.ones_like(steps.context)
        passes = np.maximum(steps.depth, 1.0)
        return steps.context, steps.proposed / passes, steps.drafts, passes

    def _drafting(self, steps: StepColumns) -> Floats:
        """Return the predicted seconds of drafting, ``[S]``, without scoring."""
        if self.capabilities.costless:
            return np.zeros(len(steps.depth))
        return (steps.depth > 0) * self.draft.of_all(*self._calls(steps))

    def _follow_drafts(self, steps: StepColumns) -> None:
        """Update the drafter's seconds: of drafts by number of drafters, of scoring, and of feeding new texts."""
        drafted = (steps.depth > 0) & (steps.draft > 0)
        known, members = drafted & (steps.fed == 0), steps.members
        if known.any():
            seen = np.array([steps.scoring[known].sum(), steps.drafts[known].sum()])
            self._scored = SCORING_MEMORY ** float(known.sum()) * self._scored + seen
            context, tokens, sequences, passes = self._calls(steps)
            calls = np.array([context, tokens, sequences, steps.draft, passes]).T
            for m in set(members[known].tolist()):
                self._drafts[int(m)].follow(calls[known & (members == m)])
        feeding = (steps.fed > 0) & (steps.draft > 0)
        if feeding.any():
            usual = self._drafting(steps) + self.scoring * steps.drafts * drafted
            more = float((steps.draft - usual)[feeding].sum())
            weight = 1.0 - (1.0 - UPDATE_RATE) ** int(feeding.sum()) if self._fed else 1.0
            self._fed += weight * (max(0.0, more) / float(steps.fed[feeding].sum()) - self._fed)

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
            "time_model_refits": float(self.refits),
        }

    def _check_errors(self) -> None:
        self.error = median(self._errors) if self._errors else 0.0
        if self.error > MAX_ERROR and len(self._errors) == ERROR_WINDOW:
            self._errors.clear()
            if any([part.refit() for part in (self._target, *self._drafts)]):
                self.refits += 1
                self.changed += 1
