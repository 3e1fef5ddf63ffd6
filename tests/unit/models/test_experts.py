"""Mixtures of experts in the native forward: their files, their bits, and which experts are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from cospec.core.interfaces import Model
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.core.types import Request
from cospec.drafters.model import ModelDrafter
from cospec.models.files.quantized_safetensors_source import QuantizedSafetensorsSource
from cospec.models.files.source import block_format
from cospec.models.files.weight_source_selection import open_source
from cospec.models.loading import LoadOptions, load_model, resolve
from cospec.models.weights.fp32 import Fp32
from cospec.models.weights.q8_0 import Q8_0
from cospec.native import library
from cospec.sampling_params import SamplingParams
from cospec.text.input_processor import make_requests
from harness.gguf_files import write_model
from harness.llamas import llama_engine
from harness.quantized_checkpoints import write_quantized
from harness.toys import run_all, tokens_of

pytestmark = pytest.mark.skipif(not library.available(), reason=library.why_not() or "native kernels")

VOCAB, EXPERTS = 64, 6
FACTS: dict[str, Any] = {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": 256}
PROMPTS = tuple(tuple((7 * n + i * i * 3 + i) % VOCAB for i in range(3 + 5 * n)) for n in range(5))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    isa, threads = library.isa(), library.threads()
    yield
    library.set_isa(isa)
    library.set_threads(threads)


def random_model(**changes: Any) -> Any:
    torch.manual_seed(3)
    options: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "num_experts": EXPERTS,
        "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True, "bos_token_id": None,
        "eos_token_id": None,
    }  # fmt: skip
    config = transformers.Qwen3MoeConfig(**options | changes)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for parameter in model.parameters():
        scale, start = (0.08, 0.0) if parameter.dim() >= 2 else (0.1, parameter.data)
        parameter.data = torch.randn(parameter.shape) * scale + start
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files in several formats, and a drafter that is the target with a little noise."""
    folder, model = tmp_path_factory.mktemp("files"), random_model()
    for kind in ("F32", "Q4_0", "Q8_0"):
        write_model(folder / f"{kind}.gguf", model, kind, **FACTS)
    write_model(folder / "Q3_K.gguf", model, "Q3_K", kinds={"ffn_up_exps": "Q6_K", "attn_output": "Q4_0"}, **FACTS)
    for parameter in model.parameters():
        parameter.data += torch.randn(parameter.shape) * 0.005
    write_model(folder / "drafter.gguf", model, "Q8_0", **FACTS)
    return folder


def load(path: Path, **options: Any) -> Model:
    return load_model(str(path), LoadOptions(device="cpu", num_pages=200, page_size=8, **options))


