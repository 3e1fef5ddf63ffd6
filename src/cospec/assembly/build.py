"""From a configuration to the parts of an engine."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cospec.assembly.components import AcceptanceMethods, TextInfo, Verification, connect
from cospec.assembly.drafters import (
    EngineHost,
    build_drafter,
    check_drafters,
    closed_on_error,
    hub_of,
    methods,
    same_tokens,
    share_cores,
)
from cospec.assembly.drafting import check_policy, drafting_by
from cospec.assembly.ensembles import assemble_ensemble, blend_options_of, check_speculation
from cospec.assembly.sharding import load_target, refuse_shards
from cospec.config import EngineConfig, EnsembleMember, SpeculativeConfig
from cospec.core.engine import Engine, EngineComponents
from cospec.core.interfaces import Model
from cospec.core.plugin_base import Drafter
from cospec.core.types import TARGET
from cospec.core.verifier import TargetVerifier
from cospec.distributed.pipeline_parallel_verifier import PipelineParallelVerifier
from cospec.distributed.stage_processes import Launch, launch_here
from cospec.drafters.pool.options import check_cores
from cospec.ensemble.blends.registry import build_blend
from cospec.ensemble.blends.weighted import Single
from cospec.ensemble.ensemble import LoadedModels, distinct
from cospec.errors import InvalidInput, ModelError, words
from cospec.metrics.start_report import drafting, summarize
from cospec.models.cache_prefault import CachePrefault
from cospec.models.hf_loading import eos_ids
from cospec.models.kv_cache import CACHES
from cospec.models.loading import (
    LoadOptions,
    cache_budget,
    load_model,
    load_tokenizer,
    memory_plan,
    resolve,
)
from cospec.models.lora import base_folder
from cospec.models.memory import MemoryPlan
from cospec.models.model_folder import in_zoo
from cospec.models.weight_cache import WeightCache
from cospec.native import library
from cospec.native.multi_step import LONGEST, NATIVE_OFF, NativeMultiStep, why_not
from cospec.plugin_options import ENGINE_THREAD, ModelOptions, parse
from cospec.policies.latency.step import LatencyModels
from cospec.profiling.start import costs_at_start
from cospec.registry import ACCEPTANCE_METHODS, DRAFTERS, EXECUTORS, POLICIES, import_plugins

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


def build_engine(config: EngineConfig, launch: Launch = launch_here) -> Engine:
    """Load the models that ``config`` names, and build an engine around these models.

    Args:
        launch: starts the process of a shard of the target, where ``config`` names no stage hosts.

    Raises:
        CospecError: a model, option or combination that cannot be served, in one sentence.
    """
    return Engine(build_components(config, launch), config)


def build_components(config: EngineConfig, launch: Launch = launch_here) -> EngineComponents:
    """Load and connect everything that ``config`` names, and log what it is. Raises ``CospecError`` in one sentence."""
    parts, drafts = _build(config, launch)
    paths = parts.model_paths or (() if parts.model_path is None else (parts.model_path,))
    tokens = (parts.scheduler.pages.capacity, parts.input_processor.max_len)
    for line in summarize(config, paths, drafts, tokens).lines():
        log.info("%s", line)
    scheduler = weakref.ref(parts.scheduler)  # the thread of an engine that is dropped ends its work

    def busy() -> bool:
        found = scheduler()
        return found is not None and bool(found.waiting or found.running)

    population = CachePrefault(CACHES, busy)  # after the measurements of the start, which the thread would disturb
    return replace(parts, closers=(population.stop, *parts.closers))


def _build(config: EngineConfig, launch: Launch) -> tuple[EngineComponents, str]:
    """The components, and a description of what drafts."""
    import_plugins(config.plugins)
    share_cores(config)
    library.use_instruction_set(config.instruction_set)
    if config.models is not None or config.ensemble is not None:
        return _ensemble_parts(config)
    options, speculative = load_options(config), resolve_speculation(config)
    _check(speculative)
    path = resolve(config.model)
    models = [(str(path), options), *_drafting(speculative, config.model, options)]
    options = replace(options, budget=cache_budget(models), keep_hidden_states=_reads_hidden_states(speculative))
    target, end_target = load_target(config, models, options, launch)
    options = replace(options, keep_hidden_states=False)
    tokenizer = load_tokenizer(resolve(config.tokenizer) if config.tokenizer else path)
    host = EngineHost(
        target, path, default_drafter(config.model), DEFAULT_HEADS.get(config.model), options, config.native == "auto"
    )
    host = replace(host, nodes=hub_of(speculative, target))
    drafter = build_drafter(speculative, host, config)
    with closed_on_error(drafter):
        costs = _costs(target, drafter, path, speculative, config)
        text = TextInfo(tokenizer, path, eos_ids(base_folder(path), tokenizer))
        components = assemble(target, drafter, speculative, config, text, costs)
    components = replace(components, closers=(*components.closers, end_target))
    return _with_nodes(components, host), drafting(speculative, host.default_drafter)


def memory_plan_of(config: EngineConfig) -> tuple[MemoryPlan, str]:
    """The memory plan of one model with its drafter, and a description of what drafts; no weights are loaded.

    Raises:
        CospecError: the model cannot be served here, in one sentence.
    """
    options, speculative = load_options(config), resolve_speculation(config)
    _check(speculative)
    models = [(str(resolve(config.model)), options), *_drafting(speculative, config.model, options)]
    return memory_plan(models), drafting(speculative, default_drafter(config.model))


def _costs(
    target: Model, drafter: Drafter | None, path: Path, speculative: SpeculativeConfig, config: EngineConfig
) -> LatencyModels:
    """Time models for a policy that needs them; without measurements the policy learns from its steps."""
    policy = POLICIES.load(speculative.policy_name)
    if drafter is None or not config.measure_at_start or not policy.needs_latency:
        return LatencyModels()
    if _elsewhere(speculative.drafter_executor) or any(
        _elsewhere(own.get("executor")) for where, _, own in methods(speculative) if where
    ):
        return LatencyModels()  # other machines join later
    names = (
        "device", "dtype", "quantization", "kv_cache_dtype", "linear_backend", "attention_backend", "instruction_set",
        "native",
    )  # fmt: skip
    how = {name: getattr(config, name) for name in names}
    drafts = f"{speculative.method} {sorted(speculative.options.items())}"
    multi_step = None
    if config.native != "off" and target.native_forward is not None:
        verifier = TargetVerifier(target, Single(), {"match": ACCEPTANCE_METHODS.load("match")()})
        multi_step = NativeMultiStep.of(target.native_forward, verifier, drafter, policy.keeps_drafts)
    whole = multi_step if multi_step is not None and multi_step.drafts and not drafter.is_pool else None
    return costs_at_start(target, drafter, base_folder(path), how, drafts, whole)


def _ensemble_parts(config: EngineConfig) -> tuple[EngineComponents, str]:
    """Load and connect the members of an ensemble; for a single model they are the model and its own drafter."""
    own = default_drafter(config.model)
    models = config.models or [EnsembleMember(model=name) for name in (config.model, own) if name]
    given = [member.model for member in models]
    if len(given) < 2:
        raise InvalidInput("models", words(", ".join(given)), "two models or more")
    build_blend(blend_options_of(config), len(given))
    refuse_shards(config)
    speculative = _as_drafter(config.speculative_config or SpeculativeConfig())
    _check(speculative)
    check_speculation(speculative, config.collaboration)
    if _reads_hidden_states(speculative):
        raise InvalidInput("speculative_config.method", speculative.method, "a drafter without the target's states")
    paths, options = [resolve(name) for name in given], replace(load_options(config), max_model_len=None)
    for name, path in zip(given, paths, strict=True):
        if not same_tokens(path, paths[0]):
            raise InvalidInput("models", words(f"{name}, whose tokens differ"), f"models with the tokens of {given[0]}")
    members = _members(models, paths, options)
    options = replace(options, budget=cache_budget([*members, *_drafting(speculative, given[0], options)]))
    loaded = tuple(load_model(path, replace(each, budget=options.budget)) for path, each in members)
    cast = LoadedModels(loaded, distinct(given))
    tokenizer = load_tokenizer(resolve(config.tokenizer) if config.tokenizer else paths[0])
    host = EngineHost(cast.models[0], paths[0], default_drafter(given[0]), None, options, config.native == "auto")
    text = TextInfo(tokenizer, paths[0], eos_ids(base_folder(paths[0]), tokenizer))
    host = replace(host, nodes=hub_of(speculative, cast.models[0]))
    drafter = build_drafter(speculative, host, config)
    chosen = config.model_copy(update={"speculative_config": speculative})
    proposal = config.collaboration.proposal
    by_members = "the models draft for each other" + (f" ({proposal})" if proposal else "")
    drafts = by_members if drafter is None else drafting(speculative, host.default_drafter)
    with closed_on_error(drafter):
        components = assemble_ensemble(cast, drafter, chosen, text)
    return _with_nodes(replace(components, model_paths=tuple(paths)), host), drafts


def _with_nodes(components: EngineComponents, host: EngineHost) -> EngineComponents:
    """The components of an engine whose metrics have the status of drafter nodes."""
    hub = host.nodes
    return components if hub is None else replace(components, nodes=hub.status, node_totals=hub.totals)


def _members(
    models: Sequence[EnsembleMember], paths: Sequence[Path], options: LoadOptions
) -> list[tuple[str, LoadOptions]]:
    """Return path and options of each model of an ensemble.

    Raises:
        InvalidInput: a model has weights of an unknown dtype or quantization.
    """
    found = []
    for number, (member, path) in enumerate(zip(models, paths, strict=True)):
        found.append((str(path), options.of_model(member)))
        try:
            cache_budget(found[-1:])  # one model at a time, so that an error belongs to one
        except InvalidInput as error:
            raise error.within(f"models[{number}]") if error.field in member.model_fields_set else error from None
    return found


def assemble(
    target: Model,
    drafter: Drafter | None,
    speculative: SpeculativeConfig,
    config: EngineConfig,
    text: TextInfo,
    costs: LatencyModels = LatencyModels(),
) -> EngineComponents:
    """Connect one target and its drafter, both loaded; tests enter here."""
    clock, native = time.monotonic, config.native == "auto"
    acceptance_methods = AcceptanceMethods()
    verifier = TargetVerifier(target, Single(), acceptance_methods, native)
    pipelined = None if target.pipelined_model is None else PipelineParallelVerifier(target.pipelined_model, verifier)
    verification = Verification(
        target, pipelined or verifier, target.pages, target.max_len, TARGET, acceptance_methods, text
    )
    limits, reason = verification.limits(config), why_not(target) if native else NATIVE_OFF
    multi_step = None
    if reason is None and target.native_forward is not None:
        keeps_drafts = POLICIES.load("off" if drafter is None else speculative.policy_name).keeps_drafts
        multi_step = NativeMultiStep.of(target.native_forward, verifier, drafter, keeps_drafts)
        limits = replace(limits, max_steps=LONGEST, multi_step_drafts=multi_step.drafts)
    parts = drafting_by(drafter, speculative, target, clock, costs)
    parts = replace(parts, multi_step=multi_step, why_no_multi_step=reason or "")
    return connect(verification, parts, speculative, limits, clock)


def load_options(config: EngineConfig) -> LoadOptions:
    """The options of the configuration for weights, caches and kernels."""
    return LoadOptions(
        device=config.device,
        dtype=config.dtype,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        linear_backend=config.linear_backend,
        attention_backend=config.attention_backend,
        max_model_len=config.max_model_len,
        cache_bytes=config.kv_cache_memory_bytes,
        prefix_caching=config.enable_prefix_caching,
        max_num_seqs=config.max_num_seqs,
        gpu_memory_utilization=config.gpu_memory_utilization,
        instruction_set=config.instruction_set,
        weight_cache=WeightCache.of(config.weight_cache_bytes),
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
    """A model without a method is a draft model."""
    meant = "model" in given.options and "method" not in given.model_fields_set
    return given.model_copy(update={"method": "draft_model"}) if meant else given


def _check(speculative: SpeculativeConfig) -> None:
    """Refuse unknown names and options before any weight is read."""
    speculative.check_names()
    check_policy(speculative)
    check_cores("speculative_config.drafter_cores", speculative.drafter_cores, speculative.drafter_executor)
    if speculative.method == "off" and speculative.options:
        key = next(iter(speculative.options))
        raise InvalidInput(f"key speculative_config.{key}", speculative.options[key], "left out when method is 'off'")
    check_drafters(speculative)


def _reads_hidden_states(speculative: SpeculativeConfig) -> bool:
    """Whether a drafter, or a member of a pool of them, reads the target's hidden states."""
    return any(DRAFTERS.load(method).reads_hidden_states for _, method, _ in methods(speculative))


