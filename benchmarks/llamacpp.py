"""The forward of cospec and the forward of llama.cpp on the same weights: milliseconds for 1, 4 and 8 tokens.

Run ``python -m benchmarks.llamacpp BUILD/bin/llama-bench --pair DIR FILE.gguf float32``; ``other_servers.sh``
builds the program and the file. Both read ``--context`` tokens of cache. In each turn the two systems measure in random
order; the figure is the ratio within a turn. llama-bench computes the logits of the last token; cospec computes the
logits of all tokens, as a verifier needs.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import write
from cospec.bench.paired_ratios import paired_ratio
from cospec.core.interfaces import Model
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.models.loading import LoadOptions, load_model

ROWS = (1, 4, 8)
STEPS = 16  # tokens of one sample of single tokens
Sample = dict[int, float]
"""Median milliseconds of one forward, by the number of its rows."""


class LlamaCpp:
    """llama-bench, one process per turn.

    Args:
        binary, file: the program and the weights.
    """

    def __init__(self, binary: Path, file: Path, context: int) -> None:
        several = ",".join(map(str, ROWS[1:]))
        self._command = [str(binary), "-m", str(file), "-d", str(context), "-p", several, "-n", str(STEPS)]
        self.build = ""

    def sample(self, repeats: int) -> Sample:
        more = ["-t", str(torch.get_num_threads()), "-r", str(repeats), "-o", "json"]
        done = subprocess.run([*self._command, *more], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
        tests = json.loads(done.stdout)
        self.build = f"{tests[0]['build_commit']}, cache {tests[0]['type_k']}"
        return {
            test["n_prompt"] or 1: statistics.median(test["samples_ns"]) / max(1, test["n_gen"]) / 1e6 for test in tests
        }


class Cospec:
    """A model that is loaded and called as in the engine."""

    def __init__(self, folder: str, dtype: str, context: int) -> None:
        self._model: Model = load_model(folder, LoadOptions(dtype=dtype))
        self._context = context
        self._model.pages.open_sequence("a", ())
        self._model.pages.allocate("a", context + max(STEPS, *ROWS))
        self._model.forward(TokenBatch((SequenceSlice("a", 0, (1,) * context, logits_from=context - 1),)))

    def sample(self, repeats: int) -> Sample:
        taken: dict[int, list[float]] = {rows: [] for rows in ROWS}
        for _ in range(repeats):
            for rows in ROWS[1:]:
                taken[rows].append(self._forward(self._context, rows))
            steps = [self._forward(self._context + step, 1) for step in range(STEPS)]
            taken[1].append(statistics.mean(steps))
        return {rows: statistics.median(own) for rows, own in taken.items()}

    def _forward(self, start: int, rows: int) -> float:
        batch = TokenBatch((SequenceSlice("a", start, (1,) * rows),))
        started = time.perf_counter()
        self._model.forward(batch)
        return (time.perf_counter() - started) * 1e3


def measure(llama_cpp: LlamaCpp, cospec: Cospec, turns: int, repeats: int) -> list[dict[str, Any]]:
    """Return one row per number of rows; times are medians over turns, the ratio is llama.cpp / cospec."""
    shuffler, found = random.Random(0), list[dict[str, Sample]]()
    systems: dict[str, LlamaCpp | Cospec] = {"theirs": llama_cpp, "ours": cospec}
    for turn in range(turns + 1):
        samples = {name: systems[name].sample(repeats) for name in shuffler.sample(list(systems), 2)}
        if turn:  # the first one warms up
            found.append(samples)
    result = []
    for rows in ROWS:
        times = {name: [samples[name][rows] for samples in found] for name in systems}
        ratio = paired_ratio(times["theirs"], times["ours"]).as_json()
        result.append({"rows": rows, **{f"{name}_ms": statistics.median(own) for name, own in times.items()}, **ratio})
    return result


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", type=Path, help="llama-bench")
    parser.add_argument("--pair", nargs=3, action="append", required=True, metavar=("DIR", "GGUF", "DTYPE"))
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=9, help="samples in a turn")
    options = parser.parse_args()
    table = Table("weights", "rows", "llama.cpp, ms", "cospec, ms", "times as fast (95% interval)")
    found = []
    for folder, file, dtype in options.pair:
        llama_cpp, cospec = (
            LlamaCpp(options.binary, Path(file), options.context),
            Cospec(folder, dtype, options.context),
        )
        name = Path(file).stem
        for row in measure(llama_cpp, cospec, options.turns, options.repeats):
            found.append({"weights": name, "dtype": dtype, "llama_cpp": llama_cpp.build, **row})
            ratio = f"{row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})"
            table.add_row(name, str(row["rows"]), f"{row['theirs_ms']:.2f}", f"{row['ours_ms']:.2f}", ratio)
    Console().print(table)
    settings = {"context": options.context, "turns": options.turns, "repeats": options.repeats}
    print("written to", write("llamacpp", {"options": settings, "rows": found}))


if __name__ == "__main__":
    main()
