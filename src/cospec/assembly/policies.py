"""From a configuration to the policy of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cospec.config import SpeculativeConfig
from cospec.core.interfaces import Clock
from cospec.core.plugins import Drafter, Policy
from cospec.core.types import DrafterCapabilities
from cospec.options import parse
from cospec.policies.context import PolicyContext
from cospec.policies.latency.step import LatencyModels
from cospec.policies.per_request import PolicyRouter
from cospec.registry import POLICIES


def check_policy(speculative: SpeculativeConfig) -> None:
    """Refuse an unknown policy, or options that it does not have, before any weight is read."""
    POLICIES.check(speculative.policy, "auto")
    parse(
        POLICIES.load(speculative.policy_name).Options, speculative.policy_options, "speculative_config.policy_options."
    )


def build_policy(
    speculative: SpeculativeConfig, drafter: Drafter | None, clock: Clock, costs: LatencyModels = LatencyModels()
) -> Policy:
    """The configured policy for this drafter, and others for requests that ask; none without a drafter."""
    length = speculative.num_speculative_tokens
    setting = PolicyContext(
        num_speculative_tokens=length if isinstance(length, int) else None,
        max_nodes=speculative.max_nodes,
        widths=speculative.widths,
        capabilities=drafter.capabilities if drafter else DrafterCapabilities(),
        costs=costs,
        clock=clock,
    )
    if drafter is None:
        return _build("off", {}, setting)
    usual = _build(speculative.policy_name, speculative.policy_options, setting)
    return PolicyRouter(usual, lambda name: _build(name, {}, setting))


def _build(name: str, options: Mapping[str, Any], setting: PolicyContext) -> Policy:
    cls = POLICIES.load(name)
    made: Policy = cls.build(parse(cls.Options, options, "speculative_config.policy_options."), setting)
    return made
