"""The engine's configuration: frozen, read once from arguments or one JSON or YAML file, in vLLM's names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from cospec.core.drafter_capabilities import DrafterCapabilities
from cospec.errors import InvalidInput, words
from cospec.plugin_options import OFF, Dtype, KVCacheDtype, ModelOptions, Options, parse
from cospec.registry import ACCEPTANCE_METHODS, DRAFTERS, EXECUTION_MODES, EXECUTORS, POLICIES, check_quantization

LONGEST_DRAFT = 64


class SpeculativeConfig(Options):
    """The drafter and the acceptance method. The drafter checks keys that have no field here.

    Attributes:
        method: ``draft_model``, ``ngram``, ``suffix``, ``heads``, ``pool``, ``synthetic``, ``off``, or a plug-in's
            name. Without a method, an engine uses ``draft_model`` if ``model`` is given, or if the target is ``zoo``,
            ``zoo:target`` or an adapter on it. Other targets use ``suffix``, and ensembles ``off``.
        num_speculative_tokens: the length of a chain or the depth of a tree, or the maximum for an adaptive policy,
            0 to 64. Under ``auto`` the limit of a chain is 8; ``goodput`` doubles the limit, up to 32, where whole
            chains are accepted.
        acceptance_method: ``match``, ``rejection``, ``block``, ``recursive`` or ``typical``. ``auto`` takes ``match``
            for greedy and seeded requests, for drafts of ``union``, ``vote`` and ``fuse``, and for tokens that
            nodes without ``trusted`` draw. Otherwise ``auto`` takes ``block`` for chains and ``recursive`` for trees.
        policy: chooses the draft length of each request: ``goodput``, ``slope``, ``confidence``, ``milp``, ``fixed``
            or ``off``. ``auto`` is ``fixed`` where a number of tokens or ``widths`` is given, else
            ``goodput``.
        policy_options: options of the policy.
        max_nodes: tokens of a draft tree per step, side branches included. None leaves trees to drafter and policy.
        widths: children per tree node at each level. None lets the likeliest paths decide.
        execution_mode: the order of drafting and verification: ``sequential``, ``pipelined``, ``draft-ahead`` or
            ``draft-for-outcomes``. ``auto`` chooses by measured times.
        drafter_executor: where the drafter runs: in the target's thread (``inline``), in another ``thread`` if
            drafting overlaps verification, in a ``process``, or on drafter nodes (``node``).
        drafter_cores: processors reserved for the drafter's process; the target uses the others. Each side starts one
            thread per processor. An empty list lets both sides use all processors.
        drafter_nodes: how drafter nodes reach the engine: ``bind``, ``keys``, ``quantile``, ``deadline``, ``trusted``.
        request_may_choose: the choices that a request may make for its own drafts; ``off`` is ``enabled: false``.
        cost_per_hour: the price of the drafter's machine, in the currency of the target; for metrics only.
        options: options of the drafting method, such as ``model`` or ``prompt_lookup_max``. Such an option
            may also stand directly in ``speculative_config``.
    """

    method: Annotated[str, OFF] = "off"
    num_speculative_tokens: int | Literal["auto"] = "auto"
    acceptance_method: str = "auto"
    policy: Annotated[str, OFF] = "auto"
    policy_options: Mapping[str, Any] = Field(default_factory=dict)
    max_nodes: int | None = Field(default=None, ge=1, le=64)
    widths: tuple[Annotated[int, Field(ge=1, le=64)], ...] = Field(default=(), max_length=64, strict=False)
    execution_mode: str = "auto"
    drafter_executor: str = "thread"
    drafter_cores: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(), strict=False)
    drafter_nodes: Mapping[str, Any] = Field(default_factory=dict)
    request_may_choose: tuple[
        Annotated[Literal["off", "length", "policy", "drafters", "acceptance_method"], OFF], ...
    ] = Field(default=("off", "length", "policy", "drafters", "acceptance_method"), strict=False)
    cost_per_hour: float = Field(default=0, ge=0, strict=False)
    options: Mapping[str, Any] = Field(default_factory=dict)

    @field_validator("num_speculative_tokens", mode="plain")
    @classmethod
    def _check_length(cls, value: object) -> int | str:
        if value == "auto" or (type(value) is int and 0 <= value <= LONGEST_DRAFT):
            return value
        raise PydanticCustomError("length", "a whole number from 0 to {most}, or 'auto'", {"most": LONGEST_DRAFT})

    @property
    def reserved_cores(self) -> dict[str, tuple[int, ...]]:
        """The processors of each drafter process by their names in errors, a pool's drafters included."""
        found = {"speculative_config.drafter_cores": self.drafter_cores}
        members = self.options.get("drafters")
        for number, each in enumerate(members if isinstance(members, list) else []):
            cores = each.get("cores") if isinstance(each, Mapping) else None
            if isinstance(cores, list):
                name = f"speculative_config.drafters[{number}] {each.get('name', each.get('method'))!r}: cores"
                found[name] = tuple([core for core in cores if isinstance(core, int) and core >= 0])
        return {name: cores for name, cores in found.items() if cores}

    def check_names(self) -> None:
        """Check the names of plug-ins without an import of any plug-in.

        Raises:
            InvalidInput: a table has no such name.
        """
        DRAFTERS.check(self.method, "off")
        ACCEPTANCE_METHODS.check(self.acceptance_method, "auto")
        EXECUTION_MODES.check(self.execution_mode)
        POLICIES.check(self.policy, "auto")
        EXECUTORS.check(self.drafter_executor)

    def branches(self, capabilities: DrafterCapabilities) -> bool:
        """Whether drafts may be trees.

        True if the configuration asks for trees, or leaves the choice to the policy and the drafter makes trees.
        """
        if capabilities.chains:
            return False
        if self.num_speculative_tokens == "auto":
            return capabilities.trees or bool(self.widths)
        return bool(self.widths) or (self.max_nodes or 0) > self.num_speculative_tokens

    @property
    def drafts(self) -> bool:
        """Whether there is a drafter whose drafts the policy allows."""
        return "off" not in (self.method, self.policy)

    @property
    def policy_name(self) -> str:
        """The name of the policy in use."""
        if self.policy != "auto":
            return self.policy
        return "goodput" if self.num_speculative_tokens == "auto" and not self.widths else "fixed"


