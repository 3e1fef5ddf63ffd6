"""From a configuration to the policy of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cospec.config import SpeculativeConfig
from cospec.options import parse
from cospec.plugins import Drafter, Policy
from cospec.policies.choice import Choice
from cospec.policies.round_cost import Costs
from cospec.policies.setting import PolicySetting
from cospec.protocols import Clock
from cospec.registry import POLICIES
from cospec.types import Offer


def check_policy(speculative: SpeculativeConfig) -> None:
    """Refuse an unknown policy, or options that it does not have, before any weight is read."""
    POLICIES.check(speculative.policy, "auto")
    parse(
        POLICIES.load(speculative.policy_name).Options, speculative.policy_options, "speculative_config.policy_options."
    )


def build_policy(
    speculative: SpeculativeConfig, drafter: Drafter | None, clock: Clock, costs: Costs = Costs()
) -> Policy:
    """The configured policy for this drafter, and others for requests that ask; none without a drafter."""
    length = speculative.num_speculative_tokens
    setting = PolicySetting(
        num_speculative_tokens=length if isinstance(length, int) else None,
        max_nodes=speculative.max_nodes,
        widths=speculative.widths,
        offer=drafter.offer if drafter else Offer(),
        costs=costs,
        clock=clock,
    )
    if drafter is None:
        return _build("off", {}, setting)
    usual = _build(speculative.policy_name, speculative.policy_options, setting)
    return Choice(usual, lambda name: _build(name, {}, setting))


def _build(name: str, options: Mapping[str, Any], setting: PolicySetting) -> Policy:
    cls = POLICIES.load(name)
    made: Policy = cls.build(parse(cls.Options, options, "speculative_config.policy_options."), setting)
    return made
