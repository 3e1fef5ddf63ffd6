"""The fused forward against plain transformers, for each family, with everything a batch can hold at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.errors import ModelError
from cospec.models.attention.sdpa import SDPA
from cospec.models.block_manager import BlockPool
from cospec.models.families import why_not
from cospec.models.kv_cache import KVCache, LayerShape
from cospec.models.llama import FusedLlama, TorchRunner
from cospec.models.llama_weights import read_weights, tensors_of
from cospec.models.weights.fp32 import Fp32
from cospec.native import operators
from cospec.registry import WEIGHT_FORMATS

VOCAB = 101
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 104, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.15, "tie_word_embeddings": False,
    "attn_implementation": "eager",
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama linear rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama3 rope": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 24}),
    "mistral window": ("Mistral", {"sliding_window": 4}),
    "qwen2": ("Qwen2", {}),
    "qwen2 window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}


def load(family: str) -> Any:
    """A tiny random model with weights large enough that mistakes show."""
    name, extra = FAMILIES[family]
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(**COMMON | extra)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for key, parameter in model.named_parameters():
        if key.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
        if "norm" in key:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def cache_for(model: Any, page_size: int = 8) -> KVCache:
    config = model.config
    shape = LayerShape(config.num_key_value_heads, model.model.layers[0].self_attn.head_dim)
    pool = BlockPool(64, page_size)
    assert pool.allocate("gap", 3 * page_size)  # page 0 belongs to another sequence
    return KVCache([shape] * config.num_hidden_layers, pool, torch.float32, torch.device("cpu"))


@torch.inference_mode()
def plain(model: Any, tokens: Sequence[int]) -> Tensor:
    """Logits ``[len(tokens), V]`` of one whole sequence."""
    logits: Tensor = model(input_ids=torch.tensor([tokens])).logits
    return logits[0].float()


class Session:
    """A fused model with its cache, fed by slices."""

    def __init__(self, fused: FusedLlama, cache: KVCache) -> None:
        self.fused, self.cache = fused, cache

    def __call__(self, *slices: SequenceSlice) -> Tensor:
        for part in slices:
            assert self.cache.pages.allocate(part.id, part.start + len(part.tokens))
        return self.fused.logits(self.cache.pack(TokenBatch(slices)), self.cache.layers)


RUNNERS = [
    pytest.param(
        "native", marks=pytest.mark.skipif(not operators.available(), reason=operators.why_not() or "native kernels")
    ),
    "torch",
]


def session(model: Any, runner: str, weights: str = "fp32", page_size: int = 8) -> Session:
    cache, format = cache_for(model, page_size), WEIGHT_FORMATS.load(weights)()
    if runner == "native":
        return Session(FusedLlama.from_hf(model, cache, format), cache)
    return Session(FusedLlama(TorchRunner(read_weights(model.config, tensors_of(model), format), SDPA), VOCAB), cache)


def tokens(count: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


TREE = (-1, -1, 0, 0, 1, 2, 4, 5, 7, 8)  # deeper than the windows reach


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers(family: str, runner: str) -> None:
    model = load(family)
    run = session(model, runner)
    a, b, c = tokens(60, 1), tokens(30, 2), tokens(25, 3)
    nodes = tokens(len(TREE), 4)
    run(SequenceSlice("a", 0, a[:30], logits_from=30), SequenceSlice("b", 0, b[:29], logits_from=29))
    got = run(
        SequenceSlice("a", 30, a[30:], logits_from=10),  # the second chunk of a prompt
        SequenceSlice("b", 29, b[29:] + nodes, parents=TREE),  # one known token and a tree
        SequenceSlice("c", 0, c, logits_from=24),  # a new prompt
    )
    expected = [plain(model, a)[40:], plain(model, b)[29:]]
    for node in range(len(TREE)):
        path, at = [], node
        while at >= 0:
            path.append(nodes[at])
            at = TREE[at]
        expected.append(plain(model, (*b, *reversed(path)))[-1:])
    expected.append(plain(model, c)[24:])
    assert difference(got, torch.cat(expected)) < 1e-4
    decoded = run(SequenceSlice("c", 25, (7,)), SequenceSlice("a", 60, (8, 9), parents=(-1,)))
    assert difference(decoded[:1], plain(model, (*c, 7))[-1:]) < 1e-4
    assert difference(decoded[1:], plain(model, (*a, 8, 9))[-2:]) < 1e-4


@pytest.mark.parametrize("runner", RUNNERS)
def test_rows_without_logits_still_fill_the_cache(runner: str) -> None:
    model = load("llama")
    run = session(model, runner)
    prompt = tokens(12, 5)
    assert run(SequenceSlice("a", 0, prompt[:11], logits_from=11)).shape == (0, VOCAB)
    assert difference(run(SequenceSlice("a", 11, prompt[11:])), plain(model, prompt)[-1:]) < 1e-4


@pytest.mark.skipif(not operators.available(), reason=operators.why_not() or "native kernels")
@pytest.mark.parametrize("family", ["llama", "mistral window", "qwen3"])
def test_native_rows_are_bit_identical_in_every_batch(family: str) -> None:
    model = load(family)
    prompt, other = tokens(70, 6), tokens(40, 7)
    whole = session(model, "native")(SequenceSlice("a", 0, prompt))
    run = session(model, "native", page_size=16)
    mixed = [run(SequenceSlice("x", 0, other), SequenceSlice("a", 0, prompt[:33], logits_from=0))[40:]]
    mixed += [run(SequenceSlice("a", 33 + i, prompt[33 + i : 34 + i])) for i in range(20)]
    mixed += [run(SequenceSlice("y", 0, other[:9]), SequenceSlice("a", 53, prompt[53:58], parents=(-1, 0, 1, 2)))[9:]]
    threads = operators.threads()
    operators.set_threads(3 - threads if threads < 3 else 1)
    mixed += [run(SequenceSlice("a", 58, prompt[58:]))]
    operators.set_threads(threads)
    assert torch.equal(torch.cat(mixed), whole)


@pytest.mark.skipif(not operators.available(), reason=operators.why_not() or "native kernels")
@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_weights_of_fewer_bits_mean_the_same_in_both(weights: str) -> None:
    model = load("qwen3")
    if weights == "bf16":  # else the tables of the embedding differ
        model.model.embed_tokens.weight.data = model.model.embed_tokens.weight.data.bfloat16().float()
    prompt = SequenceSlice("a", 0, tokens(20, 8))
    results = [session(model, runner, weights)(prompt) for runner in ("native", "torch")]
    changed = float((results[0] - plain(model, prompt.tokens)).abs().mean())
    assert changed > 1e-3
    if weights == "bf16":  # inputs that lie between two bf16 numbers may fall to either side
        assert float((results[0] - results[1]).abs().mean()) < 0.3 * changed
    else:
        assert difference(*results) < 1e-4


def test_other_models_are_refused_with_the_reason() -> None:
    gpt2 = transformers.GPT2Config()
    assert "gpt2" in why_not(gpt2)
    assert "gelu" in why_not(transformers.LlamaConfig(**COMMON | {"hidden_act": "gelu"}))
    rope = {"rope_type": "proportional", "rope_theta": 1e4, "factor": 2.0}
    assert "proportional" in why_not(transformers.LlamaConfig(**COMMON | {"rope_parameters": rope}))
    assert "size 12" in why_not(transformers.LlamaConfig(**COMMON | {"head_dim": 12}))
    assert why_not(transformers.LlamaConfig(**COMMON)) == ""
    model = load("llama")
    model.config.hidden_act = "gelu"
    with pytest.raises(ModelError, match="activation gelu"):
        FusedLlama.from_hf(model, cache_for(model), Fp32())
