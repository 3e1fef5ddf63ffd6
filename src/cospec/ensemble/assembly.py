"""Build the components of an engine from a configuration of several models."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cospec.acceptance.methods import AcceptanceMethods
from cospec.config import LONGEST_DRAFT, CollaborationConfig, EngineConfig, SpeculativeConfig
from cospec.core.drafter_builder import executor_of
from cospec.core.engine import EngineComponents
from cospec.core.interfaces import Blend, BlockManager, ExecutionMode, StepContext
from cospec.core.output_processor import OutputProcessor
from cospec.core.plugins import Drafter, Policy
from cospec.core.policy_builder import build_policy
from cospec.core.scheduler import Scheduler, SchedulerLimits
from cospec.core.types import DrafterCapabilities
from cospec.ensemble.collaborative import Collaborative
from cospec.ensemble.ensemble import (
    BlendRegistry,
    EnsembleDecoder,
    LoadedModels,
    ProposingEnsemble,
    check_vocabularies,
)
from cospec.ensemble.proposer_policy import (
    FixedSchedule,
    GoodputProposerPolicy,
    ScheduleOptions,
    rotations,
)
from cospec.ensemble.verifier import EnsembleKVManager, EnsembleVerifier
from cospec.errors import InvalidInput
from cospec.registry import EXECUTION_MODES
from cospec.text.input_processor import InputProcessor


def assemble_ensemble(
    loaded: LoadedModels, drafter: Drafter | None, config: EngineConfig, text: Any
) -> EngineComponents:
    """Build the components around loaded models; tests enter here.

    Args:
        drafter: a drafter that is no member; it proposes instead of the members.
        text: a ``core.build.TextInfo``.

    Raises:
        InvalidInput: models, blend and options do not fit each other.
    """
    check_vocabularies(loaded)
    blends = BlendRegistry(blend_options_of(config), len(loaded.models))
    speculative = config.speculative_config or SpeculativeConfig()
    acceptance_methods = AcceptanceMethods()
    own = blends.build()
    decoder = EnsembleDecoder(loaded, blends, acceptance_methods, config.native == "auto")
    setup = _setup_members(decoder, own, config) if drafter is None else _setup_drafter(decoder, drafter, speculative)
    longest = min(*(model.max_len for model in loaded.models), setup.pages.capacity)
    max_len = min(config.max_model_len or longest, longest)
    limits = SchedulerLimits(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        max_len,
        acceptance_methods.chains_only,
        max_in_flight=setup.execution_mode.components.verifier.max_in_flight,
    )
    backend = getattr(text.tokenizer, "backend_tokenizer", None)
    return EngineComponents(
        model=loaded.models[0],
        scheduler=Scheduler(setup.pages, setup.policy, limits),
        execution_mode=setup.execution_mode,
        committer=OutputProcessor(backend, own.name, text.eos, relaxed=acceptance_methods.relaxed),
        resolver=InputProcessor(
            loaded.models[0].vocab_size,
            max_len,
            text.eos,
            speculative.acceptance_method,
            LONGEST_DRAFT,
            setup.proposes,
            frozenset(speculative.request_may_choose) - setup.unavailable,
            stream_kinds=drafter.stream_kinds if drafter else None,
            drafters=drafter.names if drafter else None,
            ensembles=(lambda ensemble: blends.build(ensemble).name)
            if config.collaboration.request_ensembles
            else None,
            sampled_method="recursive"
            if speculative.branches(drafter.capabilities if drafter else DrafterCapabilities())
            else "block",
        ),
        distribution=own.name,
        tokenizer=text.tokenizer,
        model_path=text.path,
        weights=drafter.weights if drafter else dict,
        closers=setup.closers,
    )


@dataclass(frozen=True, slots=True)
class _ProposalSetup:
    """The components that depend on who proposes: the members, or a separate drafter.

    Attributes:
        unavailable: the options that requests cannot choose here.
    """

    execution_mode: ExecutionMode
    pages: BlockManager
    policy: Policy
    proposes: bool
    unavailable: frozenset[str]
    closers: tuple[Callable[[], None], ...]


def _setup_members(decoder: EnsembleDecoder, own: Blend, config: EngineConfig) -> _ProposalSetup:
    """Let the members propose to each other."""
    options, native = config.collaboration, config.native == "auto"
    proposer_policy = build_proposer_policy(options, len(decoder.models), own.members)
    members = ProposingEnsemble(decoder, proposer_policy, options.proposal == "parallel")
    pages = EnsembleKVManager([model.pages for model in decoder.models], members.queues.fed, members.queues.drop)
    components = StepContext(None, decoder.verifier, proposer_policy, time.monotonic, members=members, native=native)
    made = Collaborative(components)
    return _ProposalSetup(
        made,
        pages,
        proposer_policy,
        proposer_policy.proposer_schedule.proposes,
        frozenset({"policy"}),
        (members.close,),
    )


def _setup_drafter(decoder: EnsembleDecoder, drafter: Drafter, speculative: SpeculativeConfig) -> _ProposalSetup:
    """Let one drafter propose to all members, as to a single target."""
    joint = EnsembleVerifier(decoder)
    policy = build_policy(speculative, drafter, time.monotonic)
    executor = executor_of(drafter, speculative.drafter_executor, decoder.models[0].device)
    made = EXECUTION_MODES.load(speculative.execution_mode)(
        StepContext(drafter, joint, policy, time.monotonic, executor)
    )
    return _ProposalSetup(made, joint.pages, policy, True, frozenset(), () if executor is None else (executor.close,))


def check_speculation(speculative: SpeculativeConfig, options: CollaborationConfig) -> None:
    """Reject drafter options without a drafter, and options of the members' proposals with a drafter.

    Raises:
        InvalidInput: an option has no effect in this configuration.
    """
    if speculative.method == "off":
        for key in speculative.model_fields_set - {"method", "acceptance_method", "request_may_choose", "options"}:
            allowed = "absent without a method; collaboration configures proposals between several models"
            raise InvalidInput(f"speculative_config.{key}", getattr(speculative, key), allowed)
        return
    if speculative.policy == "off":
        allowed = "another policy; collaboration.proposal 'standard' disables proposals"
        raise InvalidInput("speculative_config.policy", "off", allowed)
    for key in options.model_fields_set - {"request_ensembles"}:
        allowed = "absent where speculative_config.method sets a drafter"
        raise InvalidInput(f"collaboration.{key}", getattr(options, key), allowed)


def blend_options_of(config: EngineConfig) -> Mapping[str, Any]:
    """Return the options of the engine's own blend; equal weights by default."""
    return {"method": "weighted"} if config.ensemble is None else config.ensemble


