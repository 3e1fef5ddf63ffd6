"""From the command line of a drafter node to its drafters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cospec.assembly.build import default_drafter, load_options
from cospec.assembly.drafters import EngineHost, TargetFacts, set_threads
from cospec.cluster.nodes.worker import OfferedDrafter
from cospec.config import EngineConfig
from cospec.errors import InvalidInput, words
from cospec.models.loading import LoadOptions, cache_budget, resolve
from cospec.models.lora import base_folder
from cospec.models.model_folder import read_object
from cospec.native import library
from cospec.plugin_options import ModelOptions, parse
from cospec.registry import DRAFTERS, import_plugins


def build_offers(config: EngineConfig, drafters: Sequence[Mapping[str, Any]]) -> list[OfferedDrafter]:
    """Load the drafters of a node.

    Args:
        config: ``model`` is the target, of which the node reads the tokenizer and no weights.
        drafters: each with a ``method``, options of the method, and a ``name``, by default the method's.

    Raises:
        CospecError: a drafter cannot be loaded, or cannot run on a node, in one sentence.
    """
    import_plugins(config.plugins)
    set_threads(config.threads)
    library.use_instruction_set(config.instruction_set)
    path, options, usual = resolve(config.model), load_options(config), default_drafter(config.model)
    given = [_read(each) for each in drafters]
    names = [name for name, _, _ in given]
    if len(set(names)) < len(names):
        raise InvalidInput("drafter", names, "drafters with different names")
    models = [
        (
            str(resolve(own.get("model") or default_drafter(config.model) or config.model)),
            options.of_model(_weights(own)),
        )
        for _, method, own in given
        if DRAFTERS.load(method).has_kv_cache
    ]
    options = replace(options, budget=cache_budget(models)) if models else options
    target = TargetFacts(vocab_size_of(path), _device(options))
    host = EngineHost(target, path, usual, None, options, config.native == "auto")
    return [
        OfferedDrafter(name, method, host.build_drafter(method, own), target.vocab_size) for name, method, own in given
    ]


def vocab_size_of(target: Path) -> int:
    """The number of tokens of a target, from its files.

    Raises:
        ModelError: the folder has no readable configuration.
    """
    config = read_object(base_folder(target) / "config.json")
    found = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    if not isinstance(found, int):
        raise InvalidInput("model", words(f"{target}, whose config.json has no vocab_size"), "the folder of a target")
    return found


def _read(drafter: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """Name, method and own options of one drafter."""
    method = drafter.get("method", "draft_model")
    suitable = [name for name in DRAFTERS.names if not _needs_engine(name)]
    if not DRAFTERS.knows(method) or _needs_engine(method):
        raise InvalidInput("drafter: method", method, f"one of {', '.join(suitable)}")
    name = drafter.get("name", method)
    if not isinstance(name, str) or not name.strip():
        raise InvalidInput("drafter: name", name, "the name of a drafter of the verifier")
    return name, method, {key: value for key, value in drafter.items() if key not in ("name", "method")}


def _needs_engine(method: str) -> bool:
    """Whether a method has drafters of its own, or reads hidden states of the target."""
    cls = DRAFTERS.load(method)
    return cls.is_pool or cls.reads_hidden_states


def _weights(own: Mapping[str, Any]) -> ModelOptions:
    return parse(ModelOptions, {key: own[key] for key in ModelOptions.model_fields if key in own}, "drafter: ")


def _device(options: LoadOptions) -> torch.device:
    cuda = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if cuda else "cpu")
