"""KV caches of every dtype: drafts change no token, nor do the batch, the threads, the instruction set and the cache's
size."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from cospec.core.interfaces import Model
from cospec.drafters.model import ModelDrafter
from cospec.models.loading import LoadOptions, load_model
from cospec.native import library
from harness.llamas import BYTES_PER_TOKEN, PAGE, alone, llama_engine, mixed_requests
from harness.toys import run_all, tokens_of

pytestmark = [
    pytest.mark.skipif(not library.available(), reason=library.why_not() or "native kernels"),
    pytest.mark.usefixtures("restored_kernels"),
]
DTYPES = {"float32": "int8", "bfloat16": "float16", "float16": "bfloat16", "int8": "float32"}
"""Dtypes of the caches of a target and of its drafter."""
CHAIN: dict[str, Any] = {}
TREE: dict[str, Any] = {"max_nodes": 9}
ROOMY, TIGHT = (2, 4, 200), (1, 3, 40)  # threads, tokens of a draft, pages
RUNS = [
    *itertools.product(("auto",), (CHAIN, TREE), (ROOMY, TIGHT)),
    ("off", CHAIN, TIGHT),
    ("off", TREE, ROOMY),
]


def load(folder: Path, dtype: str, pages: int = 200) -> Model:
    cache = pages * PAGE * BYTES_PER_TOKEN
    options = LoadOptions(device="cpu", dtype="float32", page_size=PAGE, cache_bytes=cache, kv_cache_dtype=dtype)
    return load_model(str(folder), options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_drafts_change_no_token(folders: tuple[Path, Path], dtype: str) -> None:
    target, drafter = folders
    plain = alone(load(target, dtype))
    isas = itertools.cycle(library.offered())
    for native, shape, (threads, k, pages) in RUNS:
        library.set_isa(next(isas))
        library.set_threads(threads)
        drafting = ModelDrafter(load(drafter, DTYPES[dtype], pages), native=native == "auto")
        running = llama_engine(load(target, dtype, pages), drafting, k, max_num_seqs=6, native=native, **shape)
        assert tokens_of(run_all(running, mixed_requests())) == plain, (native, shape, threads, k)
        metrics = running.metrics()
        assert 0 < sum(metrics.accepted_tokens.values()) < sum(metrics.draft_tokens.values())


def test_another_dtype_is_another_model(folders: tuple[Path, Path]) -> None:
    """Negative control: the outputs depend on the rounding of the cache."""
    assert alone(load(folders[0], "int8")) != alone(load(folders[0], "float32"))
