"""The forwards of cospec and llama.cpp on the same GGUF file: milliseconds of 1, 4 and 8 rows, and of a prompt.

Run ``python -m benchmarks.gguf_speed [--models Llama-3.2-1B] [--types q4_0 q8_0]``; needs ``llama-cpp-python``. The
files have the shapes of known models and random weights, and are written once to ``--folder``. The systems take turns
in one process, in random order, with the same number of threads. Both compute the logits of all rows, and of a prompt
the logits of the last token. A figure is the median over turns; the ratio is taken within a turn.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from rich.console import Console
from rich.table import Table
from transformers.convert_slow_tokenizer import bytes_to_unicode

from benchmarks.common import write
from cospec.bench.roofline import bandwidth
from cospec.bench.statistics import paired_ratio
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.models.loading import LoadOptions, load_model
from cospec.native import operators

ROWS = (1, 4, 8)
CONTEXT, PROMPT = 256, 256  # tokens
PAUSE = 0.05  # seconds; waiting threads of the other system stop spinning


@dataclass(frozen=True, slots=True)
class Model:
    """A shape; the output layer is the embedding."""

    name: str
    architecture: str
    hidden: int
    layers: int
    inner: int
    heads: int
    kv_heads: int
    vocabulary: int

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors of the file."""
        dim = self.hidden // self.heads
        found: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (self.vocabulary, self.hidden),
            "output_norm.weight": (self.hidden,),
        }
        for layer in range(self.layers):
            block = f"blk.{layer}."
            sizes = {"attn_q": self.hidden, "attn_k": self.kv_heads * dim, "attn_v": self.kv_heads * dim}
            found |= {f"{block}{name}.weight": (size, self.hidden) for name, size in sizes.items()}
            if self.architecture == "qwen2":
                found |= {f"{block}{name}.bias": (size,) for name, size in sizes.items()}
            found |= {f"{block}{name}.weight": (self.hidden,) for name in ("attn_norm", "ffn_norm")}
            found[f"{block}attn_output.weight"] = (self.hidden, self.hidden)
            found |= {f"{block}{name}.weight": (self.inner, self.hidden) for name in ("ffn_gate", "ffn_up")}
            found[f"{block}ffn_down.weight"] = (self.hidden, self.inner)
        return found


MODELS = {
    model.name: model
    for model in (
        Model("Qwen2.5-0.5B", "qwen2", 896, 24, 4864, 14, 2, 151936),
        Model("Llama-3.2-1B", "llama", 2048, 16, 8192, 32, 8, 128256),
    )
}
SCALES = {"q4_0": (0, 0.004), "q8_0": (0, 0.0003), "q6_k": (208, 1e-5)}
"""Byte of a block where its float16 scale stands, and the scale."""


