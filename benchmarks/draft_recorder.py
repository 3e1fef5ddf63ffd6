"""A policy that records the confidence of each draft token and the target's decision about the token.

*Confidence* is the drafter's probability of the token that the drafter proposes: the output probability of SmartSpec's
appendix. Greedy tokens have their probability at temperature 1. Sampled tokens have the probability that they were
drawn with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

import cospec
from cospec.assembly.build import build_components
from cospec.config import EngineConfig
from cospec.core.engine import Engine
from cospec.core.plugin_base import Policy
from cospec.core.stats import StepStats
from cospec.core.types import BatchState, Commit, Draft, DraftBudget
from cospec.plugin_options import Options
from cospec.policies.policy_build_context import PolicyContext
from cospec.policies.requested_policy import RequestedPolicy

Floats = npt.NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class Token:
    """One draft token; ``accepted`` is None for a token that the target did not judge."""

    prompt: int
    position: int
    confidence: float
    accepted: bool | None


class RecorderOptions(Options):
    """No options: ``num_speculative_tokens`` sets the length."""


class DraftRecorder(Policy):
    """Chains of ``length`` tokens, and for each draft token its confidence and the target's decision."""

    Options: ClassVar[type[RecorderOptions]] = RecorderOptions
    needs_latency: ClassVar[bool] = False
    learns: ClassVar[bool] = False

    def __init__(self, length: int) -> None:
        self.length = length
        self.tokens: list[Token] = []
        self._drafts: dict[str, Draft] = {}

    @classmethod
    def build(cls, options: RecorderOptions, context: PolicyContext) -> DraftRecorder:
        """Build the policy with the configured length."""
        return cls(context.length)

    def plan(self, load: BatchState) -> list[DraftBudget]:
        """Return the same budget for all requests."""
        return [DraftBudget(self.length, self.length, confident=True)] * len(load.ready)

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        """Keep the drafts, and return the drafts unchanged."""
        self._drafts.update((draft.id, draft) for draft in drafts)
        return drafts

    def observe(self, stats: StepStats, commits: Sequence[Commit]) -> None:
        """Record the tokens of each verified draft; the ids of requests are numbers of prompts."""
        for commit in commits:
            if (draft := self._drafts.pop(commit.id, None)) is not None and commit.drafted:
                found = confidences(draft)[: commit.drafted].tolist()
                judged = [True] * len(commit.path) + [False] * commit.rejected
                for place, value in enumerate(found):
                    decision = judged[place] if place < len(judged) else None
                    self.tokens.append(Token(int(commit.id.split("-")[0]), place, value, decision))

    def gauges(self) -> Mapping[str, float]:
        """Return the length."""
        return {"speculation_length": float(self.length)}


def confidences(draft: Draft) -> Floats:
    """The drafter's probability of each token of a draft, ``[N]``.

    Raises:
        ValueError: the draft has neither distributions nor confidences.
    """
    if draft.q is not None:
        return np.asarray(draft.q[np.arange(len(draft)), list(draft.tokens)])
    if draft.confidence is None:
        raise ValueError(f"The draft of request {draft.id} has no confidences; a drafter with probabilities is needed.")
    return np.asarray(draft.confidence)


cospec.register_policy("recorder", DraftRecorder)


def recording_engine(config: EngineConfig) -> tuple[Engine, DraftRecorder]:
    """The engine of ``config``, whose policy is ``recorder``, and this policy."""
    engine = Engine(build_components(config), config)
    policy = engine.scheduler.policy
    assert isinstance(policy, RequestedPolicy) and isinstance(policy.default, DraftRecorder)
    return engine, policy.default
