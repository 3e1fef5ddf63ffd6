"""Mixtures of experts in the native forward: their files, their bits, and which experts are read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
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
from cospec.models.files.source import block_format
from cospec.models.files.weight_source_selection import open_source
from cospec.models.loading import LoadOptions, load_model, resolve
from cospec.native import library
from cospec.sampling_params import SamplingParams
from cospec.text.input_processor import make_requests
from harness.gguf_files import write_model
from harness.llamas import llama_engine
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


@pytest.mark.parametrize(("kind", "quantization"), [("Q4_0", None), ("Q8_0", None), ("F32", "q4_k"), ("F32", None)])
def test_blocks_give_the_logits_of_their_values(
    files: Path, monkeypatch: pytest.MonkeyPatch, kind: str, quantization: str | None
) -> None:
    """Readable reference: transformers' experts on the exact values of the blocks, with rounded inputs."""
    path = files / f"{kind}.gguf"
    name = quantization or (kind.lower() if kind != "F32" else "q8_0")
    format, rounds = block_format(name), kind != "F32" or quantization is not None

    def value(weight: Tensor) -> Tensor:
        return format.decode(format.encode(weight), torch.float32) if quantization else weight

    def rounded(x: Tensor) -> Tensor:
        return format.round_inputs(x) if rounds else x

    def experts(self: Any, states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(states)
        for row, (numbers, shares) in enumerate(zip(chosen.tolist(), weights, strict=True)):
            for number, share in zip(numbers, shares, strict=True):
                gate, up = F.linear(rounded(states[row]), value(self.gate_up_proj[number])).chunk(2)
                total[row] += share * F.linear(rounded(F.silu(gate) * up), value(self.down_proj[number]))
        return total

    monkeypatch.setattr(Qwen3MoeExperts, "forward", experts)
    readable = {"fused": "never", "linear_backend": "torch", "attention_backend": "sdpa"}
    wanted = forward(load(path, quantization=quantization, **readable), PROMPTS[2:3])[0]
    native = load(path, quantization=quantization)
    assert native.native_forward is not None
    found = forward(native, PROMPTS[2:3])[0]
    # A sum that differs in its last bit may round an input of the next product to the other side.
    assert float((found - wanted).abs().mean()) < (1e-3 if rounds else 1e-5)
    other = forward(load(path, quantization="iq4_nl"), PROMPTS[2:3])[0]
    assert float((other - wanted).abs().mean()) > 1e-2  # another format, other numbers


def test_experts_stay_in_blocks(files: Path) -> None:
    source = open_source(resolve(str(files / "Q4_0.gguf")))
    assert {source.kinds[name] for name in source.experts} == {"q4_0"} and len(source.experts) == 4
    name = "model.layers.1.mlp.experts.gate_up_proj"
    stored = source.linear(name, block_format("q8_0"))
    assert (stored.format.name, stored.outputs, stored.inputs) == ("q4_0", EXPERTS * 512, 256)
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


def test_quantized_safetensors_with_experts_one_by_one(tmp_path: Path) -> None:
    """Integers with a scale per output, as compressed-tensors stores them: the values of all experts count."""
    model = random_model()
    model.save_pretrained(tmp_path)
    file, stored = tmp_path / "model.safetensors", {}
    for name, weight in load_file(file).items():
        stored[name] = weight
        if ".experts." in name:
            scale = (weight.abs().amax(1, keepdim=True) / 127).half()
            stored[name] = (weight / scale.float()).round().to(torch.int8)
            stored[name.replace(".weight", ".weight_scale")] = scale
            _, _, layer, _, _, expert, part, _ = name.split(".")
            experts = model.model.layers[int(layer)].mlp.experts
            rows = {"gate_proj": slice(0, 256), "up_proj": slice(256, 512)}.get(part, slice(None))
            both = experts.down_proj if part == "down_proj" else experts.gate_up_proj
            both.data[int(expert), rows] = stored[name].float() * scale.float()
    save_file(stored, file, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int"}}
    quantization = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"g": group}}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    wanted = model(torch.tensor([PROMPTS[2]]), use_cache=False).logits[0]
    torch.testing.assert_close(forward(load(tmp_path), PROMPTS[2:3])[0], wanted, atol=2e-4, rtol=0)


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
