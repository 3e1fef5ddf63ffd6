"""From a configuration of several models to the parts of an engine."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from typing import Any

from cospec.config import CollaborationConfig, EngineConfig, SpeculativeConfig
from cospec.engine.committer import Committer
from cospec.engine.engine import Parts
from cospec.engine.ensemble import Cast, Ensemble, Laws, check_vocabularies
from cospec.engine.policy import build_policy
from cospec.engine.requests import Resolver
from cospec.engine.scheduler import Limits, Scheduler
from cospec.errors import InvalidInput, words
from cospec.policies.collaboration import Casting, Collaboration, Freedom, rotations
from cospec.protocols import Crew, Drafter, Policy
from cospec.registry import RULES
from cospec.rounds.collaborative import Collaborative

MAX_DEPTH = 64
DEFAULT_LAW = {"blend": "weighted"}


def connect_ensemble(cast: Cast, drafter: Drafter | None, config: EngineConfig, text: Any) -> Parts:
    """Parts around models that are loaded already; tests enter here.

    Args:
        drafter: one that is no member, which then proposes in the members' stead.
        text: an ``engine.build.Text``.

    Raises:
        InvalidInput: models, law and options do not fit each other.
    """
    check_vocabularies(cast)
    laws = Laws(config.law or DEFAULT_LAW, len(cast.models))
    speculative = config.speculative_config or SpeculativeConfig()
    caster = build_caster(config.collaboration, len(cast.models), laws.default.members)
    threads = config.collaboration.proposal == "parallel" and drafter is None
    rules = {name: RULES.load(name)() for name in RULES}
    relaxed = frozenset(name for name, rule in rules.items() if not rule.exact)
    members = Ensemble(cast, laws, rules, caster, threads)
    policy: Policy = caster if drafter is None else build_policy(speculative, drafter, time.monotonic)
    longest = min(*(model.max_len for model in cast.models), members.pages.capacity)
    max_len = min(config.max_model_len or longest, longest)
    proposes = caster.casting.proposes or drafter is not None
    backend = getattr(text.tokenizer, "backend_tokenizer", None)
    return Parts(
        model=cast.models[0],
        scheduler=Scheduler(members.pages, policy, Limits(config.max_num_seqs, config.max_num_batched_tokens, max_len)),
        round=Collaborative(Crew(drafter, members.verifier, policy, time.monotonic, members=members)),
        committer=Committer(backend, laws.default.name, text.eos, relaxed=relaxed),
        resolver=Resolver(
            cast.models[0].vocab_size,
            max_len,
            text.eos,
            speculative.rule,
            MAX_DEPTH,
            proposes,
            frozenset(speculative.request_may_choose),
            noises=getattr(drafter, "noises", None),
            drafters=getattr(drafter, "names", None),
            laws=(lambda law: laws.of(law).name) if config.collaboration.request_laws else None,
        ),
        law=laws.default.name,
        tokenizer=text.tokenizer,
        model_path=text.path,
        weights=getattr(drafter, "weights", dict),
        closers=(members.close,),
    )


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
    if len(gammas) != count or not all(1 <= gamma <= MAX_DEPTH for gamma in gammas):
        allowed = f"'auto', a number from 1 to {MAX_DEPTH}, or a list of {count} of them"
        raise InvalidInput("collaboration.gamma", words(str(given)), allowed)
    return gammas
