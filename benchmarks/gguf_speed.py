"""The forwards of cospec and llama.cpp on the same GGUF file: milliseconds of 1, 4 and 8 rows, and of prompts.

Run ``python -m benchmarks.gguf_speed [--models Llama-3.2-1B] [--types q4_0 q4_k_m q8_0]``; needs ``llama-cpp-python``.
``--context 8192 --prompts`` measures rows after a long context.
The files have the shapes of known models and random weights, and are written once to ``--folder``. The systems take
turns in one process, in random order, with the same number of threads. Both compute the logits of all rows, and of a
prompt the logits of the last token. A figure is the median over turns; the ratio is taken within a turn. The first
turns do not count: on a virtual machine, fresh memory may be four times as slow for some seconds. Each model and
instruction set has a result file. A llama.cpp without AVX-512 comes from ``CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON
-DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON" pip install --no-binary llama-cpp-python llama-cpp-python``.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.common import write
from benchmarks.gguf_files import FILE_TYPES, MODELS, SUPER_BLOCK, TYPES, Model, write_file
from cospec.bench.paired_ratios import paired_ratio
from cospec.bench.roofline import bandwidth
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.models.loading import LoadOptions, load_model
from cospec.native import operators

ROWS = (1, 4, 8)
CONTEXT = 256  # tokens before the rows
WARM_TURNS = 4  # of each system, before the turns that count
PAUSE = 0.05  # seconds; waiting threads of the other system stop spinning


@dataclass(frozen=True, slots=True)
class Work:
    """What a turn computes: rows after ``context`` tokens, each ``repeats`` times, and prompts once."""

    context: int
    prompts: tuple[int, ...]
    repeats: int

    @property
    def most_tokens(self) -> int:
        """Tokens that a cache must hold."""
        return max([self.context + CONTEXT, *(2 * length for length in self.prompts)])


class System(Protocol):
    """A loaded model whose cache holds the tokens of the context."""

    def forward(self, start: int, rows: int, all_logits: bool) -> None:
        """Compute ``rows`` tokens from position ``start``, after the tokens before."""


class Cospec:
    """A model that is loaded as in the engine."""

    def __init__(self, file: Path, tokens: int, kv_cache_dtype: str) -> None:
        self._model = load_model(str(file), LoadOptions(cache_bytes=1 << 31, kv_cache_dtype=kv_cache_dtype))
        self._model.pages.open_sequence("a", ())
        if not self._model.pages.allocate("a", tokens):
            raise RuntimeError(f"the cache has no room for {tokens} tokens")

    def forward(self, start: int, rows: int, all_logits: bool) -> None:
        """See ``System``."""
        first = 0 if all_logits else rows - 1
        self._model.forward(TokenBatch((SequenceSlice("a", start, tuple(range(rows)), logits_from=first),)))


class LlamaCpp:
    """llama.cpp with ``threads`` threads and a cache of ``tokens`` tokens."""

    def __init__(self, file: Path, threads: int, tokens: int) -> None:
        import llama_cpp

        self._library = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, None)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch = tokens, tokens
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._batch = llama_cpp.llama_batch_init(tokens, 0, 1)

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


def instructions() -> str:
    """Return the instructions that llama.cpp is built for."""
    import llama_cpp

    return " ".join(re.findall(r"(\w+) = 1", llama_cpp.llama_print_system_info().decode()))


def milliseconds(call: Callable[[], None]) -> float:
    """Return the time of a call."""
    begin = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begin)


def sample(system: System, work: Work) -> dict[str, float]:
    """Return the median milliseconds of each number of rows, and those of each prompt."""
    time.sleep(PAUSE)
    taken: dict[str, float] = {}
    for rows in ROWS:
        system.forward(work.context, rows, True)
        call = partial(system.forward, work.context, rows, True)
        taken[str(rows)] = statistics.median(milliseconds(call) for _ in range(work.repeats))
    for length in work.prompts:
        taken[f"prompt of {length}"] = milliseconds(partial(system.forward, 0, length, False))
    if work.prompts:
        system.forward(0, work.context, False)
    return taken


def measure(file: Path, turns: int, work: Work, kv_cache_dtype: str) -> list[dict[str, Any]]:
    """Return a row per number of rows; the ratio is cospec's time / llama.cpp's."""
    theirs = LlamaCpp(file, operators.threads(), work.most_tokens)
    systems: dict[str, System] = {"cospec": Cospec(file, work.most_tokens, kv_cache_dtype), "llama_cpp": theirs}
    for system in systems.values():
        system.forward(0, work.context, False)
        for _ in range(WARM_TURNS):
            sample(system, replace(work, prompts=work.prompts[:1]))
    shuffler, found = random.Random(0), list[dict[str, dict[str, float]]]()
    for _ in range(turns):
        found.append({name: sample(systems[name], work) for name in shuffler.sample(list(systems), 2)})
    theirs.close()
    result = []
    for rows in found[0]["cospec"]:
        times = {name: [turn[name][rows] for turn in found] for name in systems}
        ratio = paired_ratio(times["cospec"], times["llama_cpp"]).as_json()
        if rows.isdigit():
            ratio["over_one_row"] = statistics.median(turn["cospec"][rows] / turn["cospec"]["1"] for turn in found)
        result.append({"rows": rows, **{f"{name}_ms": statistics.median(own) for name, own in times.items()}, **ratio})
    return result


def compare(model: Model, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Write the files of a model where there are none, measure, and print each row."""
    found = []
    for kind in options.types:
        if "_k" in kind and model.hidden % SUPER_BLOCK:
            print(f"{model.name} has rows of {model.hidden} weights; {kind} needs multiples of {SUPER_BLOCK}.")
            continue
        file = options.folder / f"{model.name}-{kind}.gguf"
        if not file.exists():
            unfinished = file.with_suffix(f".{os.getpid()}")
            write_file(unfinished, model, kind)
            unfinished.rename(file)
        speeds = [bandwidth()]
        work = Work(options.context, tuple(options.prompts), options.repeats)
        rows = measure(file, options.turns, work, options.kv_cache_dtype)
        speeds.append(bandwidth())  # the bandwidth of a virtual machine varies within minutes
        floor = model.bytes_of_one_row(kind) / max(speeds) / 1e6
        for row in rows:
            found.append({"type": kind, "floor_ms": floor, **row})
            times = [f"{row[f'{system}_ms']:.1f} ms" for system in ("cospec", "llama_cpp")]
            print(model.name, kind, row["rows"], *times, "{ratio:.2f} ({low:.2f} to {high:.2f})".format(**row))
        if not options.keep:
            file.unlink()
    return found


