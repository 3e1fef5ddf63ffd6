"""Weights of the hand-written forward: read from files, or by transformers; configurations that make no sense."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.errors import ModelError
from cospec.models import weight_loading
from cospec.models.files.source import EMBEDDING, HEAD
from cospec.models.llama_weights import read_weights
from cospec.models.loading import LoadOptions, load_model
from cospec.native import operators
from harness.tiny import COMMON, in_bfloat16, tiny, tokens

EXACT = LoadOptions(device="cpu", kv_cache_dtype="float32", num_pages=4)
PROMPT = tokens(7, seed=3)


def logits(folder: Path, options: LoadOptions = EXACT) -> torch.Tensor:
    """Of every token of the prompt."""
    model = load_model(str(folder), options)
    assert model.pages.allocate("a", len(PROMPT))
    return model.forward(TokenBatch((SequenceSlice("a", 0, PROMPT),)))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tiny("llama").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.skipif(not operators.available(), reason=operators.why_not() or "native kernels")
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
def test_the_forward_reads_stored_weights(tmp_path: Path, stored: torch.dtype) -> None:
    """No float32 copy of the model in between, and the same results as through one."""
    tiny("llama").to(stored).save_pretrained(tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with patch.object(weight_loading, "read_weights", wraps=read_weights) as read:
        found = logits(tmp_path)
    assert [call.args[1][EMBEDDING].dtype for call in read.call_args_list] == [stored]
    with torch.no_grad():
        plain = in_bfloat16(reference) if stored is torch.bfloat16 else reference
        expected = plain(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_tensors_that_the_architecture_lacks_are_not_read(saved: Path) -> None:
    expected, file = logits(saved), saved / "model.safetensors"
    more = {f"model.layers.0.self_attn.{part}_proj.bias": torch.ones(64) for part in "qo"}
    save_file(load_file(file) | more, file, {"format": "pt"})
    with patch.object(weight_loading, "load_hf_weights") as by_transformers:
        assert torch.equal(logits(saved), expected)
    assert not by_transformers.called


def test_a_tied_model_with_an_output_layer_of_its_own(saved: Path) -> None:
    """The file decides, as in transformers."""
    expected, path = logits(saved), saved / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    assert torch.equal(logits(saved), expected)
    assert torch.equal(logits(saved, replace(EXACT, fused="never")).argmax(-1), expected.argmax(-1))
    file = saved / "model.safetensors"
    save_file({name: x for name, x in load_file(file).items() if name != HEAD}, file, {"format": "pt"})
    assert not torch.equal(logits(saved), expected)


def test_names_that_transformers_changes(saved: Path) -> None:
    """Files of base models lack a prefix, which transformers adds."""
    expected, file = logits(saved), saved / "model.safetensors"
    save_file({name.removeprefix("model."): x for name, x in load_file(file).items()}, file, {"format": "pt"})
    with patch.object(weight_loading, "load_hf_weights", wraps=weight_loading.load_hf_weights) as read:
        assert torch.equal(logits(saved), expected)
    assert read.call_count == 1


def test_a_model_that_is_not_causal_is_refused(tmp_path: Path) -> None:
    config = transformers.Gemma3TextConfig(**COMMON, head_dim=16, use_bidirectional_attention=True)
    transformers.Gemma3ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="bidirectional"):
        load_model(str(tmp_path), EXACT)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": "2"},
        {"rope_type": "linear", "factor": 0},
        {"rope_type": "dynamic", "factor": 2.0, "partial_rotary_factor": 0.125},  # two numbers rotate
    ],
)
def test_rotary_embeddings_that_cannot_be_computed(saved: Path, rope: dict[str, Any]) -> None:
    path = saved / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_parameters": {"rope_theta": 1e4, **rope}}))
    with pytest.raises(ModelError):
        load_model(str(saved), EXACT)
