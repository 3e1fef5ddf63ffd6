"""A second opinion on GGUF files: llama.cpp's logits, perplexity and tokens, on files that llama.cpp quantized."""

from __future__ import annotations

import ctypes
import inspect
import textwrap
from collections.abc import Iterator
from copy import copy
from pathlib import Path

import pytest
import torch

from cospec.bench.llama_cpp_system import LlamaCppSystem, load
from cospec.bench.request_record import Params, Prompt
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.models.files.gguf_writer import write_gguf
from cospec.models.files.weight_source_selection import open_source
from cospec.models.loading import load_model, load_tokenizer
from cospec.models.model_folder import resolve
from cospec.models.perplexity import perplexity
from cospec.native import operators
from harness.gguf_models import MODELS, PROMPT, random_model
from harness.llama_cpp_logits import DISTANCES, NAMES, TEXT, compute, distance, some_rows, stored, write_file
from harness.small_tokenizers import in_folder, sentencepiece

llama_cpp = pytest.importorskip("llama_cpp", reason="the package llama-cpp-python is not installed")
LONG = inspect.getsource(textwrap)
# Inputs are rounded after sums in another order, so log-probabilities differ in either direction: by 0.04 to 0.08 per
# token (one standard deviation), and the perplexity of 1,000 tokens by 0.1% to 0.25%.
PERPLEXITY_TOKENS, PERPLEXITY_BOUND = 1000, 0.005


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


@pytest.mark.parametrize("name", NAMES)
def test_the_stored_logits_are_those_of_llama_cpp(tmp_path: Path, name: str) -> None:
    wanted = some_rows(name, compute(*write_file(name, tmp_path)))
    torch.testing.assert_close(stored(name), wanted, atol=0.01, rtol=1e-3)  # the store rounds to float16


@pytest.mark.parametrize("name", MODELS)
def test_files_that_cospec_wrote_give_the_stored_logits(tmp_path: Path, name: str) -> None:
    random_model(MODELS[name][0]).save_pretrained(tmp_path / name)
    write_gguf(tmp_path / "a.gguf", tmp_path / name, open_source(tmp_path / name), "f32")
    torch.testing.assert_close(stored(name), compute(tmp_path / "a.gguf", PROMPT), atol=0.01, rtol=1e-3)


@pytest.mark.parametrize("name", ["gemma3", "phi3"])
def test_a_sentencepiece_model_that_cospec_wrote(tmp_path: Path, name: str) -> None:
    """Both programs cut texts alike, and compute alike; the zoo's tokenizer is over bytes."""
    tokenizer, tokens, _ = sentencepiece(prefix=name == "phi3")
    config = copy(MODELS[name][0])
    config.vocab_size = len(tokens)
    folder = in_folder(tmp_path / name, tokenizer, {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"})
    random_model(config).save_pretrained(folder)
    path = tmp_path / "model.gguf"
    write_gguf(path, folder, open_source(folder), "f32")
    theirs = load(path, n_ctx=128, n_threads=1, logits_all=True)
    for text in (TEXT, LONG, "  naïve\n\n\tcafé 日本 🙂", "</s>a<unk>"):
        ids = tuple(load_tokenizer(folder).encode(text, add_special_tokens=False))
        assert tuple(theirs.tokenize(text.encode(), add_bos=False, special=True)) == ids
        assert tuple(load_tokenizer(resolve(str(path))).encode(text, add_special_tokens=False)) == ids
    ids = ids[:32]
    theirs.eval(ids)
    model = load_model(str(path))
    assert model.pages.allocate("a", len(ids))
    wanted = torch.from_numpy(theirs.scores[: len(ids)].copy())
    assert distance(model.forward(TokenBatch((SequenceSlice("a", 0, ids),))), wanted) < DISTANCES["F16"]


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