def main() -> None:
    """Write the files, measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/gguf-speed"), help="of the files")
    parser.add_argument("--keep", action="store_true", help="do not remove the files")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS)[:3])
    parser.add_argument("--types", nargs="+", choices=FILE_TYPES, default=TYPES)
    parser.add_argument("--prompts", nargs="*", type=int, default=[256, 2048], help="tokens")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens before the rows")
    parser.add_argument("--kv-cache-dtype", default="auto", help="of cospec; llama.cpp has float16")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=5, help="forwards of a number of rows in a turn")
    parser.add_argument("--isa", help="an instruction set of cospec below the best one")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(operators.threads())
    if options.isa:
        operators.set_isa(options.isa)
    settings = {"context": options.context, "kv_cache_dtype": options.kv_cache_dtype}
    settings |= {"turns": options.turns, "repeats": options.repeats}
    own = (options.context, options.kv_cache_dtype) != (CONTEXT, "auto")
    long = f"_context_{options.context}_{options.kv_cache_dtype}" if own else ""
    more = "" if set(options.types) <= set(TYPES) else "_more_types"
    settings["llama_cpp"] = instructions()
    more += "" if "AVX512" in settings["llama_cpp"] else "_llama_cpp_avx2"
    for name in options.models:
        rows = compare(MODELS[name], options)
        result = f"gguf_{name.lower()}_{operators.isa()}{long}{more}"
        print("written to", write(result, {"options": settings, "rows": rows}), flush=True)


if __name__ == "__main__":
    main()
