"""Targets in integer blocks: drafts change no token, nor do the batch, the threads and the instruction set."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from cospec.core.interfaces import Model
from cospec.core.types import Request
from cospec.drafters.model import ModelDrafter
from cospec.models.loading import LoadOptions, load_model
from cospec.native import library
from cospec.sampling_params import SamplingParams
from cospec.text.input_processor import make_requests
from harness.llamas import BYTES_PER_TOKEN, PAGE, VOCAB, llama_engine, write_pair
from harness.toys import run_all, tokens_of

pytestmark = pytest.mark.skipif(not library.available(), reason=library.why_not() or "native kernels")
GREEDY = SamplingParams(temperature=0, max_tokens=16)
SEEDED = SamplingParams(temperature=0.8, max_tokens=16, seed=3, n=2)
DRAFTERS = {"q8_0": "q4_0", "q4_0": "q8_0", "q4_k": "q6_k", "q6_k": None}
"""Formats of a target and of its drafter; None is float32."""


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    isa, threads = library.isa(), library.threads()
    yield
    library.set_isa(isa)
    library.set_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target, drafter = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter")
    write_pair(target, drafter)
    return target


def load(folder: Path, quantization: str | None) -> Model:
    cache = 200 * PAGE * BYTES_PER_TOKEN
    options = LoadOptions(device="cpu", dtype="float32", page_size=PAGE, cache_bytes=cache, quantization=quantization)
    return load_model(str(folder), options)


def requests(count: int = 5) -> list[Request]:
    prompts = [[(7 * n + i * i * 3) % VOCAB if i > 6 else i for i in range(3 + 4 * n)] for n in range(count)]
    return [
        each
        for name, params in (("g", GREEDY), ("s", SEEDED))
        for n, prompt in enumerate(prompts)
        for each in make_requests(f"{name}{n}", prompt, params)
    ]


def alone(target: Model) -> dict[str, tuple[int, ...]]:
    """The outputs of each request by a step per token."""
    found: dict[str, tuple[int, ...]] = {}
    for request in requests():
        found |= tokens_of(run_all(llama_engine(target, None), [request]))
    return found


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_of_another_format_change_no_token(folder: Path, name: str) -> None:
    plain = alone(load(folder, name))
    ways = itertools.cycle(((2, 4, "auto"), (1, 7, "auto"), (2, 4, "off")))
    for isa, (threads, k, native) in zip(library.offered(), ways, strict=False):
        library.set_isa(isa)
        library.set_threads(threads)
        drafter = ModelDrafter(load(folder, DRAFTERS[name]), native=native == "auto")
        running = llama_engine(load(folder, name), drafter, k, max_num_seqs=4, native=native)
        assert tokens_of(run_all(running, requests())) == plain, (isa, threads, k, native)
        metrics = running.metrics()
        assert 0 < sum(metrics.accepted_tokens.values()) < sum(metrics.draft_tokens.values())


def test_another_format_is_another_model(folder: Path) -> None:
    """Negative control: the outputs depend on the rounding of the weights."""
    assert alone(load(folder, "q4_0")) != alone(load(folder, "q8_0"))
