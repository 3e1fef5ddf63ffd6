"""The parts of a model: their layers, their weights, and their logits, which are those of the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.errors import InvalidInput
from cospec.models.loading import LoadOptions, check_division, load_model, load_stage
from cospec.models.shard import Shard
from harness.shards import PAGES, ShardsHere, StageAlone, differ
from harness.tiny import COMMON, VOCAB, tokens

THREE = {**COMMON, "num_hidden_layers": 3}
MODELS: dict[str, Any] = {
    "llama": partial(transformers.LlamaConfig, **THREE),
    "llama-tied": partial(transformers.LlamaConfig, **{**THREE, "tie_word_embeddings": True}),
    "qwen2": partial(transformers.Qwen2Config, **THREE),  # has biases
    "mistral-window": partial(transformers.MistralConfig, **THREE, sliding_window=9),
    "gemma2": partial(transformers.Gemma2Config, **THREE, head_dim=16, sliding_window=8),
    "qwen3-moe": partial(  # whose second and last layers are no mixtures
        transformers.Qwen3MoeConfig, **{**THREE, "num_hidden_layers": 4}, head_dim=16, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32, mlp_only_layers=[1, 3],
    ),
    "gpt2": partial(
        transformers.GPT2Config, vocab_size=VOCAB, n_embd=64, n_layer=3, n_head=4, n_positions=512,
        initializer_range=0.15, bos_token_id=None, eos_token_id=None,
    ),
}  # fmt: skip
FUSED = ("llama", "llama-tied", "qwen2", "mistral-window")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    found = {}
    for name, config in MODELS.items():
        torch.manual_seed(1)
        found[name] = tmp_path_factory.mktemp(name)
        model = transformers.AutoModelForCausalLM.from_config(config()).float()
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.data = torch.randn(parameter.shape) * 0.1
        model.save_pretrained(found[name])
    yield found


def batches() -> list[TokenBatch]:
    """A prompt and a draft tree in one batch, then more tokens of both."""
    tree = SequenceSlice("b", 0, tokens(7, 2), (-1, 0, -1, 2), 2)
    first = TokenBatch((SequenceSlice("a", 0, tokens(30, 1), (), 25), tree))
    second = TokenBatch((SequenceSlice("a", 30, tokens(2, 3), (), 2), SequenceSlice("b", 3, tokens(3, 4), (-1, 0), 0)))
    return [first, second]


def logits(model: Any) -> torch.Tensor:
    for id in ("a", "b"):
        model.pages.allocate(id, 48)
    return torch.cat([model.forward(batch) for batch in batches()])


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_stages_give_the_bits_of_the_whole_model(folders: dict[str, Path], name: str, stages: int) -> None:
    wanted = logits(load_model(str(folders[name]), LoadOptions(device="cpu", num_pages=PAGES)))
    assert torch.equal(logits(ShardsHere(folders[name], stages)), wanted)


@pytest.mark.parametrize("name", FUSED)
def test_stages_in_torch_give_the_bits_of_the_whole_model(folders: dict[str, Path], name: str) -> None:
    options = LoadOptions(device="cpu", num_pages=PAGES, fused="never")
    wanted = logits(load_model(str(folders[name]), options))
    assert torch.equal(logits(ShardsHere(folders[name], 3, options=options)), wanted)


def test_a_stage_that_is_left_out_is_seen(folders: dict[str, Path]) -> None:
    """The control of the stages."""
    model = ShardsHere(folders["llama"], 3)
    wanted = logits(model)
    del model.stages[1]
    assert differ(logits(model), wanted)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("name", [*FUSED, "gemma2"])
def test_shards_sum_to_the_whole_model(folders: dict[str, Path], name: str, stages: int) -> None:
    """Sums in another order have other last bits."""
    wanted = logits(load_model(str(folders[name]), LoadOptions(device="cpu", num_pages=PAGES)))
    found = logits(ShardsHere(folders[name], stages, 2))
    assert torch.allclose(found, wanted, atol=1e-4)


def test_a_shard_that_is_left_out_is_seen(folders: dict[str, Path]) -> None:
    """The control of the sums."""
    name = str(folders["llama"])
    wanted = logits(load_model(name, LoadOptions(device="cpu", num_pages=PAGES)))
    options = LoadOptions(device="cpu", num_pages=PAGES, shard=Shard(0, 1, 0, 2))
    model = ShardsHere(name, 1)
    model.stages = [StageAlone(load_stage(name, options, lambda product: None))]
    assert not torch.allclose(logits(model), wanted, atol=1e-2)


def test_layers_are_divided_without_a_gap() -> None:
    for count in (3, 7, 32):
        for stages in range(1, count + 1):
            parts = [Shard(stage, stages).layers(count) for stage in range(stages)]
            assert [layer for part in parts for layer in part] == list(range(count))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_part_holds_its_own_weights_only(folders: dict[str, Path]) -> None:
    def numbers(stage: int) -> int:
        options = LoadOptions(device="cpu", num_pages=4, fused="never", shard=Shard(stage, 3))
        return sum(layer.keys.numel() for layer in load_stage(str(folders["llama"]), options).cache.layers)

    whole = load_model(str(folders["llama"]), LoadOptions(device="cpu", num_pages=4))
    assert [numbers(stage) * 3 for stage in range(3)] == [3 * 2 * 4 * 16 * 16] * 3
    assert whole.pages.capacity == 64


@pytest.mark.parametrize(
    ("name", "shard", "said"),
    [
        ("llama", Shard(stages=4), "pipeline_parallel_size is 4; allowed is 1 to 3, the layers"),
        ("llama", Shard(ranks=4), "a divisor of 4 heads, 2 key and value heads and 104 columns"),
        ("gpt2", Shard(ranks=2), "tensor_parallel_size is 2; allowed is 1 for gpt2"),
    ],
)
def test_a_division_that_does_not_work_is_one_sentence(
    folders: dict[str, Path], name: str, shard: Shard, said: str
) -> None:
    with pytest.raises(InvalidInput, match=said):
        check_division(str(folders[name]), LoadOptions(device="cpu", shard=shard))
