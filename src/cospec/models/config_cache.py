"""Configurations of models as plain values, in the user's cache directory.

transformers completes ``config.json`` by a class of each architecture. The import of such a class imports most of torch
and takes longer than loading packed weights. So a later start reads the values that the first start stored.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cospec.machine import cache_directory

READ = (
    "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "layer_types", "rope_parameters", "base_model_tp_plan",
    "tie_word_embeddings", "intermediate_size", "hidden_act", "hidden_activation", "rms_norm_eps", "attention_bias",
    "mlp_bias", "sliding_window", "use_sliding_window", "no_rope_layers", "attention_multiplier",
    "query_pre_attn_scalar", "embedding_multiplier", "residual_multiplier", "logits_scaling",
    "attn_logit_softcapping", "final_logit_softcapping", "num_experts", "num_experts_per_tok",
    "moe_intermediate_size", "norm_topk_prob", "mlp_only_layers", "decoder_sparse_step",
)  # fmt: skip


class PlainConfig(SimpleNamespace):
    """The values of a configuration, with the names and aliases that transformers gives."""

    def get_text_config(self) -> PlainConfig:
        """Return this configuration; configurations with parts are not stored."""
        return self


@cache
def transformers_version() -> str:
    """Return the version of transformers without an import."""
    return version("transformers")


def stored_config(folder: Path) -> PlainConfig | None:
    """Return the stored configuration of a model's folder; None if none is stored for the present ``config.json``."""
    try:
        values = json.loads(_file(folder).read_text("utf-8"))
        return PlainConfig(**values) if values.get("model_type") else None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None


def store_config(folder: Path, config: Any) -> None:
    """Store transformers' configuration of a model's folder, if the text model has no configuration of its own."""
    if config.get_text_config() is not config:
        return
    with suppress(OSError, TypeError, ValueError):  # no JSON, or no such folder; the next start asks transformers again
        values = json.loads(config.to_json_string(use_diff=False))
        stored = {old: getattr(config, old) for old in config.attribute_map if hasattr(config, old)} | values
        stored["base_model_tp_plan"] = config.base_model_tp_plan  # of the class; no JSON of transformers has the plan
        if all(name in stored for name in READ if hasattr(config, name)):  # others are computed by the class
            _write(_file(folder), json.dumps(stored))


def _write(file: Path, text: str) -> None:
    """Write a file whole, because other processes may read it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, delete=False) as stream:
        partial = Path(stream.name)
        try:
            stream.write(text)
            stream.flush()
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)


def _file(folder: Path) -> Path:
    parts = transformers_version().encode(), Path(__file__).read_bytes(), (folder / "config.json").read_bytes()
    key = hashlib.sha256(b"".join(parts)).hexdigest()
    return cache_directory() / "configs" / f"{key[:32]}.json"