class CollaborationConfig(Options):
    """How the models of an ensemble propose tokens.

    Attributes:
        proposal: ``alternate``: every model proposes in turn. ``naive``: one model proposes. ``standard``: no model
            proposes; every model scores every token. ``parallel``: ``standard`` with one thread per model. None is
            ``naive`` with proposer 1 for the ensemble ``adaptive``, whose second model drafts, and else ``alternate``.
        gamma: tokens per proposal: one number, or one number per model. ``auto`` chooses by measured cost and
            acceptance.
        proposer: the index in ``models`` of the default proposer. None is the first model, or a free choice for
            ``gamma`` ``auto``.
        request_ensembles: whether a request may choose another ensemble.
    """

    proposal: Literal["alternate", "naive", "standard", "parallel"] | None = None
    gamma: Literal["auto"] | int | list[int] = "auto"
    proposer: int | None = Field(default=None, ge=0)
    request_ensembles: bool = True

    @field_validator("gamma", mode="plain")
    @classmethod
    def _check_gamma(cls, value: object) -> object:
        every = value if isinstance(value, list) and value else [value]
        if value == "auto" or all(type(each) is int and 1 <= each <= LONGEST_DRAFT for each in every):
            return value
        allowed = "'auto', a whole number from 1 to {most}, or a list of one for each model"
        raise PydanticCustomError("gamma", allowed, {"most": LONGEST_DRAFT})


