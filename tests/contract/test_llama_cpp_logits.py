"""Logits of GGUF files are those that llama.cpp computed, of every architecture and of types that cospec writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.models.loading import LoadOptions, load_model
from cospec.native import operators
from harness.llama_cpp_logits import ARCHITECTURES, DISTANCES, NAMES, ZOO_KINDS, distance, some_rows, stored, write_file


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield


def logits(name: str, folder: Path) -> torch.Tensor:
    """The rows that are stored, as cospec computes them."""
    path, ids = write_file(name, folder)
    model = load_model(str(path), LoadOptions(max_model_len=128 if name in ARCHITECTURES else None))
    assert model.pages.allocate("a", len(ids))
    return some_rows(name, model.forward(TokenBatch((SequenceSlice("a", 0, ids),))))


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_llama_cpp(tmp_path: Path, name: str) -> None:
    if name in ("q8_0", "q4_0") and not operators.available():
        pytest.skip(operators.why_not())
    assert distance(logits(name, tmp_path), stored(name)) < DISTANCES["F16" if name in ARCHITECTURES else name.upper()]


@pytest.mark.parametrize("name", ZOO_KINDS)
def test_other_weights_are_noticed(tmp_path: Path, name: str) -> None:
    """Negative control: the distance between two types is larger than the distance between two programs."""
    others = [each for each in ZOO_KINDS if each != name]
    assert all(distance(stored(each), stored(name)) > DISTANCES[name.upper()] for each in others)
