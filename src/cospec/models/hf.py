"""Hugging Face causal language models on packed batches, with unchanged model code.

transformers' own interface replaces the attention function. The name of the function has no mask function, so models
build no mask. One extra keyword argument carries the batch to the layers. A probe at load finds the shapes of the
layers and refuses unsupported models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.core.sampling import likeliest
from cospec.errors import ModelError
from cospec.models.attention.backend import AttentionBackend, AttentionShape, LayerAttend
from cospec.models.input_batch import InputBatch
from cospec.models.kv_cache import KVCache, LayerShape
from cospec.models.model_runner import Forwards, ModelRunner, Read, Score

ATTENTION_NAME = "cospec"


class LayerCalls(Protocol):
    """The data that a model call carries to its attention layers, which call in order."""

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, heads: AttentionShape) -> Tensor:
        """Attend: queries ``[T, H, D]``, keys and values ``[T, Hkv, D]``; returns ``[T, H, D]``."""


class _Refused(Exception):
    """An attention layer needs an unsupported feature; the text completes "because it ..."."""


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """The function that layers call: ``query [1, H, T, D]``, ``key`` and ``value`` ``[1, Hkv, T, D]``."""
    calls: LayerCalls = options["cospec_calls"]
    heads = _heads(module, query, attention_mask, options)
    result = calls.attend(query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), heads)
    return result[None], None


def _heads(module: nn.Module, query: Tensor, attention_mask: Tensor | None, options: dict[str, Any]) -> AttentionShape:
    def option(name: str, attribute: str) -> Any:
        return options[name] if name in options else getattr(module, attribute, None)

    if option("s_aux", "sinks") is not None:
        raise _Refused("uses attention sinks")
    if attention_mask is not None or options.get("position_bias") is not None:
        raise _Refused("builds an attention mask of its own")
    if options.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise _Refused("has attention that is not causal")
    scale = options.get("scaling")
    return AttentionShape(
        scale=float(scale) if scale is not None else query.shape[-1] ** -0.5,
        window=option("sliding_window", "sliding_window"),
        softcap=option("softcap", "attn_logit_softcapping"),
    )


AttentionInterface.register(ATTENTION_NAME, _attention)


@dataclass(slots=True)
class _Forward:
    """One forward pass over the cache; counts the calls of the layers."""

    cache: KVCache
    attend_layer: LayerAttend
    layer: int = 0

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, heads: AttentionShape) -> Tensor:
        pages = self.cache.layers[self.layer]
        self.layer += 1
        return self.attend_layer(queries, keys, values, pages, heads)


@dataclass(slots=True)
class _Probe:
    """A forward of one short sequence without a cache, to find the needs of the layers."""

    shapes: list[LayerShape] = field(default_factory=list)
    windows: list[int | None] = field(default_factory=list)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, heads: AttentionShape) -> Tensor:
        if keys.shape != values.shape or queries.shape[-1] != keys.shape[-1]:
            raise _Refused("has keys and values of different sizes")
        self.shapes.append(LayerShape(keys.shape[1], keys.shape[2]))
        self.windows.append(heads.window)
        q, k, v = (x.transpose(0, 1)[None] for x in (queries, keys, values))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def architecture(config: Any) -> str:
    """Return the user's name of a model's architecture."""
    names = getattr(config, "architectures", None)
    return names[0] if names else str(getattr(config, "model_type", type(config).__name__))


def refusal(config: Any, reason: str) -> ModelError:
    """Return the error for an unsupported architecture; ``reason`` completes "because it ..."."""
    return ModelError(
        f"The architecture {architecture(config)} cannot run as a packed batch because it {reason}; allowed are causal "
        "language models whose attention can be replaced, such as Llama, Mistral, Qwen, Gemma, Phi, OPT and GPT-2."
    )


def _call(
    model: nn.Module, inputs: Mapping[str, Tensor], positions: Tensor, calls: LayerCalls, keep: Tensor | None
) -> Tensor:
    options: dict[str, Any] = {} if keep is None else {"logits_to_keep": keep}
    logits: Tensor = model(
        **inputs, position_ids=positions[None], use_cache=False, cospec_calls=calls, **options
    ).logits
    return logits[0].float()


def call_layers(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    positions: Tensor,
    cache: KVCache,
    attend: LayerAttend,
    rows: Tensor,
) -> Tensor:
    """Return float32 logits of ``rows``; the layers attend entries of ``cache``.

    Args:
        inputs: ``input_ids`` ``[1, T]`` or ``inputs_embeds`` ``[1, T, hidden]``.
        positions: ``[T]``.
    """
    return _call(model, inputs, positions, _Forward(cache, attend), rows)


@torch.inference_mode()
def probe(model: Any) -> list[LayerShape]:
    """Return the shapes of the attention layers, in the order of their calls.

    Raises:
        ModelError: the architecture's attention cannot be replaced. The error names the architecture.
    """
    config = model.config.get_text_config()
    device = next(model.parameters()).device
    seen = _Probe()
    try:
        ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
        _call(model, {"input_ids": ids}, torch.arange(2, device=device), seen, None)
    except _Refused as error:
        raise refusal(model.config, str(error)) from None
    except Exception as error:
        # Model code may raise anything here; the user needs the architecture instead of the trace.
        raise refusal(model.config, f"fails without its own attention ({type(error).__name__})") from error
    if not seen.shapes:
        raise refusal(model.config, "never calls the attention function that replaces its own")
    if len(seen.shapes) != config.num_hidden_layers:
        raise refusal(model.config, "has layers without attention, or layers that attend more than once")
    kinds = getattr(config, "layer_types", None) or []
    if any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        raise refusal(model.config, f"has layers of kind {', '.join(sorted(set(kinds)))}")
    expected = [kind == "sliding_attention" for kind in kinds] or [window is not None for window in seen.windows]
    if expected != [window is not None for window in seen.windows]:
        raise refusal(model.config, "does not tell its attention how far a sliding window reaches")
    return seen.shapes


def score(model: Any, cache: KVCache, attention: AttentionBackend) -> Score:
    """Build the forward pass of a Hugging Face model.

    Args:
        model: in evaluation mode, with ``attn_implementation`` set to ``ATTENTION_NAME``.
        cache: built from the shapes of ``probe``.
        attention: with the layout of ``cache``.
    """

    def forward(batch: InputBatch) -> Tensor:
        rows = batch.logit_rows
        wanted = rows.shape[0]
        if not wanted:
            rows = rows.new_zeros(1)  # some output layers refuse an empty batch
        inputs = {"input_ids": batch.ids[None]}
        return call_layers(model, inputs, batch.positions, cache, attention.prepare(batch), rows)[:wanted]

    return forward


def read(model: Any, run: Score) -> Read:
    """Build the forward pass that also returns the input of the output layer."""
    given: list[Tensor] = []
    model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))

    def forward(batch: InputBatch) -> tuple[Tensor, Tensor]:
        given.clear()
        logits = run(batch)
        return logits, given[0].flatten(0, -2)[: len(logits)].float()

    return forward


def packed_model(
    name: str, model: Any, cache: KVCache, attention: AttentionBackend, max_len: int, keep_hidden_states: bool = False
) -> ModelRunner:
    """Build a Hugging Face model with the ``Model`` interface, see ``score``."""
    vocab_size = int(model.config.get_text_config().vocab_size)
    run = score(model, cache, attention)
    return ModelRunner(
        name, Forwards(run, read(model, run) if keep_hidden_states else None), cache, vocab_size, max_len
    )


@torch.inference_mode()
def check_packing(model: Any, cache: KVCache, attention: AttentionBackend) -> None:
    """Check that a sequence gets equal logits in a batch, alone, and in two pieces.

    The check finds what shapes cannot show: layers that mix neighbouring rows or carry a state outside the KV cache.

    Args:
        cache: a separate empty cache with at least 3 pages of 8 entries.

    Raises:
        ModelError: the results differ. The error names the architecture.
    """
    packed = packed_model("probe", model, cache, attention, max_len=8)
    for id in ("a", "b", "c"):
        cache.pages.allocate(id, 6)
    ids = [(7 * number + 3) % packed.vocab_size for number in range(10)]
    one, two = tuple(ids[:6]), tuple(ids[6:])
    together = packed.forward(TokenBatch((SequenceSlice("a", 0, one), SequenceSlice("b", 0, two))))[6:]
    pieces = [packed.forward(TokenBatch((SequenceSlice("c", start, two[start : start + 2]),))) for start in (0, 2)]
    if None in likeliest(together):
        return  # NaN rows cannot be compared; ``model_runner.check_numbers`` refuses such a model
    worst = float((together - torch.cat(pieces)).abs().max())
    tolerance = (1e-3 if packed.dtype is torch.float32 else 0.1) * max(1.0, float(together.std()))
    if not worst <= tolerance:
        raise refusal(model.config, "gives other results in a batch than alone")
