"""Memory and expected speed of models by weight format on this machine.

Run ``python -m benchmarks.fit``. ``--check MODEL`` compares the bound with forwards of one token. One token reads all
weights once, so tokens per second are at most the measured bandwidth divided by the bytes of the weights. A batch of a
few tokens costs little more, which speculation uses.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import write
from cospec.bench.roofline import bandwidth, cost_of
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.models.loading import LoadOptions, load_model
from cospec.models.weights.format import bytes_of
from cospec.registry import WEIGHT_FORMATS

Shape = tuple[int, int, int, int, int, int, bool]
"""Hidden size, intermediate size, layers, widths of queries and of keys, vocabulary, whether the output is tied."""
MODELS: dict[str, Shape] = {
    "Qwen2.5-0.5B": (896, 4864, 24, 896, 128, 151936, True),
    "Llama 3.2 1B": (2048, 8192, 16, 2048, 512, 128256, True),
    "Qwen3-1.7B": (2048, 6144, 28, 2048, 1024, 151936, True),
    "Qwen3-4B": (2560, 9728, 36, 4096, 1024, 151936, True),
    "Llama 3.1 8B": (4096, 14336, 32, 4096, 1024, 128256, False),
}
FORMATS = ("bf16", "q8_0", "q6_k", "q4_k", "q4_0")
TOKENS = 24  # of a check


def weights(shape: Shape) -> Iterator[tuple[int, int]]:
    """Yield the shapes ``[out, in]`` of the weights that a token reads, the output layer last."""
    hidden, inner, layers, queries, keys, vocabulary, _ = shape
    for _ in range(layers):
        yield from ((queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries))
        yield from ((inner, hidden), (inner, hidden), (hidden, inner))
    yield vocabulary, hidden


def resident(shape: Shape) -> list[tuple[int, int]]:
    """Return the shapes of the weights in memory: also the input embedding, unless the output layer is the same."""
    hidden, *_, vocabulary, tied = shape
    return [*weights(shape), *([] if tied else [(vocabulary, hidden)])]


def measured(model: str) -> float:
    """Return tokens per second of one sequence of a few tokens: the median over forwards of one token."""
    loaded = load_model(model, LoadOptions(num_pages=8))
    loaded.pages.allocate("a", TOKENS + 1)
    seconds = []
    for start in range(TOKENS + 1):
        began = time.perf_counter()
        loaded.forward(TokenBatch((SequenceSlice("a", start, (1,)),)))
        seconds.append(time.perf_counter() - began)
    return 1.0 / statistics.median(seconds[1:])  # the first forward warms up


def main() -> None:
    """Measure the bandwidth, print the tables, and store them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", nargs="*", default=[], metavar="MODEL", help="models that are loaded and measured")
    options = parser.parse_args()
    checks: list[dict[str, Any]] = [
        {"model": Path(model).name, "gb": cost_of(model).weight_bytes / 1e9, "tokens_per_s": measured(model)}
        for model in options.check
    ]
    speed, rows = bandwidth(), []
    table = Table("model", "format", "memory, GB", "read for a token, GB", "tokens/s at most", box=None)
    for model, shape in MODELS.items():
        for name in (name for name in FORMATS if name in WEIGHT_FORMATS):
            format = WEIGHT_FORMATS.load(name)()
            held, size = (bytes_of(format, list(found)) / 1e9 for found in (resident(shape), weights(shape)))
            row = {"memory_gb": held, "weights_gb": size, "tokens_per_s": speed / size}
            rows.append({"model": model, "format": name, **row})
            table.add_row(model, name, f"{held:.2f}", f"{size:.2f}", f"{speed / size:.1f}")
    Console().print(table)
    for check in checks:
        check["share"] = check["tokens_per_s"] * check["gb"] / speed
        print("{model}: {gb:.2f} GB, {tokens_per_s:.1f} tokens/s, {share:.2f} of the bound".format(**check))
    stored = write("fit", {"bandwidth_gb_per_s": speed, "rows": rows, "checks": checks})
    print(f"memory read at {speed:.1f} GB/s; stored in {stored}")


if __name__ == "__main__":
    main()
