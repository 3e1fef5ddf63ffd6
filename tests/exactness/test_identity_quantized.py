"""Targets in integer blocks: drafts change no token, nor do the batch, the threads and the instruction set."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from cospec.core.interfaces import Model
from cospec.drafters.model import ModelDrafter
from cospec.models.loading import LoadOptions, load_model
from cospec.native import library
from harness.gguf_files import write_model
from harness.llamas import BYTES_PER_TOKEN, PAGE, alone, llama_engine, mixed_requests, plain_model, write_pair
from harness.quantized_checkpoints import CONFIGS, write_quantized
from harness.toys import run_all, tokens_of

pytestmark = [
    pytest.mark.skipif(not library.available(), reason=library.why_not() or "native kernels"),
    pytest.mark.usefixtures("restored_kernels"),
]
DRAFTERS = {"q8_0": "q4_0", "q4_0": "q8_0", "q4_k": "q6_k", "q6_k": None}
"""Formats of a target and of its drafter; None is float32."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target, drafter = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter")
    write_pair(target, drafter)
    return target


def load(folder: Path, quantization: str | None) -> Model:
    cache = 200 * PAGE * BYTES_PER_TOKEN
    options = LoadOptions(device="cpu", dtype="float32", page_size=PAGE, cache_bytes=cache, quantization=quantization)
    return load_model(str(folder), options)


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_of_another_format_change_no_token(folder: Path, name: str) -> None:
    check_identity(folder, name, folder, DRAFTERS[name])


@pytest.mark.parametrize("kind", CONFIGS)
def test_drafts_change_no_token_of_a_quantized_checkpoint(tmp_path: Path, kind: str) -> None:
    plain, drafter, quantized = (tmp_path / name for name in ("plain", "drafter", "quantized"))
    write_pair(plain, drafter, layers=2, hidden=64, intermediate=64)
    quantized.mkdir()
    write_quantized(plain, quantized, kind)
    check_identity(quantized, None, drafter, None)


def test_drafts_change_no_token_of_a_file_whose_blocks_are_converted(tmp_path: Path) -> None:
    plain, drafter = tmp_path / "plain", tmp_path / "drafter"
    write_pair(plain, drafter, layers=2, hidden=256, intermediate=256)
    target = write_model(tmp_path / "target.gguf", plain_model(plain), "Q3_K", kinds={"ffn_down": "IQ4_XS"})
    check_identity(target, None, drafter, None)


def check_identity(target: Path, quantization: str | None, drafts: Path, drafter_quantization: str | None) -> None:
    """Outputs with drafts, on every instruction set, natively and in Python, are those without."""
    plain = alone(load(target, quantization))
    ways = itertools.cycle(((2, 4, "auto"), (1, 7, "auto"), (2, 4, "off")))
    for isa, (threads, k, native) in zip(library.offered(), ways, strict=False):
        library.set_isa(isa)
        library.set_threads(threads)
        drafter = ModelDrafter(load(drafts, drafter_quantization), native=native == "auto")
        running = llama_engine(load(target, quantization), drafter, k, max_num_seqs=4, native=native)
        assert tokens_of(run_all(running, mixed_requests())) == plain, (isa, threads, k, native)
        metrics = running.metrics()
        assert 0 < sum(metrics.accepted_tokens.values()) < sum(metrics.draft_tokens.values())


def test_another_format_is_another_model(folder: Path) -> None:
    """Negative control: the outputs depend on the rounding of the weights."""
    assert alone(load(folder, "q4_0")) != alone(load(folder, "q8_0"))
