"""A second opinion on GGUF files: llama.cpp's logits, perplexity and tokens, on files that llama.cpp quantized."""

from __future__ import annotations

import ctypes
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cospec.bench.llama_cpp_system import LlamaCppSystem, load
from cospec.bench.request_record import Params, Prompt
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.models.files.gguf_writer import write_gguf
from cospec.models.files.weight_source_selection import open_source
from cospec.models.loading import LoadOptions, load_model, load_tokenizer
from cospec.models.model_folder import resolve
from cospec.models.perplexity import perplexity
from cospec.native import operators
from harness.gguf_files import write_model
from harness.gguf_models import MODELS, PROMPT, random_model

llama_cpp = pytest.importorskip("llama_cpp", reason="the package llama-cpp-python is not installed")
TEXT = (
    "It was a bright cold day in April, and the clocks were striking thirteen. He looked at the old house on the hill, "
    "and he did not know what to say to his sister, who had come to the door with a candle in her hand.\n"
    "def add(first, second):\n    return first + second\n"
    "Question: Tom has 12 apples and gives 5 to Ann. How many are left?\nAnswer: 12 - 5 = <<12-5=7>>7\n#### 7\n"
)
LONG = inspect.getsource(textwrap)
# Inputs are rounded after sums in another order, so log-probabilities differ in either direction: by 0.04 to 0.08 per
# token (one standard deviation), and the perplexity of 1,000 tokens by 0.1% to 0.25%.
PERPLEXITY_TOKENS, PERPLEXITY_BOUND = 1000, 0.005
# Root mean square of the distance of logits, in standard deviations. llama.cpp rounds keys and values to float16, and
# the inputs of K types in longer blocks. Q4_K_M has tensors of Q4_K and of Q6_K.
DISTANCES = {"F16": 0.004, "Q8_0": 0.02, "Q4_0": 0.02, "Q4_K_M": 0.05}


@pytest.fixture(autouse=True)
def folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The zoo's target in float16, written by cospec."""
    path = tmp_path_factory.mktemp("gguf") / "zoo-F16.gguf"
    folder = resolve("zoo")
    write_gguf(path, folder, open_source(folder), "f16")
    return path


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The root mean square of the difference, in standard deviations of the logits."""
    return float((found - wanted).square().mean().sqrt() / wanted.std())


def quantized(whole: Path, kind: str) -> Path:
    """The file in another type, by llama.cpp's own quantizer."""
    if kind == "F16":
        return whole
    path = whole.with_name(f"zoo-{kind}.gguf")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.nthread = 1
    assert llama_cpp.llama_model_quantize(str(whole).encode(), str(path).encode(), ctypes.byref(params)) == 0
    return path


@pytest.mark.parametrize("kind", DISTANCES)
def test_logits_and_perplexity(whole: Path, kind: str) -> None:
    if not operators.available():
        pytest.skip(operators.why_not())
    path = quantized(whole, kind)
    ids = tuple(load_tokenizer(resolve(str(path))).encode(TEXT))
    theirs = load(path, n_ctx=1024, n_threads=1, logits_all=True)
    assert tuple(theirs.tokenize(TEXT.encode(), add_bos=False, special=True)) == ids
    theirs.eval(ids)
    wanted = torch.from_numpy(theirs.scores[: len(ids)].copy())
    model = load_model(str(path))
    assert model.pages.allocate("a", len(ids))
    found = model.forward(TokenBatch((SequenceSlice("a", 0, ids),)))
    assert distance(found, wanted) < DISTANCES[kind]
    theirs.reset()
    ids = tuple(load_tokenizer(resolve(str(path))).encode(LONG))[:PERPLEXITY_TOKENS]
    theirs.eval(ids)
    wanted = torch.from_numpy(theirs.scores[: len(ids)].copy())
    own = torch.nn.functional.cross_entropy(wanted[:-1].double(), torch.tensor(ids[1:])).exp()
    assert len(ids) == PERPLEXITY_TOKENS
    assert perplexity(model, ids, window=len(ids)) == pytest.approx(float(own), rel=PERPLEXITY_BOUND)


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_every_architecture(tmp_path: Path, name: str) -> None:
    """Random weights in float32; llama.cpp takes the long factors of a long-rope model, so cospec does too."""
    config, values = MODELS[name]
    path = write_model(tmp_path / "model.gguf", random_model(config), **values)
    theirs = load(path, n_ctx=128, n_threads=1, logits_all=True)
    theirs.eval(PROMPT)
    wanted = torch.from_numpy(theirs.scores[: len(PROMPT)].copy())
    model = load_model(str(path), LoadOptions(max_model_len=128))
    assert model.pages.allocate("a", len(PROMPT))
    found = model.forward(TokenBatch((SequenceSlice("a", 0, PROMPT),)))
    assert distance(found, wanted) < DISTANCES["F16"]


def test_other_weights_are_noticed(whole: Path) -> None:
    """Negative control: the distance between two types is larger than the distance between two programs."""
    ids = tuple(load_tokenizer(resolve(str(whole))).encode(TEXT))
    theirs = load(quantized(whole, "Q4_0"), n_ctx=512, n_threads=1, logits_all=True)
    theirs.eval(ids)
    wanted = torch.from_numpy(theirs.scores[: len(ids)].copy())
    model = load_model(str(whole))
    assert model.pages.allocate("a", len(ids))
    found = model.forward(TokenBatch((SequenceSlice("a", 0, ids),)))
    assert distance(found, wanted) > 2 * DISTANCES["Q4_0"]


def test_system_of_a_comparison(whole: Path) -> None:
    system = LlamaCppSystem.build("llama.cpp", {"model": str(whole), "n_ctx": 256, "n_threads": 1})
    system.start()
    (timing,) = system.run([Prompt("a", "It was a dark")], Params(max_tokens=8))
    system.stop()
    assert timing.reported_tokens == 8 and timing.prompt_tokens > 0
    assert "".join(chunk.text for chunk in timing.chunks)
