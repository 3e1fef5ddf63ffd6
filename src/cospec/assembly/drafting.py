"""What proposes tokens, in which order, by which policy: parts of an engine from a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cospec.config import SpeculativeConfig
from cospec.core.drafter_capabilities import DrafterCapabilities
from cospec.core.interfaces import Clock, ExecutionMode, Executor, ModeComponents, Model, MultiStepRunner
from cospec.core.plugin_base import Drafter, Policy
from cospec.plugin_options import parse
from cospec.policies.latency.step import LatencyModels
from cospec.policies.policy_build_context import PolicyContext
from cospec.policies.requested_policy import RequestedPolicy
from cospec.registry import EXECUTION_MODES, EXECUTORS, POLICIES


@dataclass(frozen=True, slots=True)
class Drafting:
    """What proposes tokens, and in which order.

    Attributes:
        execution_mode: makes the execution mode from the components of a step.
        drafter: None: no drafter, or the verifying models propose to each other.
        executor: see ``ModeComponents``.
        multi_step: runs several steps as one call; None: no such runner, for ``why_no_multi_step``.
        proposes: whether any model or drafter proposes.
        fixed_choices: the choices that requests cannot make here, whatever the configuration allows.
        learns: whether drafts depend on earlier requests, through the drafter or the policy.
        closers: what ends the threads and processes.
    """

    execution_mode: Callable[[ModeComponents], ExecutionMode]
    policy: Policy
    drafter: Drafter | None = None
    executor: Executor | None = None
    multi_step: MultiStepRunner | None = None
    why_no_multi_step: str = ""
    proposes: bool = True
    fixed_choices: frozenset[str] = frozenset()
    learns: bool = True
    closers: tuple[Callable[[], None], ...] = ()


def drafting_by(
    drafter: Drafter | None,
    speculative: SpeculativeConfig,
    model: Model,
    clock: Clock,
    costs: LatencyModels = LatencyModels(),
) -> Drafting:
    """The configured order and policy for one drafter, or for none; ``model`` is the one that verifies."""
    policy = POLICIES.load("off" if drafter is None else speculative.policy_name)
    execution_mode = EXECUTION_MODES.load("sequential" if drafter is None else speculative.execution_mode)
    chosen = build_policy(speculative, drafter, clock, costs)
    executor = None
    if drafter is not None:  # last: may start a thread
        executor = EXECUTORS.load(speculative.drafter_executor).overlap(drafter, model.device)
    return Drafting(
        execution_mode,
        chosen,
        drafter,
        executor,
        proposes=drafter is not None,
        learns=drafter is not None and (drafter.learns or policy.learns),
        closers=_closers(drafter, executor),
    )


def _closers(drafter: Drafter | None, executor: Executor | None) -> tuple[Callable[[], None], ...]:
    """Return what ends the drafter's own thread or process first, then the threads and processes of its drafters."""
    return (
        *([] if executor is None else [executor.close]),
        *([] if drafter is None else [drafter.close]),
    )


def check_policy(speculative: SpeculativeConfig) -> None:
    """Refuse options that the policy does not have, before any weight is read."""
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
    return RequestedPolicy(usual, lambda name: _build(name, {}, setting))


def _build(name: str, options: Mapping[str, Any], setting: PolicyContext) -> Policy:
    cls = POLICIES.load(name)
    made: Policy = cls.build(parse(cls.Options, options, "speculative_config.policy_options."), setting)
    return made