def random_blocks(kind: str, shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray[Any, Any]:
    """Return rows of random blocks, all with the same scale."""
    size, count = GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]
    at, scale = SCALES[kind]
    blocks = np.frombuffer(generator.bytes(shape[0] * shape[1] // size * count), np.uint8).reshape(-1, count).copy()
    blocks[:, at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(shape[0], -1)


def write_file(path: Path, model: Model, kind: str) -> None:
    """Write a GGUF file with a made-up vocabulary; the embedding is Q8_0."""
    generator, writer = np.random.default_rng(0), GGUFWriter(path, model.architecture)
    writer.add_context_length(4096)
    writer.add_embedding_length(model.hidden)
    writer.add_block_count(model.layers)
    writer.add_feed_forward_length(model.inner)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_rope_freq_base(5e5)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(model.vocabulary)
    tokens = [*bytes_to_unicode().values(), "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, *(f"t{number}" for number in range(len(tokens), model.vocabulary))])
    writer.add_token_types([1] * model.vocabulary)
    writer.add_token_merges(["a b"])
    for name, shape in model.tensors.items():
        if len(shape) == 1:
            writer.add_tensor(name, np.full(shape, 0.0 if name.endswith("bias") else 1.0, np.float32))
        else:
            own = "q8_0" if name == "token_embd.weight" else kind
            blocks = random_blocks(own, shape, generator)
            writer.add_tensor(name, blocks, raw_dtype=GGMLQuantizationType[own.upper()])
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()


class System(Protocol):
    """A loaded model whose cache holds ``CONTEXT`` tokens."""

    def forward(self, start: int, rows: int, all_logits: bool) -> None:
        """Compute ``rows`` tokens from position ``start``, after the tokens before."""


class Cospec:
    """A model that is loaded as in the engine."""

    def __init__(self, file: Path) -> None:
        self._model = load_model(str(file), LoadOptions(cache_bytes=1 << 28))
        self._model.pages.match_prefix("a", ())
        self._model.pages.allocate("a", CONTEXT + PROMPT)

    def forward(self, start: int, rows: int, all_logits: bool) -> None:
        """See ``System``."""
        first = 0 if all_logits else rows - 1
        self._model.forward(TokenBatch((SequenceSlice("a", start, tuple(range(rows)), logits_from=first),)))


class LlamaCpp:
    """llama.cpp with ``threads`` threads."""

    def __init__(self, file: Path, threads: int) -> None:
        import llama_cpp

        self._library = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, None)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = 2 * (CONTEXT + PROMPT), 512, 512
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._batch = llama_cpp.llama_batch_init(512, 0, 1)

    def forward(self, start: int, rows: int, all_logits: bool) -> None:
        """See ``System``.

        Raises:
            RuntimeError: llama.cpp refused the batch.
        """
        library, batch = self._library, self._batch
        library.llama_memory_seq_rm(library.llama_get_memory(self._context), 0, start, -1)
        batch.n_tokens = rows
        for row in range(rows):
            batch.token[row], batch.pos[row], batch.n_seq_id[row], batch.seq_id[row][0] = row, start + row, 1, 0
            batch.logits[row] = all_logits or row == rows - 1
        if library.llama_decode(self._context, batch):
            raise RuntimeError("llama.cpp could not decode a batch")
        library.llama_synchronize(self._context)

    def close(self) -> None:
        """Free model and cache."""
        self._library.llama_batch_free(self._batch)
        self._library.llama_free(self._context)
        self._library.llama_model_free(self._model)


def milliseconds(call: Callable[[], None]) -> float:
    """Return the time of a call."""
    begin = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begin)


def sample(system: System, repeats: int) -> dict[str, float]:
    """Return the median milliseconds of each number of rows, and of a prompt."""
    time.sleep(PAUSE)
    taken: dict[str, float] = {}
    for rows in ROWS:
        system.forward(CONTEXT, rows, True)
        taken[str(rows)] = statistics.median(
            milliseconds(lambda rows=rows: system.forward(CONTEXT, rows, True)) for _ in range(repeats)
        )
    taken["prompt"] = milliseconds(lambda: system.forward(0, PROMPT, False))
    return taken


def measure(file: Path, turns: int, repeats: int) -> list[dict[str, Any]]:
    """Return a row per number of rows; the ratio is cospec's time / llama.cpp's."""
    theirs = LlamaCpp(file, operators.threads())
    systems: dict[str, System] = {"cospec": Cospec(file), "llama_cpp": theirs}
    for system in systems.values():
        system.forward(0, CONTEXT, False)
        sample(system, 1)
    shuffler, found = random.Random(0), list[dict[str, dict[str, float]]]()
    for _ in range(turns):
        found.append({name: sample(systems[name], repeats) for name in shuffler.sample(list(systems), 2)})
    theirs.close()
    result = []
    for rows in found[0]["cospec"]:
        times = {name: [turn[name][rows] for turn in found] for name in systems}
        ratio = paired_ratio(times["cospec"], times["llama_cpp"]).as_json()
        result.append({"rows": rows, **{f"{name}_ms": statistics.median(own) for name, own in times.items()}, **ratio})
    return result


def main() -> None:
    """Write the files, measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/gguf-speed"), help="of the files")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--types", nargs="+", choices=SCALES, default=["q4_0", "q8_0"])
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=5, help="forwards of a number of rows in a turn")
    parser.add_argument("--isa", help="an instruction set of cospec below the best one")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(operators.threads())
    if options.isa:
        operators.set_isa(options.isa)
    table = Table("model", "type", "rows", "floor, ms", "cospec, ms", "llama.cpp, ms", "ratio (95% interval)", box=None)
    found, speed = [], bandwidth()
    for name in options.models:
        for kind in options.types:
            file = options.folder / f"{name}-{kind}.gguf"
            if not file.exists():
                partial = file.with_suffix(f".{os.getpid()}")
                write_file(partial, MODELS[name], kind)
                partial.rename(file)
            floor = file.stat().st_size / speed / 1e6
            for row in measure(file, options.turns, options.repeats):
                found.append({"model": name, "type": kind, "floor_ms": floor, **row})
                ratio = f"{row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})"
                times = [f"{row[f'{system}_ms']:.1f}" for system in ("cospec", "llama_cpp")]
                print(name, kind, row["rows"], *times, ratio, flush=True)
                table.add_row(name, kind, row["rows"], f"{floor:.1f}", *times, ratio)
    Console(width=110).print(table)
    settings = {"context": CONTEXT, "prompt": PROMPT, "turns": options.turns, "repeats": options.repeats}
    suffix = f"_{options.isa}" if options.isa else ""
    print("written to", write(f"gguf_speed{suffix}", {"options": settings, "rows": found}))


if __name__ == "__main__":
    main()
