"""Packed batches through Hugging Face's own code equal the plain model, sequence by sequence, for every back end."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
import transformers

from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.core.tree import depths, path_to
from cospec.core.types import Commit
from cospec.models import hf
from cospec.models.attention.sdpa import SDPA
from cospec.models.block_manager import BlockPool
from cospec.models.kv_cache import KVCache
from cospec.models.linear import replace_linears
from cospec.models.llama import FusedLlama
from cospec.models.model_runner import Forwards, ModelRunner
from cospec.native import operators
from cospec.registry import ATTENTION_BACKENDS, WEIGHT_FORMATS

TOLERANCE = 1e-4
VOCAB = 96
PAGE_SIZE = 8
LENGTHS = (5, 23, 33, 14)
TREE = (-1, -1, 0, 0, 1, 4, 2)

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GEMMA: dict[str, Any] = {**COMMON, "head_dim": 16}
SLIDING: dict[str, Any] = {
    "sliding_window": 2,  # less than the tree is deep
    "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}

WINDOWED: dict[str, Any] = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.3},
    "longrope": {
        "factor": 1.0, "short_factor": [1.5] * 8, "long_factor": [3.0] * 8, "original_max_position_embeddings": 128,
    },
}  # fmt: skip


OPT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "word_embed_proj_dim": 64,
}  # fmt: skip


def rope(kind: str) -> Any:
    return transformers.LlamaConfig(**COMMON, rope_parameters={"rope_type": kind, "rope_theta": 1e4, **ROPES[kind]})


CONFIGS: dict[str, Callable[[], Any]] = {
    **{f"llama-{kind}": partial(rope, kind) for kind in ROPES},
    "llama-one-kv-head": lambda: transformers.LlamaConfig(**{**COMMON, "num_key_value_heads": 1}, head_dim=24),
    "llama-biased": lambda: transformers.LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True),
    "llama-odd-vocabulary": lambda: transformers.LlamaConfig(**{**COMMON, "vocab_size": 97}),
    "llama": lambda: transformers.LlamaConfig(**COMMON),
    "llama-tied": lambda: transformers.LlamaConfig(**COMMON, tie_word_embeddings=True),
    "mistral": lambda: transformers.MistralConfig(**COMMON, sliding_window=None),
    "mistral-window": lambda: transformers.MistralConfig(**COMMON, sliding_window=6),
    "qwen2": lambda: transformers.Qwen2Config(**COMMON),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON, head_dim=16),
    "gemma": lambda: transformers.GemmaConfig(**GEMMA),
    "gemma2": lambda: transformers.Gemma2Config(**GEMMA, **SLIDING, attn_logit_softcapping=2.0),
    "gemma3": lambda: transformers.Gemma3TextConfig(**GEMMA, **SLIDING),
    "phi": lambda: transformers.PhiConfig(**{**COMMON, "num_key_value_heads": 4}),
    "phi3": lambda: transformers.Phi3Config(**COMMON),
    "opt": lambda: transformers.OPTConfig(**OPT),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**{**COMMON, "num_key_value_heads": 4}),
    "granite": lambda: transformers.GraniteConfig(**COMMON, logits_scaling=2.0),
    "cohere": lambda: transformers.CohereConfig(**COMMON),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **COMMON | {"head_dim": 16}, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "olmo2": lambda: transformers.Olmo2Config(**COMMON),
    "smollm3": lambda: transformers.SmolLM3Config(**COMMON),
    "starcoder2": lambda: transformers.Starcoder2Config(**COMMON),
    "cohere2": lambda: transformers.Cohere2Config(**COMMON, **WINDOWED),
    "olmo3": lambda: transformers.Olmo3Config(**COMMON, **WINDOWED),
    "mixtral-window": lambda: transformers.MixtralConfig(**COMMON, sliding_window=4, num_local_experts=4),
    "phi3-partial": lambda: transformers.Phi3Config(
        **COMMON, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    ),
    "opt-post-norm": lambda: transformers.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        word_embed_proj_dim=32,
        do_layer_norm_before=False,
    ),
    "gpt2-layer-scale": lambda: transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=128,
        bos_token_id=1,
        eos_token_id=2,
        scale_attn_by_inverse_layer_idx=True,
    ),
    "granite-factors": lambda: transformers.GraniteConfig(
        **COMMON, attention_multiplier=0.3, residual_multiplier=0.5, embedding_multiplier=3.0
    ),
    "gemma3-two-ropes": lambda: transformers.Gemma3TextConfig(
        **GEMMA,
        **SLIDING,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        },
    ),
}
BACK_ENDS = [("torch", "sdpa"), ("mkldnn", "sdpa"), ("native", "native")]
LLAMAS = [name for name in CONFIGS if name.startswith("llama") and name != "llama-dynamic"]
OTHERS = "mistral mistral-window qwen2 qwen3 granite granite-factors smollm3 phi3 phi3-partial olmo2 gemma gemma2"
FUSED = [*LLAMAS, *OTHERS.split(), "gemma3", "gemma3-two-ropes"]
RUNS = [(name, runner) for name in FUSED for runner in ("torch", "native")]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def reference(name: str) -> Any:
    """Plain Hugging Face with weights large enough that a wrong mask shows."""
    generator = torch.Generator().manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager").float().eval()
    for parameter in model.parameters():
        scale = 0.15 if parameter.dim() >= 2 else 0.05
        offset = 0.0 if parameter.dim() >= 2 else parameter.data
        parameter.data = torch.randn(parameter.shape, generator=generator) * scale + offset
    model.tie_weights()
    return model


def need(back_end: str) -> None:
    if back_end == "native" and not operators.available():
        pytest.skip(operators.why_not())


def adapted(name: str) -> Any:
    """A copy of the reference that takes packed batches."""
    plain = reference(name)
    config = copy.deepcopy(plain.config)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=hf.ATTENTION_NAME).float().eval()
    model.load_state_dict(plain.state_dict())
    return model.requires_grad_(False)


def empty_cache(model: Any, by_head: bool) -> KVCache:
    pool = BlockPool(64, PAGE_SIZE, prefix_caching=False)
    return KVCache(hf.probe(model), pool, torch.float32, torch.device("cpu"), by_head)


def packed_model(name: str, linear: str, attention: str, weights: str = "fp32") -> ModelRunner:
    need(linear)
    model, backend = adapted(name), ATTENTION_BACKENDS.load(attention)()
    kv = empty_cache(model, backend.by_head)
    replace_linears(model, linear, WEIGHT_FORMATS.load(weights)())
    return hf.packed_model(name, model, kv, backend, max_len=128)


def fused_model(name: str, runner: str) -> ModelRunner:
    need(runner)
    model = adapted(name)
    kv = empty_cache(model, by_head=runner == "torch")  # which the native runner does not take
    fused = FusedLlama.from_hf(model, kv, WEIGHT_FORMATS.load("fp32")())
    forwards = Forwards(lambda batch: fused.logits(batch, kv.layers), lambda batch: fused.states(batch, kv.layers))
    return ModelRunner(name, forwards, kv, fused.vocab_size, max_len=128)


@torch.no_grad()
def plain_logits(name: str, tokens: tuple[int, ...]) -> torch.Tensor:
    logits: torch.Tensor = reference(name)(input_ids=torch.tensor([tokens]), use_cache=False).logits
    return logits[0].float()


def tokens_of(sequence: int, count: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(100 + sequence)
    return tuple(torch.randint(3, VOCAB, (count,), generator=generator).tolist())


def reserve(model: ModelRunner, lengths: dict[str, int]) -> None:
    """Room for all, grown by turns so that pages of different sequences lie among each other."""
    for part in (1, 2, 3):
        for id, length in lengths.items():
            assert model.pages.allocate(id, length * part // 3)


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.shape == wanted.shape
    assert float((found - wanted).abs().max()) < TOLERANCE


@pytest.mark.parametrize(("linear", "attention"), BACK_ENDS, ids=lambda value: str(value))
@pytest.mark.parametrize("name", CONFIGS)
def test_packed_batches_equal_plain_model(name: str, linear: str, attention: str) -> None:
    play(packed_model(name, linear, attention), name)


@pytest.mark.parametrize(("name", "runner"), [*RUNS, ("qwen3_moe", "native")])
def test_fused_forward_equals_plain_model(name: str, runner: str) -> None:
    play(fused_model(name, runner), name)


def play(model: ModelRunner, name: str) -> None:
    """Prompts whole and in pieces, decoding, a chain and a tree in one batch, a commit, and on from there."""
    texts = [tokens_of(number, length + 12) for number, length in enumerate(LENGTHS)]
    ids = [f"s{number}" for number in range(4)]
    reserve(model, {id: len(text) for id, text in zip(ids, texts, strict=True)})

    # Three whole prompts and the first piece of the fourth.
    firsts = (LENGTHS[0], LENGTHS[1], 17, LENGTHS[3])
    logits = model.forward(
        TokenBatch(tuple(SequenceSlice(ids[n], 0, texts[n][: firsts[n]], logits_from=n) for n in range(4)))
    )
    wanted = [plain_logits(name, texts[n][: firsts[n]])[n:] for n in range(4)]
    assert_close(logits, torch.cat(wanted))

    # Decode, a chain after a known token, the rest of a prompt, and a tree, all at once.
    nodes = tokens_of(9, len(TREE))
    chain = SequenceSlice(ids[1], 23, texts[1][23:28], parents=(-1, 0, 1, 2))
    tree = SequenceSlice(ids[3], 14, (*texts[3][14:15], *nodes), parents=TREE)
    slices = (
        SequenceSlice(ids[0], 5, texts[0][5:6]),
        chain,
        SequenceSlice(ids[2], 17, texts[2][17:33], logits_from=15),
        tree,
    )
    logits = model.forward(TokenBatch(slices))
    assert_close(logits[0:1], plain_logits(name, texts[0][:6])[5:])
    assert_close(logits[1:6], plain_logits(name, texts[1][:28])[23:])
    assert_close(logits[6:7], plain_logits(name, texts[2][:33])[32:])
    for node in range(-1, len(TREE)):
        path = tuple(nodes[step] for step in path_to(TREE, node))
        assert_close(logits[8 + node], plain_logits(name, texts[3][:15] + path)[-1])

    # The path 1, 4, 5 is no prefix of the tree: its entries move. Sequence 1 keeps two of its chain, which is one.
    path = (1, 4, 5)
    kept = texts[3][:15] + tuple(nodes[step] for step in path)
    model.commit(
        [
            Commit(ids[3], base_len=15, tokens=(*kept[15:], 50), path=path, computed=18, drafted=len(TREE)),
            Commit(ids[1], base_len=24, tokens=(*texts[1][24:26], 51), path=(0, 1), computed=26, drafted=4),
        ]
    )
    after = TokenBatch((SequenceSlice(ids[3], 18, (50, 60, 61), parents=(-1, -1)), SequenceSlice(ids[1], 26, (51, 62))))
    logits = model.forward(after)
    assert_close(logits[0], plain_logits(name, (*kept, 50))[-1])
    assert_close(logits[1], plain_logits(name, (*kept, 50, 60))[-1])
    assert_close(logits[2], plain_logits(name, (*kept, 50, 61))[-1])
    assert_close(logits[3:], plain_logits(name, (*texts[1][:26], 51, 62))[-2:])


@pytest.mark.parametrize(("linear", "attention"), BACK_ENDS, ids=lambda value: str(value))
def test_freed_pages_leave_no_trace(linear: str, attention: str) -> None:
    """Sequences come and go for many small rounds; freed pages are poisoned and must not be read by their heirs."""
    model = packed_model("mistral-window", linear, attention)
    generator = torch.Generator().manual_seed(3)
    texts: dict[str, tuple[int, ...]] = {}
    done: dict[str, int] = {}
    for step in range(40):
        if len(texts) < 5:
            id = f"s{step}"
            texts[id] = tokens_of(step, int(torch.randint(4, 24, (1,), generator=generator)))
            done[id] = 0
            assert model.pages.allocate(id, len(texts[id]))
        slices = []
        for id, text in texts.items():
            count = min(int(torch.randint(1, 7, (1,), generator=generator)), len(text) - done[id])
            slices.append(SequenceSlice(id, done[id], text[done[id] : done[id] + count], logits_from=count - 1))
        logits = model.forward(TokenBatch(tuple(slices)))
        for row, part in enumerate(slices):
            done[part.id] += len(part.tokens)
            wanted = plain_logits("mistral-window", texts[part.id][: done[part.id]])[-1]
            assert_close(logits[row], wanted)
        for id in [id for id in texts if done[id] == len(texts[id])]:
            freed = list(model.cache.pages.table(id))
            model.free([id, "unknown"])
            for layer in model.cache.layers:
                layer.keys[freed] = float("nan")
                layer.values[freed] = float("nan")
            del texts[id], done[id]
    model.free(list(texts))
    model.pages.check_integrity()
    assert model.pages.usage == 0


def test_no_logits_asked() -> None:
    model = packed_model("llama", "mkldnn", "sdpa")
    model.pages.allocate("a", 8)
    assert model.forward(TokenBatch((SequenceSlice("a", 0, (1, 2, 3), logits_from=3),))).shape == (0, VOCAB)


@pytest.mark.parametrize("weights", ["bf16", "int8"])
@pytest.mark.parametrize("linear", ["mkldnn", "native"])
def test_held_weights_are_the_same_model_in_every_back_end(linear: str, weights: str) -> None:
    rounded, other = (packed_model("gpt2", each, "sdpa", weights) for each in ("torch", linear))
    batch = TokenBatch((SequenceSlice("a", 0, tokens_of(1, 9)),))
    for model in (rounded, other):
        model.pages.allocate("a", 9)
    assert_close(other.forward(batch), rounded.forward(batch))


def test_depths_place_tree_nodes() -> None:
    """The tree of these tests branches at two depths, so that a layout by index would be noticed."""
    assert depths(TREE) == [1, 1, 2, 2, 2, 3, 3]


@pytest.mark.parametrize("runner", ["native", "torch", "transformers"])
def test_states_are_what_the_logits_are_read_from(runner: str) -> None:
    need("native" if runner == "native" else "torch")
    if runner == "transformers":
        inner = adapted("llama")
        model = hf.packed_model(
            "llama", inner, empty_cache(inner, by_head=True), SDPA, max_len=128, keep_hidden_states=True
        )
    else:
        model = fused_model("llama", runner)
    reserve(model, {"a": 12, "b": 12})
    slices = SequenceSlice("a", 0, tokens_of(0, 5), (), 3), SequenceSlice("b", 0, tokens_of(1, 4), (-1, 0), 1)
    logits = model.forward(TokenBatch(slices))
    assert model.hidden_states is not None and model.hidden_states.shape == (5, reference("llama").config.hidden_size)
    assert_close(model.hidden_states @ reference("llama").lm_head.weight.float().T, logits)