def _drafting(speculative: SpeculativeConfig, target: str, options: LoadOptions) -> list[tuple[str, LoadOptions]]:
    """Return name and options of the models that will draft, each with a KV cache of its own.

    Raises:
        ModelError: a model is missing or cannot be read; the sentence names the drafter of a pool.
        InvalidInput: a drafter has weights of an unknown dtype or quantization.
    """
    found = []
    for where, method, own in methods(speculative):
        name = own.get("model") or default_drafter(target)
        executor = own.get("executor", ENGINE_THREAD.executor) if where else speculative.drafter_executor
        if _elsewhere(executor):
            continue
        _check_defaults(where, method, own, target)
        if DRAFTERS.load(method).has_kv_cache and isinstance(name, str):
            weights = _model_options(where, method, own)
            try:
                found.append((str(resolve(name)), options.of_model(weights)))
                cache_budget(found[-1:])  # one model at a time, so that an error belongs to one
            except ModelError as error:
                raise ModelError(f"{where}: {error}" if where else str(error)) from None
            except InvalidInput as error:
                own_error = error.field in weights.model_fields_set
                raise error.within(where or "speculative_config") if own_error else error from None
    return found


def _check_defaults(where: str, method: str, own: Mapping[str, Any], target: str) -> None:
    """Raise ``InvalidInput`` about a model or heads that are not given, and that the target does not come with."""
    cls = DRAFTERS.load(method)
    defaults = {
        "model": (cls.has_kv_cache, default_drafter(target), "the folder or name of a drafter for this target"),
        "heads": (cls.reads_hidden_states, DEFAULT_HEADS.get(target), "the folder of heads for this target"),
    }
    for key, (needed, default, allowed) in defaults.items():
        if needed and key in cls.Options.model_fields and own.get(key) is None and default is None:
            error = InvalidInput(f"speculative_config.{key}", words("missing"), allowed)
            raise error.within(where) if where else error


def _elsewhere(executor: object) -> bool:
    """Whether an executor's drafters run on other machines."""
    return EXECUTORS.knows(executor) and not EXECUTORS.load(str(executor)).same_machine


def _model_options(where: str, method: str, own: Mapping[str, Any]) -> ModelOptions:
    """Return the options of the model among a drafter's own options; a method without such options has none."""
    known = ModelOptions.model_fields.keys() & DRAFTERS.load(method).Options.model_fields.keys()
    try:
        return parse(ModelOptions, {key: own[key] for key in known & own.keys()}, "speculative_config.")
    except InvalidInput as error:
        raise error.within(where) if where else error from None