def build_proposer_policy(options: CollaborationConfig, count: int, members: Sequence[int]) -> GoodputProposerPolicy:
    """Build the policy with its initial schedule and its degrees of freedom.

    Raises:
        InvalidInput: the lengths or the proposer do not match ``count`` models.
    """
    if options.proposer is not None and options.proposer >= count:
        raise InvalidInput("collaboration.proposer", options.proposer, f"a model's index, from 0 to {count - 1}")
    gammas = _gammas(options.gamma, count)
    no_proposals = options.proposal in ("standard", "parallel")
    proposer_schedule = FixedSchedule(
        gammas=(0,) * count if no_proposals else gammas or (1,) * count,
        order=rotations(count)[options.proposer or 0],
        alternate=options.proposal == "alternate",
    )
    free = ScheduleOptions(lengths=not no_proposals and gammas is None, proposer=options.proposer is None)
    return GoodputProposerPolicy(proposer_schedule, members, free)


def _gammas(given: str | int | list[int], count: int) -> tuple[int, ...] | None:
    """Return one length per model; None where the policy chooses."""
    if isinstance(given, str):
        return None
    gammas = (given,) * count if isinstance(given, int) else tuple(given)
    if len(gammas) != count:
        raise InvalidInput("collaboration.gamma", list(gammas), f"a list, one for each of the {count} models")
    return gammas
