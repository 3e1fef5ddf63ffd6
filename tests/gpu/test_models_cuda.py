"""Models on a CUDA device compute what they compute on the CPU, and speculation leaves greedy texts unchanged."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from cospec.acceptance.device_draft_probs import DeviceProbs
from cospec.assembly.build import assemble
from cospec.assembly.components import TextInfo
from cospec.config import EngineConfig, SpeculativeConfig
from cospec.core.engine import Engine
from cospec.core.interfaces import Model
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.core.plugin_base import Drafter
from cospec.core.types import Commit
from cospec.drafters.model import ModelDrafter
from cospec.models.loading import LoadOptions, load_model
from cospec.sampling_params import SamplingParams
from harness.tiny import VOCAB, tiny, tokens
from harness.toys import make_request, run_all, tokens_of

DEVICE = "cuda"
TREE = (-1, -1, 0, 0, 1, 2)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def saved(folder: Path, name: str, seed: int = 1) -> str:
    tiny(name, seed).save_pretrained(folder)
    return str(folder)


def load(folder: str, device: str) -> Model:
    return load_model(folder, LoadOptions(device=device, dtype="float32", cache_bytes=8 << 20))


def play(model: Model) -> list[Tensor]:
    """Prompts, steps, chains and trees, a commit that moves entries, and steps again."""
    texts = {id: tokens(length, seed) for seed, (id, length) in enumerate({"a": 60, "b": 7, "c": 33}.items())}
    for id, text in texts.items():
        assert model.pages.allocate(id, len(text) + 30)
    at = {id: len(text) for id, text in texts.items()}
    results = [model.forward(TokenBatch(tuple(SequenceSlice(id, 0, text) for id, text in texts.items())))]
    for step in range(4):
        batch = TokenBatch(tuple(SequenceSlice(id, at[id] + step, tokens(1, 20 + step)) for id in texts))
        results.append(model.forward(batch))
    chain = SequenceSlice("a", 64, tokens(4, 30), parents=(-1, 0, 1))
    tree = SequenceSlice("b", 11, tokens(1 + len(TREE), 31), parents=TREE)
    results.append(model.forward(TokenBatch((chain, tree, SequenceSlice("c", 37, tokens(1, 32))))))
    model.commit([Commit("b", 12, (1, 2, 3), path=(1, 4), computed=14, drafted=len(TREE))])
    results.append(
        model.forward(
            TokenBatch((SequenceSlice("b", 14, (3,)), SequenceSlice("a", 65, (4,)), SequenceSlice("c", 38, (5,))))
        )
    )
    model.free(list(texts))
    return [x.cpu() for x in results]


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3", "gpt2"])
def test_float32_forwards_equal_those_on_the_cpu(name: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, name)
    for one, two in zip(play(load(folder, DEVICE)), play(load(folder, "cpu")), strict=True):
        torch.testing.assert_close(one, two, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_speculation_keeps_greedy_texts(name: str, tmp_path: Path) -> None:
    target = load(saved(tmp_path / "target", name), DEVICE)
    drafters = {
        "likely": saved(tmp_path / "target", name),  # most drafts are accepted
        "unlikely": saved(tmp_path / "other", "llama", seed=2),  # hardly any
    }
    plain = outputs(target, None)
    assert {len(text) for text in plain.values()} == {40}
    for folder in drafters.values():
        assert outputs(target, ModelDrafter(load(folder, DEVICE))) == plain


@pytest.mark.parametrize("method", ["rejection", "block"])
def test_distributions_of_drafts_stay_on_the_device(method: str, tmp_path: Path) -> None:
    target, drafter = (load(saved(tmp_path / str(seed), "llama", seed), DEVICE) for seed in (1, 2))
    speculative = SpeculativeConfig(num_speculative_tokens=4, acceptance_method=method)
    parts = assemble(target, ModelDrafter(drafter), speculative, EngineConfig(max_num_seqs=5), TextInfo())
    params = SamplingParams(temperature=1.0, max_tokens=40)
    requests = [make_request(f"r{n}", tokens(3 + 11 * n, n), params) for n in range(6)]
    with patch.object(DeviceProbs, "__array__", side_effect=AssertionError("distributions left the device")):
        engine = Engine(parts)
        assert {len(text) for text in tokens_of(run_all(engine, requests)).values()} == {40}
    assert 0 < sum(engine.metrics().accepted_tokens.values()) < sum(engine.metrics().draft_tokens.values())


def outputs(target: Model, drafter: Drafter | None) -> dict[str, tuple[int, ...]]:
    speculative = SpeculativeConfig(num_speculative_tokens=4)
    engine = Engine(assemble(target, drafter, speculative, EngineConfig(max_num_seqs=5), TextInfo()))
    params = SamplingParams(temperature=0, max_tokens=40)
    return tokens_of(run_all(engine, [make_request(f"r{n}", tokens(3 + 11 * n, n), params) for n in range(6)]))


def test_the_vocabulary_is_that_of_the_model(tmp_path: Path) -> None:
    model = load(saved(tmp_path, "llama"), DEVICE)
    assert model.vocab_size == VOCAB and play(model)[0].shape == (100, VOCAB)
