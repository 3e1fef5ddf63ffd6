"""Build the components of an engine from a configuration of several models."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from cospec.assembly.components import AcceptanceMethods, TextInfo, Verification, connect
from cospec.assembly.drafting import Drafting, drafting_by
from cospec.config import CollaborationConfig, EngineConfig, SpeculativeConfig
from cospec.core.engine import EngineComponents
from cospec.core.interfaces import Blend
from cospec.core.plugin_base import Drafter
from cospec.ensemble.blends.registry import BlendRegistry, distribution_of
from cospec.ensemble.collaborative import Collaborative
from cospec.ensemble.ensemble import (
    EnsembleDecoder,
    LoadedModels,
    ProposingEnsemble,
    Threads,
    check_vocabularies,
)
from cospec.ensemble.native_steps import SEVERAL_MODELS, member_runner
from cospec.ensemble.proposer_policy import (
    FixedSchedule,
    GoodputProposerPolicy,
    ScheduleOptions,
    rotations,
)
from cospec.ensemble.verifier import EnsembleKVManager, EnsembleVerifier
from cospec.errors import InvalidInput
from cospec.native.multi_step import LONGEST, NATIVE_OFF


def assemble_ensemble(
    loaded: LoadedModels, drafter: Drafter | None, config: EngineConfig, text: TextInfo
) -> EngineComponents:
    """Connect the models of an ensemble, which are loaded; tests enter here.

    Args:
        drafter: a drafter that is no member; it proposes instead of the members.

    Raises:
        InvalidInput: models, blend and options do not fit each other.
    """
    clock, speculative = time.monotonic, config.speculative_config or SpeculativeConfig()
    decoder, verification = build_verification(loaded, config, text)
    if drafter is None:
        parallel = config.collaboration.proposal == "parallel"
        threads = ThreadPoolExecutor(len(decoder.models)) if parallel else None
        verification, drafting = propose_by_members(decoder, verification, config, threads, config.native == "auto")
    else:
        drafting = replace(
            drafting_by(drafter, speculative, loaded.models[0], clock), why_no_multi_step=SEVERAL_MODELS, learns=True
        )
    limits = verification.limits(config)
    if drafting.multi_step is not None:
        limits = replace(limits, max_steps=LONGEST)
    return connect(verification, drafting, speculative, limits, clock)


def build_verification(
    loaded: LoadedModels, config: EngineConfig, text: TextInfo
) -> tuple[EnsembleDecoder, Verification]:
    """Return what blends the models, and the verification of drafts by all models.

    Raises:
        InvalidInput: models and blend do not fit each other.
    """
    check_vocabularies(loaded)
    blends, acceptance_methods = BlendRegistry(blend_options_of(config), len(loaded.models)), AcceptanceMethods()
    decoder = EnsembleDecoder(loaded, blends, acceptance_methods, config.native == "auto")
    verifier = EnsembleVerifier(decoder)
    verification = Verification(
        loaded.models[0],
        verifier,
        verifier.pages,
        min(model.max_len for model in loaded.models),
        distribution_of(blends.build()),
        acceptance_methods,
        text,
        (lambda ensemble: distribution_of(blends.build(ensemble))) if config.collaboration.request_ensembles else None,
        loaded.models,
    )
    return decoder, verification


def propose_by_members(
    decoder: EnsembleDecoder,
    verification: Verification,
    config: EngineConfig,
    threads: Threads | None,
    rollouts: bool,
) -> tuple[Verification, Drafting]:
    """Let the models propose to each other; a request cannot choose their policy.

    Args:
        threads, rollouts: see ``ProposingEnsemble``.
    """
    policy = build_proposer_policy(config.collaboration, len(decoder.models), decoder.blends.build())
    members = ProposingEnsemble(decoder, policy, threads, rollouts)
    drafting = Drafting(
        partial(Collaborative, members),
        policy,
        multi_step=member_runner(decoder, members.chains) if rollouts else None,
        why_no_multi_step=SEVERAL_MODELS if rollouts else NATIVE_OFF,
        proposes=policy.proposer_schedule.proposes,
        fixed_choices=frozenset({"policy"}),
        closers=(members.close,),
    )
    pages = EnsembleKVManager([model.pages for model in decoder.models], members.chains.fed, members.chains.drop)
    return replace(verification, pages=pages), drafting


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


def build_proposer_policy(options: CollaborationConfig, count: int, blend: Blend) -> GoodputProposerPolicy:
    """Build the policy with its initial schedule and its degrees of freedom.

    Raises:
        InvalidInput: the lengths or the proposer do not match ``count`` models.
    """
    options = with_defaults(options, blend)
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
    return GoodputProposerPolicy(proposer_schedule, blend.members, free, relaxed=not blend.exact)


def with_defaults(options: CollaborationConfig, blend: Blend) -> CollaborationConfig:
    """Return the options with a proposal. A relaxed target verifies the drafts of its drafter (DSD section 2.3)."""
    if options.proposal is not None:
        return options
    if blend.exact:
        return options.model_copy(update={"proposal": "alternate"})
    proposer = 1 if options.proposer is None else options.proposer
    return options.model_copy(update={"proposal": "naive", "proposer": proposer})


def _gammas(given: str | int | list[int], count: int) -> tuple[int, ...] | None:
    """Return one length per model; None where the policy chooses."""
    if isinstance(given, str):
        return None
    gammas = (given,) * count if isinstance(given, int) else tuple(given)
    if len(gammas) != count:
        raise InvalidInput("collaboration.gamma", list(gammas), f"a list, one for each of the {count} models")
    return gammas
