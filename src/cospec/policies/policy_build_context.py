"""The context from which every policy is built, in addition to its own options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cospec.core.drafter_capabilities import DrafterCapabilities
from cospec.policies.latency.step import LatencyModels

DEFAULT_LENGTH = 4
DEFAULT_MAX_LENGTH = 8


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """The environment of a policy.

    Attributes:
        num_speculative_tokens: as configured: the length for policies with a fixed length, the longest length for
            policies that choose; None leaves the length to the policy.
        max_nodes, widths: as configured: the tree for policies with a fixed shape; None for chains.
        capabilities: what the drafter supports, and what drafting costs.
        costs: time models measured on this machine; without measurements, a policy learns them from steps.
        clock: returns seconds; None if the policy needs no clock.
    """

    num_speculative_tokens: int | None = None
    max_nodes: int | None = None
    widths: tuple[int, ...] = ()
    capabilities: DrafterCapabilities = DrafterCapabilities()
    costs: LatencyModels = LatencyModels()
    clock: Callable[[], float] | None = None

    @property
    def length(self) -> int:
        """The length for a policy with a fixed length."""
        return DEFAULT_LENGTH if self.num_speculative_tokens is None else self.num_speculative_tokens

    @property
    def may_grow(self) -> bool:
        """Whether a policy that chooses may make longer drafts than ``longest``."""
        return self.num_speculative_tokens is None and not self.capabilities.single_pass  # heads have a fixed number

    @property
    def longest(self) -> int:
        """The longest draft for a policy that chooses, at first."""
        return DEFAULT_MAX_LENGTH if self.num_speculative_tokens is None else self.num_speculative_tokens
