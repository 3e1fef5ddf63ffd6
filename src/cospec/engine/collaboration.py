"""From a configuration of several models to the parts of an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from cospec.config import LONGEST_DRAFT, CollaborationConfig, EngineConfig, SpeculativeConfig
from cospec.engine.acceptance import AcceptanceMethods
from cospec.engine.committer import Committer
from cospec.engine.drafters import handle_of
from cospec.engine.engine import Parts
from cospec.engine.ensemble import Cast, Ensemble, Laws, Panel, check_vocabularies
from cospec.engine.joint import JointPages, JointVerifier
from cospec.engine.policy import build_policy
from cospec.engine.requests import Resolver
from cospec.engine.scheduler import Limits, Scheduler
from cospec.errors import InvalidInput
from cospec.plugins import Drafter, Policy
from cospec.policies.collaboration import Casting, Collaboration, Freedom, rotations
from cospec.protocols import Blend, Crew, Pages, Round
from cospec.registry import ROUNDS
from cospec.rounds.collaborative import Collaborative
from cospec.types import Offer


def connect_ensemble(cast: Cast, drafter: Drafter | None, config: EngineConfig, text: Any) -> Parts:
    """Parts around models that are loaded already; tests enter here.

    Args:
        drafter: one that is no member, which then proposes in the members' stead.
        text: an ``engine.build.Text``.

    Raises:
        InvalidInput: models, law and options do not fit each other.
    """
    check_vocabularies(cast)
    laws = Laws(law_of(config), len(cast.models))
    speculative = config.speculative_config or SpeculativeConfig()
    rules = AcceptanceMethods()
    own = laws.build()
    panel = Panel(cast, laws, rules)
    found = _proposing(panel, own, config.collaboration) if drafter is None else _drafted(panel, drafter, speculative)
    longest = min(*(model.max_len for model in cast.models), found.pages.capacity)
    max_len = min(config.max_model_len or longest, longest)
    limits = Limits(config.max_num_seqs, config.max_num_batched_tokens, max_len, rules.chains_only)
    backend = getattr(text.tokenizer, "backend_tokenizer", None)
    return Parts(
        model=cast.models[0],
        scheduler=Scheduler(found.pages, found.policy, limits),
        round=found.round,
        committer=Committer(backend, own.name, text.eos, relaxed=rules.relaxed),
        resolver=Resolver(
            cast.models[0].vocab_size,
            max_len,
            text.eos,
            speculative.rule,
            LONGEST_DRAFT,
            found.proposes,
            frozenset(speculative.request_may_choose) - found.withheld,
            noises=drafter.noises if drafter else None,
            drafters=drafter.names if drafter else None,
            laws=(lambda law: laws.build(law).name) if config.collaboration.request_laws else None,
            sampled_rule="recursive" if speculative.branches(drafter.offer if drafter else Offer()) else "block",
        ),
        law=own.name,
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

    round: Round
    pages: Pages
    policy: Policy
    proposes: bool
    withheld: frozenset[str]
    closers: tuple[Callable[[], None], ...]


def _proposing(panel: Panel, own: Blend, options: CollaborationConfig) -> _Found:
    """The members propose to each other."""
    caster = build_caster(options, len(panel.models), own.members)
    members = Ensemble(panel, caster, options.proposal == "parallel")
    pages = JointPages([model.pages for model in panel.models], members.lines.fed, members.lines.drop)
    made = Collaborative(Crew(None, panel.verifier, caster, time.monotonic, members=members))
    return _Found(made, pages, caster, caster.casting.proposes, frozenset({"policy"}), (members.close,))


def _drafted(panel: Panel, drafter: Drafter, speculative: SpeculativeConfig) -> _Found:
    """A drafter proposes to all of them, as to a single target."""
    joint = JointVerifier(panel)
    policy = build_policy(speculative, drafter, time.monotonic)
    handle = handle_of(drafter, speculative.drafting, panel.models[0].device)
    made = ROUNDS.load(speculative.round)(Crew(drafter, joint, policy, time.monotonic, handle))
    return _Found(made, joint.pages, policy, True, frozenset(), () if handle is None else (handle.close,))


def check_speculation(speculative: SpeculativeConfig, options: CollaborationConfig) -> None:
    """Refuse what is said of a drafter where there is none, and of the members' proposals where there is one."""
    if speculative.method == "off":
        for key in speculative.model_fields_set - {"method", "rule", "request_may_choose", "options"}:
            allowed = "absent without a method; how several models propose to each other is said in collaboration"
            raise InvalidInput(f"speculative_config.{key}", getattr(speculative, key), allowed)
        return
    if speculative.policy == "off":
        allowed = "another policy; with collaboration.proposal 'standard' nobody proposes"
        raise InvalidInput("speculative_config.policy", "off", allowed)
    for key in options.model_fields_set - {"request_laws"}:
        allowed = "absent where a drafter that is no member proposes, by speculative_config.method"
        raise InvalidInput(f"collaboration.{key}", getattr(options, key), allowed)


def law_of(config: EngineConfig) -> Mapping[str, Any]:
    """How several models become one."""
    return {"blend": "weighted"} if config.law is None else config.law


def build_caster(options: CollaborationConfig, count: int, members: Seq[int]) -> Collaboration:
    """Who proposes how much to begin with, and whether that may change.

    Raises:
        InvalidInput: lengths or a proposer that these models do not have.
    """
    if options.proposer is not None and options.proposer >= count:
        raise InvalidInput("collaboration.proposer", options.proposer, f"a model's place, from 0 to {count - 1}")
    gammas = _gammas(options.gamma, count)
    quiet = options.proposal in ("standard", "parallel")
    casting = Casting(
        gammas=(0,) * count if quiet else gammas or (1,) * count,
        order=rotations(count)[options.proposer or 0],
        alternate=options.proposal == "alternate",
    )
    free = Freedom(lengths=not quiet and gammas is None, proposer=options.proposer is None)
    return Collaboration(casting, members, free)


def _gammas(given: str | int | list[int], count: int) -> tuple[int, ...] | None:
    """One length for each of ``count`` models; None where they are chosen."""
    if isinstance(given, str):
        return None
    gammas = (given,) * count if isinstance(given, int) else tuple(given)
    if len(gammas) != count:
        raise InvalidInput("collaboration.gamma", list(gammas), f"a list of one for each of the {count} models")
    return gammas
