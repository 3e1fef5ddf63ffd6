"""Counts and times of a token, of a request, of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one position before any processor: the token's own, and the likeliest ``(id, logprob)``."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class RequestStats:
    """Counters of one request; the last event holds a copy.

    The scheduler writes ``cached_prompt_tokens`` and ``preemptions``, the output processor all others.
    """

    target_calls: int = 0  # forwards of the target that the request took part in
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    rejections: int = 0
    cached_prompt_tokens: int = 0
    preemptions: int = 0
    accepted_by_drafter: dict[str, int] = field(default_factory=dict)
    tokens_by_source: dict[str, int] = field(default_factory=dict)  # committed tokens, see ``Event.sources``
    model_calls: dict[str, int] = field(default_factory=dict)  # of each member of an ensemble
    divergence: float = 0.0  # sum over tokens of a relaxed blend: total variation from the target's distribution
    relaxed_tokens: int = 0  # tokens of a relaxed blend
    ttft: float | None = None  # seconds from arrival to the first token
    e2e: float | None = None  # seconds from arrival to the end

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / drafts: mean tokens per verified draft, with the recovered or bonus token."""
        return 1.0 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def mean_divergence(self) -> float | None:
        """Mean total variation per token between the output's distribution and the target's; None: not relaxed."""
        return self.divergence / self.relaxed_tokens if self.relaxed_tokens else None


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of drafting and of verification, of one step or of several steps in one call.

    Attributes:
        each: the same for each of several steps, in order; empty for one step.
        scoring: the part of ``draft`` in which drafters of a pool scored known tokens.
    """

    draft: float = 0.0
    target: float = 0.0
    each: tuple[tuple[float, float], ...] = ()
    scoring: float = 0.0

    @classmethod
    def of(cls, each: tuple[tuple[float, float], ...]) -> StepTimes:
        """Return the times of several steps of one call."""
        if len(each) == 1:
            return cls(*each[0])
        return cls(sum([draft for draft, _ in each]), sum([target for _, target in each]), each)

    @property
    def steps(self) -> int:
        """Number of steps of the call."""
        return max(1, len(self.each))


@dataclass(frozen=True, slots=True)
class ExecutionInfo:
    """The execution mode in use, and the reason of the choice.

    Attributes:
        drafts_ahead: drafts made during a verification that were used, by outcome; grows.
        groups: parts of the sequences with drafts, of which a step verifies one.
    """

    name: str
    reason: str = "as configured"
    drafts_ahead: Mapping[str, int] = field(default_factory=dict)
    groups: int = 1


@dataclass(frozen=True, slots=True)
class StepStats:
    """Counts and seconds of one step, or their sums over several steps of one call.

    Attributes:
        batched_tokens: tokens that the target computed, drafts included.
        context_tokens: tokens in the target's cache for the sequences of the step, before the step.
        depth: tokens of the longest draft.
        drafts: sequences with a draft.
        planning: seconds before any model was called.
        groups: as of ``ExecutionInfo``.
        planned_sequences: of all groups; 0 where the step does not say.
    """

    step: int
    sequences: int
    batched_tokens: int
    context_tokens: int
    depth: int
    proposed: int
    accepted: int
    committed: int
    times: StepTimes
    total: float
    drafts: int = 0
    planning: float = 0.0
    groups: int = 1
    planned_sequences: int = 0

    @property
    def alone(self) -> bool:
        """Whether drafting and verification took turns, because one group had the only sequence."""
        return self.groups > 1 and self.planned_sequences == 1

    @property
    def working(self) -> float:
        """Seconds after planning."""
        return self.total - self.planning
