"""The engine's configuration: frozen, read once from arguments or one JSON/YAML file, in vLLM's names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from cospec.core.types import DrafterCapabilities
from cospec.errors import InvalidInput, words
from cospec.options import Options, parse

LONGEST_DRAFT = 64
DTYPES = {"half": "float16", "float": "float32"}  # other names of a dtype


class SpeculativeConfig(Options):
    """How drafts are made and judged. Keys that are not named here belong to the method and are checked by it.

    Attributes:
        method: a name from the drafter table, or ``off``.
        num_speculative_tokens: tokens drafted per round, or the most of them for a policy that chooses; ``auto`` lets
            it choose freely.
        rule: ``auto`` judges greedy and seeded requests by ``match`` and the others by ``block``.
        policy: who is drafted for, and how far; ``auto`` is ``fixed`` for a number of tokens and ``goodput`` otherwise.
        policy_options: what the policy itself takes.
        max_nodes: tokens drafted per round, side branches included, where drafts are trees; None drafts chains.
        widths: children of each node, level by level; left out, the likeliest paths decide.
        round: the order of drafting and verification; ``auto`` chooses it by measured times.
        drafting: where the drafter works when it works beside the target: in the target's own thread (``here``),
            another thread, or a process of its own.
        drafter_cores: processors that the drafter's process has for itself; the target keeps to the others. Each uses
            as many threads as it has processors. Empty lets both use all of them.
        request_may_choose: what a request may choose for itself.
        options: what the method itself takes, such as ``model`` or ``prompt_lookup_max``.
    """

    method: str = "off"
    num_speculative_tokens: int | Literal["auto"] = "auto"
    acceptance_method: str = "auto"
    policy: str = "auto"
    policy_options: Mapping[str, Any] = Field(default_factory=dict)
    max_nodes: int | None = Field(default=None, ge=1, le=64)
    widths: tuple[Annotated[int, Field(ge=1, le=64)], ...] = Field(default=(), max_length=64, strict=False)
    execution_mode: str = "auto"
    drafter_executor: Literal["inline", "thread", "process"] = "thread"
    drafter_cores: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(), strict=False)
    request_may_choose: tuple[Literal["off", "length", "policy", "drafters", "acceptance_method"], ...] = Field(
        default=("off", "length", "policy", "drafters", "acceptance_method"), strict=False
    )
    options: Mapping[str, Any] = Field(default_factory=dict)

    @field_validator("num_speculative_tokens", mode="plain")
    @classmethod
    def _check_length(cls, value: object) -> int | str:
        if value == "auto" or (type(value) is int and 0 <= value <= LONGEST_DRAFT):
            return value
        raise PydanticCustomError("length", "a whole number from 0 to {most}, or 'auto'", {"most": LONGEST_DRAFT})

    def branches(self, capabilities: DrafterCapabilities) -> bool:
        """Whether drafts may be trees: asked for, or left to the policy, of a drafter that can make them."""
        if capabilities.chains:
            return False
        if self.num_speculative_tokens == "auto":
            return capabilities.trees or bool(self.widths)
        return bool(self.widths) or (self.max_nodes or 0) > self.num_speculative_tokens

    @property
    def policy_name(self) -> str:
        """The policy that decides."""
        if self.policy != "auto":
            return self.policy
        return "goodput" if self.num_speculative_tokens == "auto" and not self.widths else "fixed"


class CollaborationConfig(Options):
    """How several models speak as one.

    Attributes:
        proposal: ``alternate``: every model proposes in turn; ``naive``: one does; ``standard``: none does, every model
            is asked for every token; ``parallel``: the same, at once in threads.
        gamma: tokens of a proposal, one number for all or one for each model; ``auto`` chooses by measured cost and
            acceptance.
        proposer: the model that proposes by default, by its place in ``models``; None is the first, or a free choice
            where gamma is.
        request_laws: whether a request may ask for a law of its own.
    """

    proposal: Literal["alternate", "naive", "standard", "parallel"] = "alternate"
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


class EngineConfig(Options):
    """Everything that the engine is built from.

    Attributes:
        models: several models that speak as one, named as in ``model``, which is then the first of them.
        law: how their distributions become one, such as ``{"method": "weighted", "weights": [0.6, 0.4]}``.
        collaboration: who proposes how much among them.
        model: ``zoo``, ``zoo:NAME``, a folder, or a hub name.
        dtype: of the weights in memory; ``auto`` keeps the file's; ``half`` and ``float`` are ``float16`` and
            ``float32``. On a CPU a product's inputs are rounded to bfloat16 with bfloat16 weights; float16 weights are
            computed as float32, four bytes each. Sums are float32 whatever it is.
        quantization: ``int8`` holds linear weights as 8-bit integers (a different model: its own law).
        max_model_len: tokens of one sequence, prompt and output; None is the model's own limit.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens computed in one round, drafts included.
        kv_cache_memory_bytes: of the KV caches of all models together, divided so that each holds equally many tokens;
            None takes a share of what is free.
        gpu_memory_utilization: share of a GPU's memory for weights and cache.
        enable_prefix_caching: reuse the cache of shared prompts.
        linear_backend, attention_backend: ``auto`` is ``native`` where it was built, then the fall-back.
        native: ``off`` runs steps, acceptance methods, rollouts and the drafter pool in Python. Kernels over rows of
            numbers stay: products and attention follow ``linear_backend`` and ``attention_backend``.
        measure_at_start: take three seconds for a time model where the policy needs one and none is kept.
        threads: of the CPU kernels; None is every core.
        instruction_set: of the CPU kernels, for the whole process; ``auto`` is the best that the processor has.
        plugins: Python modules that the engine's process imports first, such as one that registers blends.
    """

    model: str = "zoo"
    models: list[str] | None = None
    ensemble: Mapping[str, Any] | None = None
    collaboration: CollaborationConfig = CollaborationConfig()
    tokenizer: str | None = None
    served_model_name: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["int8"] | None = None
    max_model_len: int | None = Field(default=None, ge=2)
    max_num_seqs: int = Field(default=64, ge=1, le=4096)
    max_num_batched_tokens: int = Field(default=2048, ge=1)
    kv_cache_memory_bytes: int | None = Field(default=None, ge=1)
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1, strict=False)
    enable_prefix_caching: bool = True
    linear_backend: Literal["auto", "native", "mkldnn", "torch"] = "auto"
    attention_backend: Literal["auto", "native", "sdpa"] = "auto"
    threads: int | None = Field(default=None, ge=1, le=64)
    instruction_set: Literal["auto", "base", "avx2", "avx512", "avx512_bf16"] = "auto"
    native: Literal["auto", "off"] = "auto"
    measure_at_start: bool = True
    plugins: tuple[str, ...] = Field(default=(), strict=False)
    speculative_config: SpeculativeConfig | None = None

    @field_validator("dtype", mode="before")
    @classmethod
    def _name_dtype(cls, value: object) -> object:
        """Read vLLM's names and torch's dtypes."""
        name = str(value).removeprefix("torch.")
        return DTYPES.get(name, name if str(value) != name else value)

    @classmethod
    def build(cls, given: Mapping[str, Any]) -> EngineConfig:
        """From plain keys; ``speculative_config`` may be a mapping, JSON text, or None.

        Raises:
            InvalidInput: an unknown key or a value outside its bounds, by name.
        """
        values = dict(given)
        speculative = values.pop("speculative_config", None)
        if isinstance(speculative, str):
            speculative = read_json(speculative, "speculative_config")
        if speculative is not None and not isinstance(speculative, SpeculativeConfig):
            speculative = speculative_config(speculative)
        return parse(cls, {**_ensemble(values), "speculative_config": speculative})


def _ensemble(values: dict[str, Any]) -> dict[str, Any]:
    """Read what concerns several models; the first of them stands for all where one is meant."""
    for key in ("ensemble", "collaboration"):
        if isinstance(values.get(key), str):
            values[key] = read_json(values[key], key)
    if isinstance(values.get("collaboration"), Mapping):
        values["collaboration"] = parse(CollaborationConfig, values["collaboration"], "collaboration.")
    if values.get("collaboration", "") is None:
        del values["collaboration"]
    models = values.get("models")
    if "collaboration" in values and models is None and values.get("ensemble") is None:
        raise InvalidInput("collaboration", words("given for one model"), "absent without models or law")
    if models is None:
        return values
    if not isinstance(models, list | tuple) or not models or not all(isinstance(name, str | Path) for name in models):
        raise InvalidInput("models", models, "a list of model names")
    names = [str(name) for name in models]
    served = values.get("served_model_name") or "+".join(names)
    return {**values, "models": names, "model": names[0], "served_model_name": served}


def speculative_config(given: Mapping[str, Any]) -> SpeculativeConfig:
    """Split the common keys from the method's own, which its drafter checks when it is built."""
    if not isinstance(given, Mapping):
        raise InvalidInput("speculative_config", given, "an object of options")
    common = {key: value for key, value in given.items() if key in SpeculativeConfig.model_fields and key != "options"}
    own = {key: value for key, value in given.items() if key not in SpeculativeConfig.model_fields}
    return parse(SpeculativeConfig, {**common, "options": own}, "speculative_config.")


def read_json(text: str, field: str) -> dict[str, Any]:
    """A JSON object given on a command line.

    Raises:
        InvalidInput: not JSON, or not an object.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidInput(field, text, f"JSON ({error.msg} at character {error.pos + 1})") from None
    if not isinstance(value, dict):
        raise InvalidInput(field, text, "a JSON object")
    return value


def read_file(path: Path) -> dict[str, Any]:
    """A JSON or YAML configuration file.

    Raises:
        InvalidInput: the file cannot be read, or does not hold an object.
    """
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput("config", str(path), f"a readable file ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise InvalidInput("config", words(f"{path}, which is not JSON or YAML"), "a JSON or YAML file") from None
    if not isinstance(value, dict):
        raise InvalidInput("config", str(path), "a file that holds one object")
    return value