class LinkConfig(Options):
    """Delays that are added to links between the stages of a target, or to a node, for tests and measurements.

    Attributes:
        delay: seconds in one direction.
        jitter: maximum of a random delay in seconds, added to each message. Messages keep their order.
        loss: the probability that a message is lost and sent again, which costs 0.2 s and two delays.
        bandwidth: bytes per second; None for no limit.
        seed: of jitter and loss.
    """

    delay: float = Field(default=0.0, ge=0, strict=False)
    jitter: float = Field(default=0.0, ge=0, strict=False)
    loss: float = Field(default=0.0, ge=0, lt=1, strict=False)
    bandwidth: float | None = Field(default=None, gt=0, strict=False)
    seed: int = 0


class EnsembleMember(ModelOptions):
    """One of ``models``.

    Attributes:
        model: named as ``EngineConfig.model``.
    """

    model: str


class EngineConfig(Options):
    """Everything that an engine is built from.

    Attributes:
        models: the models of an ensemble, each a name or an object with ``model``, ``dtype``, ``quantization`` and
            ``kv_cache_dtype``; ``model`` is then the name of the first.
        ensemble: how the models' distributions combine, such as ``{"method": "weighted", "weights": [0.6, 0.4]}``;
            several models need it.
        collaboration: which model proposes how many tokens.
        model: ``zoo``, ``zoo:NAME``, a folder, a GGUF file, or a hub name.
        tokenizer: a folder or hub name, where the model's folder has no tokenizer.
        served_model_name: the model's name in responses.
        device: of the weights; ``auto`` is a GPU if one is present.
        dtype: of the weights in memory. ``auto`` keeps the file's; ``half`` is ``float16``, ``float`` is ``float32``.
            On a CPU, bfloat16 weights round a product's inputs to bfloat16, and float16 weights are widened to float32.
            Sums are always float32.
        quantization: a format of linear weights with fewer bits: a different model with another distribution.
            ``q8_0``, ``q6_k``, ``q5_1``, ``q5_k``, ``q5_0``, ``q4_1``, ``q4_k``, ``q4_0``, ``iq4_nl`` and ``mxfp4``
            are the blocks of GGUF, and ``int4`` means ``q4_0``; ``int8`` has one scale per output. None keeps the
            blocks of a GGUF file.
        kv_cache_dtype: of keys and values. ``auto`` is ``dtype``, or bfloat16 for quantized weights on a CPU. Fewer
            bits round each entry once: a different model with another distribution. ``int8`` has one scale per entry
            and head.
        max_model_len: tokens of one sequence, prompt and output together; None is the model's limit. A long-rope model
            then has its original length; with a larger value all sequences have the long factors.
        max_num_seqs: sequences that run together.
        max_num_batched_tokens: tokens computed per step, drafts included.
        kv_cache_memory_bytes: bytes of all models' KV caches; each cache holds the same number of tokens. None takes
            the rest of a GPU's share, or a quarter of a CPU's free memory, at most 1 GiB. On Linux a CPU's cache
            occupies its memory soon after the start.
        weight_cache_bytes: bytes of packed weights that are kept on disk for later starts; 0 keeps none. None takes the
            environment variable ``COSPEC_WEIGHT_CACHE_BYTES``, or 32 GiB.
        gpu_memory_utilization: share of a GPU's memory for weights and KV caches, 0 to 1.
        enable_prefix_caching: reuse the KV cache of shared prompt prefixes.
        linear_backend: ``auto`` is ``native`` if the kernels were built, else the fallback.
        attention_backend: ``auto`` is ``triton`` on a GPU with Triton, ``native`` on a CPU if the kernels were built,
            else ``sdpa``. On a CPU ``triton`` needs the extra ``triton`` and ``TRITON_INTERPRET=1``.
        native: ``off`` runs steps, acceptance methods, drafting and pools in Python. Kernels over rows of numbers stay:
            products and attention follow ``linear_backend`` and ``attention_backend``.
        pipeline_parallel_size: processes that share the target's layers. Each has a KV cache of its layers.
        tensor_parallel_size: processes that share the heads and columns of each layer.
        stage_hosts: the address on which each stage listens; one address serves all stages.
        stage_machines: ``HOST:PORT`` of each ``cospec stage host``, which the stages take in turn. A stage listens on
            the host's address. Empty: stages are processes of the engine's machine.
        stage_token_file: the secret of the stage hosts.
        stage_links: delays that are added to links, for tests and measurements: one entry for all links between
            stages, or one per stage for the link to its next stage. The last stage's link leads to the engine.
        stage_timeout: seconds after which a stage without an answer counts as lost, and all stages start again.
        measure_at_start: measure for three seconds if the policy needs a time model and no stored model exists.
        threads: threads of the CPU kernels; None is one per processor.
        instruction_set: of the CPU kernels, for the whole process. ``auto`` is the best set of the processor.
            ``neon_dot`` and ``neon_i8mm`` are experimental: never measured, never the default.
        cost_per_hour: the price of the target's machine, in any currency; for metrics only.
        plugins: Python modules that the engine's process imports first, for example to register a blend; ``--plugin``.
        speculative_config: an object with the keys below; JSON on the command line.
    """

    model: str = "zoo"
    models: list[EnsembleMember] | None = None
    ensemble: Mapping[str, Any] | None = None
    collaboration: CollaborationConfig = CollaborationConfig()
    tokenizer: str | None = None
    served_model_name: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Dtype = "auto"
    quantization: str | None = None
    kv_cache_dtype: KVCacheDtype = "auto"
    max_model_len: int | None = Field(default=None, ge=2)
    max_num_seqs: int = Field(default=64, ge=1, le=4096)
    max_num_batched_tokens: int = Field(default=2048, ge=1)
    kv_cache_memory_bytes: int | None = Field(default=None, ge=1)
    weight_cache_bytes: int | None = Field(default=None, ge=0)
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1, strict=False)
    enable_prefix_caching: bool = True
    linear_backend: Literal["auto", "native", "mkldnn", "torch"] = "auto"
    attention_backend: str = "auto"
    threads: int | None = Field(default=None, ge=1, le=64)
    instruction_set: Literal[
        "auto", "base", "neon_dot", "neon_i8mm", "avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx_bf16"
    ] = "auto"
    native: Annotated[Literal["auto", "off"], OFF] = "auto"
    pipeline_parallel_size: int = Field(default=1, ge=1, le=256)
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    stage_hosts: tuple[str, ...] = Field(default=("127.0.0.1",), min_length=1, strict=False)
    stage_machines: tuple[str, ...] = Field(default=(), strict=False)
    stage_token_file: Path | None = Field(default=None, strict=False)
    stage_links: tuple[LinkConfig, ...] = Field(default=(), strict=False)
    stage_timeout: float = Field(default=60.0, gt=0, strict=False)
    measure_at_start: bool = True
    cost_per_hour: float = Field(default=0, ge=0, strict=False)
    plugins: tuple[str, ...] = Field(default=(), strict=False)
    speculative_config: SpeculativeConfig | None = None

    @classmethod
    def build(cls, given: Mapping[str, Any]) -> EngineConfig:
        """Build from plain keys; ``speculative_config`` may be a mapping, JSON text or None.

        Raises:
            InvalidInput: a key or a plug-in is unknown, or a value is out of bounds. The error names the field. Names
                that ``plugins`` may register are checked where these modules are imported.
        """
        values = dict(given)
        speculative = values.pop("speculative_config", None)
        if isinstance(speculative, str):
            speculative = read_json(speculative, "speculative_config")
        if speculative is not None and not isinstance(speculative, SpeculativeConfig):
            speculative = speculative_config(speculative)
        config = parse(cls, {**_ensemble(values), "speculative_config": speculative})
        if config.quantization is not None:
            check_quantization(config.quantization)
        if config.speculative_config is not None and not config.plugins:
            config.speculative_config.check_names()
        return config

    @property
    def prices(self) -> dict[str, float]:
        """The declared prices per hour of the target, the drafter and a pool's drafters, by name."""
        speculative = self.speculative_config or SpeculativeConfig()
        members = speculative.options.get("drafters")
        named = {str(each.get("name", each.get("method"))): each for each in members or [] if isinstance(each, Mapping)}
        found = {name: float(each.get("cost_per_hour", 0)) for name, each in named.items()}
        return {"target": self.cost_per_hour, "drafter": speculative.cost_per_hour, **found}


