"""What every policy is built from, beside its own options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cospec.core.types import DrafterCapabilities
from cospec.policies.latency.step import LatencyModels

DEFAULT_LENGTH = 4
LONGEST = 8


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """Where a policy works.

    Attributes:
        num_speculative_tokens: as configured: the length for policies that keep to one, the longest for those that
            choose; None leaves it to the policy.
        max_nodes, widths: as configured: the trees of policies that keep to one shape; None for chains.
        offer: what the drafter can be asked for.
        costs: what forwards take, as measured on this machine; where nobody measured, a policy learns it from rounds.
        clock: seconds; None where the policy has no use for it.
    """

    num_speculative_tokens: int | None = None
    max_nodes: int | None = None
    widths: tuple[int, ...] = ()
    capabilities: DrafterCapabilities = DrafterCapabilities()
    costs: LatencyModels = LatencyModels()
    clock: Callable[[], float] | None = None

    @property
    def length(self) -> int:
        """The length for a policy that keeps to one."""
        return DEFAULT_LENGTH if self.num_speculative_tokens is None else self.num_speculative_tokens

    @property
    def longest(self) -> int:
        """The longest draft for a policy that chooses."""
        return LONGEST if self.num_speculative_tokens is None else self.num_speculative_tokens
