"""From a configuration of several models to the parts of an engine."""

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


def assemble_ensemble(cast: LoadedModels, drafter: Drafter | None, config: EngineConfig, text: Any) -> EngineComponents:
    """Parts around models that are loaded already; tests enter here.

    Args:
        drafter: one that is no member, which then proposes in the members' stead.
        text: an ``engine.build.TextInfo``.

    Raises:
        InvalidInput: models, law and options do not fit each other.
    """
    check_vocabularies(cast)
    blends = BlendRegistry(blend_options_of(config), len(cast.models))
    speculative = config.speculative_config or SpeculativeConfig()
    acceptance_methods = AcceptanceMethods()
    own = blends.build()
    panel = EnsembleDecoder(cast, blends, acceptance_methods, config.native == "auto")
    found = _proposing(panel, own, config) if drafter is None else _drafted(panel, drafter, speculative)
    longest = min(*(model.max_len for model in cast.models), found.pages.capacity)
    max_len = min(config.max_model_len or longest, longest)
    limits = SchedulerLimits(
        config.max_num_seqs, config.max_num_batched_tokens, max_len, acceptance_methods.chains_only
    )
    backend = getattr(text.tokenizer, "backend_tokenizer", None)
    return EngineComponents(
        model=cast.models[0],
        scheduler=Scheduler(found.pages, found.policy, limits),
        execution_mode=found.execution_mode,
        committer=OutputProcessor(backend, own.name, text.eos, relaxed=acceptance_methods.relaxed),
        resolver=InputProcessor(
            cast.models[0].vocab_size,
            max_len,
            text.eos,
            speculative.acceptance_method,
            LONGEST_DRAFT,
            found.proposes,
            frozenset(speculative.request_may_choose) - found.withheld,
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
        closers=found.closers,
    )


@dataclass(frozen=True, slots=True)
class _Found:
    """What depends on who proposes: the members themselves, or a drafter that is none of them.

    Attributes:
        withheld: what a request may not choose, because there is nothing to choose.
    """

    execution_mode: ExecutionMode
    pages: BlockManager
    policy: Policy
    proposes: bool
    withheld: frozenset[str]
    closers: tuple[Callable[[], None], ...]


def _proposing(panel: EnsembleDecoder, own: Blend, config: EngineConfig) -> _Found:
    """The members propose to each other."""
    options = config.collaboration
    proposer_policy = build_proposer_policy(options, len(panel.models), own.members)
    members = ProposingEnsemble(panel, proposer_policy, options.proposal == "parallel")
    pages = EnsembleKVManager([model.pages for model in panel.models], members.lines.fed, members.lines.drop)
    made = Collaborative(
        StepContext(
            None, panel.verifier, proposer_policy, time.monotonic, members=members, native=config.native == "auto"
        )
    )
    return _Found(
        made,
        pages,
        proposer_policy,
        proposer_policy.proposer_schedule.proposes,
        frozenset({"policy"}),
        (members.close,),
    )


def _drafted(panel: EnsembleDecoder, drafter: Drafter, speculative: SpeculativeConfig) -> _Found:
    """A drafter proposes to all of them, as to a single target."""
    joint = EnsembleVerifier(panel)
    policy = build_policy(speculative, drafter, time.monotonic)
    executor = executor_of(drafter, speculative.drafter_executor, panel.models[0].device)
    made = EXECUTION_MODES.load(speculative.execution_mode)(
        StepContext(drafter, joint, policy, time.monotonic, executor)
    )
    return _Found(made, joint.pages, policy, True, frozenset(), () if executor is None else (executor.close,))


def check_speculation(speculative: SpeculativeConfig, options: CollaborationConfig) -> None:
    """Refuse what is said of a drafter where there is none, and of the members' proposals where there is one."""
    if speculative.method == "off":
        for key in speculative.model_fields_set - {"method", "acceptance_method", "request_may_choose", "options"}:
            allowed = "absent without a method; how several models propose to each other is said in collaboration"
            raise InvalidInput(f"speculative_config.{key}", getattr(speculative, key), allowed)
        return
    if speculative.policy == "off":
        allowed = "another policy; with collaboration.proposal 'standard' nobody proposes"
        raise InvalidInput("speculative_config.policy", "off", allowed)
    for key in options.model_fields_set - {"request_ensembles"}:
        allowed = "absent where a drafter that is no member proposes, by speculative_config.method"
        raise InvalidInput(f"collaboration.{key}", getattr(options, key), allowed)


def blend_options_of(config: EngineConfig) -> Mapping[str, Any]:
    """How several models become one."""
    return {"method": "weighted"} if config.ensemble is None else config.ensemble


def build_proposer_policy(options: CollaborationConfig, count: int, members: Sequence[int]) -> GoodputProposerPolicy:
    """Who proposes how much to begin with, and whether that may change.

    Raises:
        InvalidInput: lengths or a proposer that these models do not have.
    """
    if options.proposer is not None and options.proposer >= count:
        raise InvalidInput("collaboration.proposer", options.proposer, f"a model's place, from 0 to {count - 1}")
    gammas = _gammas(options.gamma, count)
    quiet = options.proposal in ("standard", "parallel")
    proposer_schedule = FixedSchedule(
        gammas=(0,) * count if quiet else gammas or (1,) * count,
        order=rotations(count)[options.proposer or 0],
        alternate=options.proposal == "alternate",
    )
    free = ScheduleOptions(lengths=not quiet and gammas is None, proposer=options.proposer is None)
    return GoodputProposerPolicy(proposer_schedule, members, free)


def _gammas(given: str | int | list[int], count: int) -> tuple[int, ...] | None:
    """One length for each of ``count`` models; None where they are chosen."""
    if isinstance(given, str):
        return None
    gammas = (given,) * count if isinstance(given, int) else tuple(given)
    if len(gammas) != count:
        raise InvalidInput("collaboration.gamma", list(gammas), f"a list of one for each of the {count} models")
    return gammas
