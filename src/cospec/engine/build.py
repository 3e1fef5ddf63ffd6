"""From a configuration to the parts of an engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cospec import native
from cospec.blends.build import build_blend
from cospec.blends.single import Single
from cospec.config import LONGEST_DRAFT, EngineConfig, SpeculativeConfig
from cospec.drafters.pool.options import called
from cospec.engine.acceptance import AcceptanceMethods
from cospec.engine.burst import LONGEST, Burst
from cospec.engine.collaboration import check_speculation, connect_ensemble, law_of
from cospec.engine.committer import Committer
from cospec.engine.drafters import EngineHost, build_drafter, handle_of, same_tokens, share_cores
from cospec.engine.engine import Parts
from cospec.engine.ensemble import Cast, distinct
from cospec.engine.policy import build_policy, check_policy
from cospec.engine.requests import Resolver
from cospec.engine.scheduler import Limits, Scheduler
from cospec.engine.summary import drafting, summarize
from cospec.engine.verifier import Verifier
from cospec.errors import InvalidInput, ModelError, words
from cospec.models.adapters import base_folder
from cospec.models.budget import MemoryPlan
from cospec.models.folder import in_zoo, read_object
from cospec.models.loading import LoadOptions, cache_budget, load_model, load_tokenizer, memory_plan, resolve
from cospec.plugins import Drafter
from cospec.policies.round_cost import Costs
from cospec.profiling.start import costs_at_start
from cospec.protocols import Crew, Handle, Model
from cospec.registry import DRAFTERS, POLICIES, ROUNDS, RULES, import_plugins
from cospec.types import Offer

log = logging.getLogger(__name__)

DEFAULT_METHOD = "suffix"  # of models without a drafter of their own
DEFAULT_HEADS = {"zoo": "zoo:heads", "zoo:target": "zoo:heads"}


def default_drafter(model: str) -> str | None:
    """The family's generic drafter for each of its targets: the one that is shipped whole and the adapters on it.

    Raises:
        ModelError: the zoo has no such member.
    """
    if not in_zoo(model):
        return None
    return "zoo:drafter" if base_folder(resolve(model)) == resolve("zoo") else None


def build_parts(config: EngineConfig) -> Parts:
    """Load and connect everything that ``config`` names, and log what it is. Raises ``CospecError`` in one sentence."""
    parts, drafts = _build(config)
    paths = parts.model_paths or (() if parts.model_path is None else (parts.model_path,))
    tokens = (parts.scheduler.pages.capacity, parts.resolver.max_len)
    for line in summarize(config, paths, parts.model.device, drafts, tokens).lines():
        log.info("%s", line)
    return parts


def _build(config: EngineConfig) -> tuple[Parts, str]:
    """The parts, and in words who drafts."""
    import_plugins(config.plugins)
    share_cores(config)
    native.use_instruction_set(config.instruction_set)
    if config.models is not None or config.law is not None:
        return _ensemble_parts(config)
    path = resolve(config.model)
    options = load_options(config)
    speculative = resolve_speculation(config)
    _check(speculative)
    options = replace(
        options, budget=cache_budget([str(path), *_drafting(speculative, config.model, options)], options)
    )
    target = load_model(str(path), replace(options, keep_states=_reads_states(speculative)))
    tokenizer = load_tokenizer(resolve(config.tokenizer) if config.tokenizer else path)
    host = EngineHost(target, path, default_drafter(config.model), DEFAULT_HEADS.get(config.model), options)
    drafter = build_drafter(speculative, host, config)
    costs = _costs(target, drafter, path, speculative, config)
    text = Text(tokenizer, path, eos_ids(base_folder(path), tokenizer))
    return connect(target, drafter, speculative, config, text, costs), drafting(speculative, host.default_drafter)


def plan(config: EngineConfig) -> tuple[MemoryPlan, str]:
    """The memory plan of one model with its drafter, and in words who drafts; no weights are loaded.

    Raises:
        CospecError: the model cannot be served here, in one sentence.
    """
    options, speculative = load_options(config), resolve_speculation(config)
    _check(speculative)
    names = [str(resolve(config.model)), *_drafting(speculative, config.model, options)]
    return memory_plan(names, options), drafting(speculative, default_drafter(config.model))


def _costs(
    target: Model, drafter: Drafter | None, path: Path, speculative: SpeculativeConfig, config: EngineConfig
) -> Costs:
    """Time models for a policy that decides by them; where nothing is measured it learns from its rounds."""
    policy = POLICIES.load(speculative.policy_name)
    if drafter is None or not config.measure_at_start or not policy.reads_costs:
        return Costs()
    names = ("device", "dtype", "quantization", "linear_backend", "attention_backend", "instruction_set")
    how = {name: getattr(config, name) for name in names}
    drafts = f"{speculative.method} {sorted(speculative.options.items())}"
    match = RULES.load("match")()
    burst = Burst.of(target, lambda _: match, drafter, policy.keeps_drafts)
    return costs_at_start(target, drafter, base_folder(path), how, drafts, burst if burst and burst.drafts else None)


def _ensemble_parts(config: EngineConfig) -> tuple[Parts, str]:
    """Load and connect several models that speak as one; a law for a single model is over it and its own drafter."""
    own = default_drafter(config.model)
    given = config.models or [config.model, *([own] if own else [])]
    if len(given) < 2:
        raise InvalidInput("models", words(", ".join(given)), "two models or more")
    build_blend(law_of(config), len(given))
    speculative = _as_drafter(config.speculative_config or SpeculativeConfig())
    _check(speculative)
    check_speculation(speculative, config.collaboration)
    if _reads_states(speculative):
        raise InvalidInput("speculative_config.method", speculative.method, "a drafter without the target's states")
    paths, options = [resolve(name) for name in given], replace(load_options(config), max_model_len=None)
    for name, path in zip(given, paths, strict=True):
        if not same_tokens(path, paths[0]):
            raise InvalidInput("models", words(f"{name}, whose tokens differ"), f"models with the tokens of {given[0]}")
    options = replace(
        options, budget=cache_budget([*map(str, paths), *_drafting(speculative, given[0], options)], options)
    )
    cast = Cast(tuple(load_model(str(path), options) for path in paths), distinct(given))
    tokenizer = load_tokenizer(resolve(config.tokenizer) if config.tokenizer else paths[0])
    host = EngineHost(cast.models[0], paths[0], default_drafter(given[0]), None, options)
    text = Text(tokenizer, paths[0], eos_ids(base_folder(paths[0]), tokenizer))
    drafter = build_drafter(speculative, host, config)
    chosen = config.model_copy(update={"speculative_config": speculative})
    members = f"the models draft for each other ({config.collaboration.proposal})"
    drafts = members if drafter is None else drafting(speculative, host.default_drafter)
    return replace(connect_ensemble(cast, drafter, chosen, text), model_paths=tuple(paths)), drafts


@dataclass(frozen=True, slots=True)
class Text:
    """What an engine knows of its model's text: the tokenizer, the folder it came from, the end-of-sequence ids."""

    tokenizer: Any = None
    path: Path | None = None
    eos: frozenset[int] = frozenset()