def forward(model: Model, prompts: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """The logits of each prompt, all in one batch."""
    ids = [f"p{number}" for number in range(len(prompts))]
    assert all(model.pages.allocate(id, len(prompt)) for id, prompt in zip(ids, prompts, strict=True))
    slices = tuple(SequenceSlice(id, 0, prompt) for id, prompt in zip(ids, prompts, strict=True))
    found = model.forward(TokenBatch(slices))
    model.free(ids)
    return list(found.split([len(prompt) for prompt in prompts]))


READABLE = {"fused": "never", "linear_backend": "torch", "attention_backend": "sdpa"}


def same(x: Tensor) -> Tensor:
    return x


def readable_experts(rounded: Callable[[Tensor], Tensor], value: Callable[[Tensor], Tensor] = same) -> Any:
    """The forward of transformers' experts, with rounded inputs and with other values of the weights."""

    def experts(self: Any, states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(states)
        for row, (numbers, shares) in enumerate(zip(chosen.tolist(), weights, strict=True)):
            for number, share in zip(numbers, shares, strict=True):
                gate, up = F.linear(rounded(states[row]), value(self.gate_up_proj[number])).chunk(2)
                total[row] += share * F.linear(rounded(F.silu(gate) * up), value(self.down_proj[number]))
        return total

    return experts


@pytest.mark.parametrize(
    ("kind", "quantization"), [("Q4_0", None), ("Q8_0", None), ("Q3_K", None), ("F32", "q4_k"), ("F32", None)]
)
def test_blocks_give_the_logits_of_their_values(
    files: Path, monkeypatch: pytest.MonkeyPatch, kind: str, quantization: str | None
) -> None:
    """Readable reference: transformers' experts on the exact values of the blocks, with rounded inputs."""
    path = files / f"{kind}.gguf"
    name = quantization or {"F32": "q8_0", "Q3_K": "q6_k"}.get(kind, kind.lower())
    format, rounds = block_format(name), kind != "F32" or quantization is not None

    def value(weight: Tensor) -> Tensor:
        return format.decode(format.encode(weight), torch.float32) if quantization else weight

    monkeypatch.setattr(Qwen3MoeExperts, "forward", readable_experts(format.round_inputs if rounds else same, value))

    def error(model: Model) -> float:
        """Of most prompts: a sum that differs in its last bit may round an input of the next product to another side.

        Prompts of one token, because a change would go on to all later tokens.
        """
        return float((torch.cat(forward(model, tokens)) - wanted).abs().mean(-1).median())

    tokens = [(token,) for token in range(24)]
    wanted = torch.cat(forward(load(path, quantization=quantization, **READABLE), tokens))
    native = load(path, quantization=quantization)
    assert native.native_forward is not None
    assert error(native) < 1e-5
    assert error(load(path, quantization="iq4_nl")) > 1e-2  # another format, other numbers


@pytest.mark.parametrize(("kind", "format"), [("Q4_0", "q4_0"), ("Q3_K", "q6_k")])
def test_experts_stay_in_blocks(files: Path, kind: str, format: str) -> None:
    """Also gate and up projections of two types, which have one format in memory."""
    source = open_source(resolve(str(files / f"{kind}.gguf")))
    assert {source.kinds[name] for name in source.experts} == {format} and len(source.experts) == 4
    name = "model.layers.1.mlp.experts.gate_up_proj"
    stored = source.linear(name, block_format("q8_0"))
    assert (stored.format.name, stored.outputs, stored.inputs) == (format, EXPERTS * 512, 256)
    assert torch.equal(stored.decode(), source.read(name).flatten(0, 1))


@pytest.mark.parametrize("kind", ["F32", "Q4_0"])
def test_same_bits_for_any_batch_place_threads_and_instruction_set(files: Path, kind: str) -> None:
    model = load(files / f"{kind}.gguf")
    alone = [forward(model, [prompt])[0] for prompt in PROMPTS]
    step = [
        torch.cat([forward(model, [prompt[: end + 1]])[0][-1:] for end in range(len(prompt))]) for prompt in PROMPTS[:2]
    ]
    assert all(torch.equal(one, other) for one, other in zip(step, alone, strict=False))
    for isa in library.offered():
        for threads, order in ((1, (0, 1, 2, 3, 4)), (2, (4, 2, 0, 3, 1)), (3, (1, 4, 3, 2, 0))):
            library.set_isa(isa)
            library.set_threads(threads)
            found = forward(model, [PROMPTS[place] for place in order])
            assert all(torch.equal(own, alone[place]) for own, place in zip(found, order, strict=True)), (isa, threads)


def test_only_the_chosen_experts_are_read(tmp_path: Path) -> None:
    """Equal probabilities choose the first experts; damaged weights of the others change nothing."""
    model = random_model()
    for layer in model.model.layers:
        layer.mlp.gate.weight.data.zero_()
    wanted = forward(load(write_model(tmp_path / "whole.gguf", model, **FACTS)), PROMPTS)
    for layer in model.model.layers:
        layer.mlp.experts.down_proj.data[2:] = float("nan")
    found = forward(load(write_model(tmp_path / "damaged.gguf", model, **FACTS)), PROMPTS)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    for layer in model.model.layers:
        layer.mlp.experts.down_proj.data[:2] *= 2
    other = forward(load(write_model(tmp_path / "other.gguf", model, **FACTS)), PROMPTS)
    assert not torch.equal(other[0], wanted[0])


CHANGES: dict[str, dict[str, Any]] = {
    "all": {},
    "first layer without": {"mlp_only_layers": [0], "intermediate_size": 320, "norm_topk_prob": False},
    "three of five": {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 40},
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_safetensors_with_experts_one_by_one(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = random_model(**changes)
    model.save_pretrained(tmp_path)
    assert any(".experts.0." in name for name in open_source(tmp_path).shapes)
    native = load(tmp_path)
    assert native.native_forward is not None
    wanted = model(torch.tensor([PROMPTS[2]]), use_cache=False).logits[0]
    torch.testing.assert_close(forward(native, PROMPTS[2:3])[0], wanted, atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("kind", "floats", "blocks", "expanded"),
    [
        ("awq", "", {"q4_1": 4}, 0),
        ("gptq", "", {}, 2 * 3 * EXPERTS),  # inputs in another order for each expert
        ("awq", "model.layers.0.mlp.experts.5.down_proj", {"q4_1": 3}, EXPERTS - 1),
    ],
    ids=["blocks", "act-order", "one in floats"],
)
def test_quantized_safetensors_with_experts_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, floats: str, blocks: dict[str, int], expanded: int
) -> None:
    """Experts stay in blocks where all experts of a layer are blocks of one format."""
    plain, folder = tmp_path / "plain", tmp_path / "quantized"
    folder.mkdir()
    random_model(hidden_size=64, intermediate_size=64, moe_intermediate_size=64).save_pretrained(plain)
    values = write_quantized(plain, folder, kind)
    if floats:
        stored = load_file(folder / "model.safetensors")
        kept = {name: tensor for name, tensor in stored.items() if not name.startswith(floats)}
        save_file(kept | {f"{floats}.weight": values[f"{floats}.weight"]}, folder / "model.safetensors")
    source = open_source(folder)
    assert Counter(source.kinds[name] for name in source.experts if name in source.kinds) == blocks
    assert len(source.expanded(Fp32())) == expanded
    assert all(".experts." in name for name in source.expanded(Fp32()))
    for name in source.experts:
        stored_weight = source.linear(name, block_format("q8_0"))
        assert (stored_weight.outputs, stored_weight.inputs) == (EXPERTS * (128 if "up" in name else 64), 64)
        torch.testing.assert_close(stored_weight.decode(), source.read(name).flatten(0, 1), atol=2e-4, rtol=0)
        if name in source.kinds:
            place, _, part = name.rpartition(".")
            parts = ("gate", "up") if part == "gate_up_proj" else ("down",)
            members = [values[f"{place}.{each}.{own}_proj.weight"] for each in range(EXPERTS) for own in parts]
            torch.testing.assert_close(source.read(name).flatten(0, 1), torch.cat(members), atol=1e-6, rtol=0)
    native = load(folder)
    assert native.native_forward is not None
    found, exact = forward(native, PROMPTS[2:3])[0], QuantizedSafetensorsSource.read

    def read(self: QuantizedSafetensorsSource, name: str) -> Tensor:
        own = self.linear(name, Fp32()).decode().view(self.shapes[name]) if name in self.experts else exact(self, name)
        return own

    monkeypatch.setattr(QuantizedSafetensorsSource, "read", read)
    monkeypatch.setattr(Qwen3MoeExperts, "forward", readable_experts(Q8_0().round_inputs if blocks else same))
    wanted = forward(load(folder, **READABLE), PROMPTS[2:3])[0]
    # The readable experts round the inputs of the projection in floats too.
    assert float((found - wanted).abs().mean()) < (1e-2 if floats else 1e-5)


def requests() -> list[Request]:
    greedy = SamplingParams(temperature=0, max_tokens=12)
    seeded = SamplingParams(temperature=0.8, max_tokens=12, seed=3, n=2)
    return [
        each
        for name, params in (("g", greedy), ("s", seeded))
        for n, prompt in enumerate(PROMPTS[:3])
        for each in make_requests(f"{name}{n}", list(prompt), params)
    ]


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_drafts_change_no_token(files: Path, kind: str) -> None:
    def target() -> Model:
        return load(files / f"{kind}.gguf")

    alone: dict[str, tuple[int, ...]] = {}
    for request in requests():
        alone |= tokens_of(run_all(llama_engine(target(), None), [request]))
    for threads, k, native in ((2, 4, "auto"), (1, 3, "off")):
        library.set_threads(threads)
        drafter = ModelDrafter(load(files / "drafter.gguf"), native=native == "auto")
        running = llama_engine(target(), drafter, k, max_num_seqs=4, native=native)
        assert tokens_of(run_all(running, requests())) == alone
        metrics = running.metrics()
        assert 0 < sum(metrics.accepted_tokens.values()) < sum(metrics.draft_tokens.values())
