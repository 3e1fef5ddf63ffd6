"""What llama.cpp computes on small files, stored in the repository, so that tests compare without llama.cpp.

``PYTHONPATH=.:tests python -m harness.llama_cpp_logits`` writes the store again; llama-cpp-python must be installed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cospec.bench.llama_cpp_system import load
from cospec.models.files.gguf_writer import write_gguf
from cospec.models.files.weight_source_selection import open_source
from cospec.models.loading import load_tokenizer
from cospec.models.model_folder import resolve
from harness.gguf_files import write_model
from harness.gguf_models import MODELS, PROMPT, random_model

STORE = Path(__file__).with_name("llama_cpp_logits.npz")
TEXT = (
    "It was a bright cold day in April, and the clocks were striking thirteen. He looked at the old house on the hill, "
    "and he did not know what to say to his sister, who had come to the door with a candle in her hand.\n"
    "def add(first, second):\n    return first + second\n"
    "Question: Tom has 12 apples and gives 5 to Ann. How many are left?\nAnswer: 12 - 5 = <<12-5=7>>7\n#### 7\n"
)
ZOO_KINDS = ("f16", "q8_0", "q4_0")
EACH = 8  # the store has every eighth row of the text
ARCHITECTURES = tuple(MODELS)
NAMES = (*ARCHITECTURES, *ZOO_KINDS)
# Root mean square of the distance of logits, in standard deviations. llama.cpp rounds keys and values to float16, and
# the inputs of K types in longer blocks. Q4_K_M has tensors of Q4_K and of Q6_K.
DISTANCES = {"F16": 0.004, "Q8_0": 0.02, "Q4_0": 0.02, "Q4_K_M": 0.05}


def distance(found: Tensor, wanted: Tensor) -> float:
    """The root mean square of the difference, in standard deviations of the logits."""
    return float((found - wanted).square().mean().sqrt() / wanted.std())


def write_file(name: str, folder: Path) -> tuple[Path, tuple[int, ...]]:
    """Write the file of an architecture with random weights, or of the zoo's target in a type; return token ids too."""
    path = folder / f"{name}.gguf"
    if name in MODELS:
        config, values = MODELS[name]
        return write_model(path, random_model(config), **values), PROMPT
    zoo = resolve("zoo")
    write_gguf(path, zoo, open_source(zoo), name)
    return path, tuple(load_tokenizer(resolve(str(path))).encode(TEXT))


def compute(path: Path, ids: tuple[int, ...]) -> Tensor:
    """The logits ``[len(ids), vocabulary]`` of llama.cpp, which takes the long factors of a long-rope model."""
    theirs = load(path, n_ctx=max(128, len(ids)), n_threads=1, logits_all=True)
    theirs.eval(ids)
    return torch.from_numpy(theirs.scores[: len(ids)].copy())


def stored(name: str) -> Tensor:
    """The stored logits, rounded to float16 for the store."""
    with np.load(STORE) as store:
        return torch.from_numpy(store[name].astype(np.float32))


def some_rows(name: str, logits: Tensor) -> Tensor:
    """The rows of ``logits`` that are stored."""
    return logits if name in MODELS else logits[::EACH]


def _all(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for name in NAMES:
        yield name, some_rows(name, compute(*write_file(name, folder)))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        store: dict[str, Any] = {name: logits.numpy().astype(np.float16) for name, logits in _all(Path(folder))}
        np.savez_compressed(STORE, **store)