def connect(
    target: Model,
    drafter: Drafter | None,
    speculative: SpeculativeConfig,
    config: EngineConfig,
    text: Text,
    costs: Costs = Costs(),
) -> Parts:
    """Parts around models that are loaded already; tests and simulations enter here."""
    rules = AcceptanceMethods()
    policy = build_policy(speculative, drafter, time.monotonic, costs)
    max_len = min(config.max_model_len or target.max_len, target.max_len, target.pages.capacity)
    blend = Single()
    verifier = Verifier(target, blend, rules)
    chosen = POLICIES.load("off" if drafter is None else speculative.policy_name)
    burst = Burst.of(target, verifier.rule, drafter, chosen.keeps_drafts)
    limits = Limits(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        max_len,
        rules.chains_only,
        rounds=1 if burst is None else LONGEST,
        drafts_as_one=burst is not None and burst.drafts,
    )
    scheduler = Scheduler(target.pages, policy, limits)
    backend = getattr(text.tokenizer, "backend_tokenizer", None)
    handle = handle_of(drafter, speculative.drafting, target.device)
    order = ROUNDS.load(speculative.round if drafter is not None else "sequential")
    tries_rounds = order.learns and handle is not None and handle.parallel  # by what was accepted
    return Parts(
        model=target,
        scheduler=scheduler,
        round=order(Crew(drafter, verifier, policy, time.monotonic, handle, burst=burst)),
        committer=Committer(backend, blend.name, text.eos, relaxed=rules.relaxed),
        resolver=Resolver(
            target.vocab_size,
            max_len,
            text.eos,
            speculative.rule,
            LONGEST_DRAFT,
            drafter is not None,
            frozenset(speculative.request_may_choose),
            noises=drafter.noises if drafter else None,
            drafters=drafter.names if drafter else None,
            sampled_rule="recursive" if speculative.branches(drafter.offer if drafter else Offer()) else "block",
            learns=drafter is not None and (drafter.learns or chosen.learns or tries_rounds),
        ),
        law=blend.name,
        tokenizer=text.tokenizer,
        model_path=text.path,
        weights=drafter.weights if drafter else dict,
        closers=_closers(handle),
        burst=burst,
    )