def _ensemble(values: dict[str, Any]) -> dict[str, Any]:
    """Parse the ensemble options; ``model`` becomes the first of ``models``."""
    for key in ("ensemble", "collaboration"):
        if isinstance(values.get(key), str):
            values[key] = read_json(values[key], key)
    if isinstance(values.get("collaboration"), Mapping):
        values["collaboration"] = parse(CollaborationConfig, values["collaboration"], "collaboration.")
    if values.get("collaboration", "") is None:
        del values["collaboration"]
    models = values.get("models")
    if "collaboration" in values and models is None and values.get("ensemble") is None:
        raise InvalidInput("collaboration", words("given for one model"), "absent without models or ensemble")
    if models is None:
        return values
    if not isinstance(models, list | tuple) or not models:
        raise InvalidInput("models", models, "a list of models")
    members = [_member(number, given) for number, given in enumerate(models)]
    if len(models) > 1 and values.get("ensemble") is None:
        allowed = """an object for several models, such as {"method": "weighted"}"""
        raise InvalidInput("ensemble", words("missing"), allowed)
    served = values.get("served_model_name") or "+".join([member.model for member in members])
    return {**values, "models": members, "model": members[0].model, "served_model_name": served}


def _member(number: int, given: object) -> EnsembleMember:
    """Parse one of ``models``: a name, or an object."""
    if isinstance(given, str | Path):
        return EnsembleMember(model=str(given))
    if not isinstance(given, Mapping):
        raise InvalidInput(f"models[{number}]", given, "the name of a model, or an object with model")
    return parse(EnsembleMember, given, f"models[{number}].")