def _closers(handle: Handle | None) -> tuple[Callable[[], None], ...]:
    return () if handle is None else (handle.close,)


def load_options(config: EngineConfig) -> LoadOptions:
    """The part of the configuration that says how weights are held and run."""
    return LoadOptions(
        device=config.device,
        dtype=config.dtype,
        quantization=config.quantization,
        linear_backend=config.linear_backend,
        attention_backend=config.attention_backend,
        max_model_len=config.max_model_len,
        cache_bytes=config.kv_cache_memory_bytes,
        prefix_caching=config.enable_prefix_caching,
        max_num_seqs=config.max_num_seqs,
        gpu_memory_utilization=config.gpu_memory_utilization,
        instruction_set=config.instruction_set,
    )


def resolve_speculation(config: EngineConfig) -> SpeculativeConfig:
    """What is configured, with the method that is meant where none is named.

    A zoo target comes with its drafter. Any other model copies from prompt and outputs, which takes no model; the
    policy drafts only as far as a draft pays.
    """
    given = _as_drafter(config.speculative_config or SpeculativeConfig())
    if "method" in given.model_fields_set:
        return given
    return given.model_copy(update={"method": "draft_model" if default_drafter(config.model) else DEFAULT_METHOD})


def _as_drafter(given: SpeculativeConfig) -> SpeculativeConfig:
    """Who names a model and no method means it as a drafter."""
    meant = "model" in given.options and "method" not in given.model_fields_set
    return given.model_copy(update={"method": "draft_model"}) if meant else given


def _check(speculative: SpeculativeConfig) -> None:
    """Refuse unknown names before any weight is read."""
    DRAFTERS.check(speculative.method, "off")
    RULES.check(speculative.rule, "auto")
    ROUNDS.check(speculative.round)
    check_policy(speculative)
    if speculative.drafter_cores and speculative.drafting != "process":
        allowed = "absent unless drafting is 'process'"
        raise InvalidInput("speculative_config.drafter_cores", list(speculative.drafter_cores), allowed)
    if speculative.method == "off" and speculative.options:
        key = next(iter(speculative.options))
        raise InvalidInput(f"key speculative_config.{key}", speculative.options[key], "left out when method is 'off'")


def _methods(speculative: SpeculativeConfig) -> list[tuple[str, str, Mapping[str, Any]]]:
    """How errors call it, method and options of the drafter and of a pool's members; what is no method is left out."""
    if speculative.method == "off" or speculative.policy == "off":
        return []
    fields = DRAFTERS.load(speculative.method).Options.model_fields
    members = speculative.options.get("drafters", fields["drafters"].default if "drafters" in fields else None)
    found: list[tuple[str, str, Mapping[str, Any]]] = [("", speculative.method, speculative.options)]
    for number, member in enumerate(members if isinstance(members, list) else []):
        method = member.get("method") if isinstance(member, dict) else None
        if isinstance(method, str) and DRAFTERS.knows(method):
            found.append((f"{called(number, member.get('name', method))}: ", method, member))
    return found


def _reads_states(speculative: SpeculativeConfig) -> bool:
    """Whether a drafter, or a member of a pool of them, reads the target's hidden states."""
    return any(DRAFTERS.load(method).reads_states for _, method, _ in _methods(speculative))


def _drafting(speculative: SpeculativeConfig, target: str, options: LoadOptions) -> list[str]:
    """The models that will draft, each with a KV cache of its own.

    Raises:
        ModelError: one is not there or cannot be read; the sentence says which drafter of a pool wants it.
    """
    found = []
    for where, method, own in _methods(speculative):
        name = own.get("model") or default_drafter(target)
        if DRAFTERS.load(method).keeps_cache and isinstance(name, str):
            try:
                found.append(str(resolve(name)))
                cache_budget(found[-1:], options)  # first alone, so that it is known whose an error is
            except ModelError as error:
                raise ModelError(f"{where}{error}") from None
    return found


def eos_ids(path: Path, tokenizer: Any) -> frozenset[int]:
    """Every id that ends an output: of generation_config.json, of config.json, of the tokenizer."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        file = path / name
        if file.exists():
            value = read_object(file).get("eos_token_id")
            found.update(value if isinstance(value, list) else [value] if isinstance(value, int) else [])
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return frozenset(found)