def speculative_config(given: Mapping[str, Any]) -> SpeculativeConfig:
    """Separate the common keys from the keys of the method. The drafter checks the latter when built."""
    if not isinstance(given, Mapping):
        raise InvalidInput("speculative_config", given, "an object of options")
    common = {key: value for key, value in given.items() if key in SpeculativeConfig.model_fields and key != "options"}
    own = {key: value for key, value in given.items() if key not in SpeculativeConfig.model_fields}
    return parse(SpeculativeConfig, {**common, "options": own}, "speculative_config.")


def read_json(text: str, field: str) -> dict[str, Any]:
    """Parse a JSON object of the command line.

    Raises:
        InvalidInput: the text is no JSON, or no object.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidInput(field, text, f"a JSON object ({error.msg} at character {error.pos + 1})") from None
    if not isinstance(value, dict):
        raise InvalidInput(field, text, "a JSON object")
    return value


def read_file(path: Path) -> dict[str, Any]:
    """Read a JSON or YAML configuration file.

    Raises:
        InvalidInput: the file is unreadable, or holds no object.
    """
    try:
        text = path.read_text(encoding="utf-8")
        try:
            value = json.loads(text)  # YAML refuses tabs, and reads 1e7 as a word
        except json.JSONDecodeError:
            value = yaml.safe_load(text)
    except OSError as error:
        raise InvalidInput("config", str(path), f"a readable file ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        place = "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
        raise InvalidInput(
            "config", words(f"{path}, which is not JSON or YAML{place}"), "a JSON or YAML file"
        ) from None
    if not isinstance(value, dict):
        kind = "nothing" if value is None else "a list" if isinstance(value, list) else "one value"
        raise InvalidInput("config", words(f"{path}, which holds {kind}"), "a file that holds one object")
    return value
