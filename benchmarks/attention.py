"""Measures the native attention of one sequence: milliseconds, and the share of the least time.

Run by hand on a quiet machine: ``python -m benchmarks.attention [--dtypes int8] [--contexts 8192] [--name NAME]``. The
layers together hold more bytes than any cache. Numbers of rows alternate, and the tables show medians. The least time
is the larger of two: that of reading the keys and values, and that of the multiplications in float32. Rows share the
reading; each row and each head that shares keys adds multiplications.

``--loss MODEL --text FILE`` prints the perplexity of a model on a text with each dtype instead.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import write
from benchmarks.kernels import medians
from cospec.bench.roofline import Device, flop_rate
from cospec.bench.roofline import bandwidth as measured_bandwidth
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.machine import processor
from cospec.models.block_manager import BlockPool
from cospec.models.kv_cache import KVCache, LayerShape, block_bytes
from cospec.models.kv_cache_formats import CACHE_DTYPES, encode
from cospec.models.loading import LoadOptions, load_model, load_tokenizer, resolve
from cospec.models.perplexity import perplexity
from cospec.models.weights.fp32 import Fp32
from cospec.native import operators
from cospec.native.library import ISAS

ROWS = (1, 4, 8)
CONTEXTS = (1024, 8192, 32768)
MODELS = {"Qwen2.5-0.5B": (14, 2, 64), "Llama-3.2-1B": (32, 8, 64), "Qwen3-1.7B": (16, 8, 128)}
"""Heads, key-value heads, and the size of a head."""
WORKING_SET = 256 << 20  # bytes, several times a cache


def measure(model: str, dtype: str, context: int, repeats: int, device: Device) -> dict[str, Any]:
    """Time the attention of rows at the end of a context, in as many layers as the working set takes."""
    heads, kv_heads, dim = MODELS[model]
    shape = LayerShape(kv_heads, dim)
    size = block_bytes([shape], context, CACHE_DTYPES[dtype])
    layers = -(-WORKING_SET // size)
    pool = BlockPool(context // 16 + 1, 16)
    pool.allocate("a", context)
    cache = KVCache([shape] * layers, pool, CACHE_DTYPES[dtype], torch.device("cpu"))
    entries = encode(torch.randn(pool.num_pages, kv_heads, 16, dim), cache.dtype)
    for layer in cache.layers:
        layer.keys.copy_(entries)
        layer.values.copy_(entries)

    def call(rows: int) -> Callable[[], Any]:
        batch = cache.pack(TokenBatch((SequenceSlice("a", context - rows, (1,) * rows),)))
        q, k, v = (torch.randn(rows, count, dim) for count in (heads, kv_heads, kv_heads))

        def run() -> None:
            for layer in cache.layers:
                operators.attention(q, k, v, layer.keys, layer.values, batch, dim**-0.5)

        return run

    taken = medians({rows: call(rows) for rows in ROWS}, repeats)
    reading = size / device.bytes_per_s
    least = {rows: max(reading, 4 * rows * heads * context * dim / device.flops_per_s) for rows in ROWS}
    return {
        "model": model, "dtype": dtype, "context": context, "isa": operators.isa(), "bytes_per_layer": size,
        "ms_per_layer": {str(rows): round(1e3 * seconds / layers, 4) for rows, seconds in taken.items()},
        "share_of_bandwidth": round(layers * reading / taken[1], 3),
        "share_of_least": {str(rows): round(layers * least[rows] / taken[rows], 3) for rows in ROWS},
        "times_one_row": {str(rows): round(seconds / taken[1], 3) for rows, seconds in taken.items()},
    }  # fmt: skip


def multiply_rate(side: int = 2048, tries: int = 10) -> float:
    """Return operations per second of the native product in float32, which may be faster than torch's."""
    product, x = operators.PackedLinear(Fp32().read(torch.randn(side, side)), None), torch.randn(side, side)
    taken = []
    for _ in range(tries):
        started = time.perf_counter()
        product(x)
        taken.append(time.perf_counter() - started)
    return 2.0 * side**3 / min(taken)


def loss(model: str, text: Path, count: int = 4096) -> None:
    """Print the perplexity of a model on the first tokens of a text, with each dtype of its cache."""
    tokens = load_tokenizer(resolve(model)).encode(text.read_text(encoding="utf-8"))[:count]
    for dtype in CACHE_DTYPES:
        loaded = load_model(model, LoadOptions(device="cpu", kv_cache_dtype=dtype, cache_bytes=1 << 26))
        print(f"{model:<14}{dtype:>10}{perplexity(loaded, tokens):>12.4f}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table; write the results as JSON with ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", choices=CACHE_DTYPES, default=list(CACHE_DTYPES))
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--isa", choices=ISAS, help="an instruction set below the best one")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--name", help="of the file in benchmarks/results")
    parser.add_argument("--loss", metavar="MODEL")
    parser.add_argument("--text", type=Path, default=Path(__file__))
    options = parser.parse_args(arguments)
    if options.loss is not None:
        return loss(options.loss, options.text)
    operators.set_threads(options.threads)
    if options.isa:
        operators.set_isa(options.isa)
    print(f"{processor()}, {operators.isa()}, {operators.threads()} threads")
    print(f"{'model':<14}{'dtype':>10}{'context':>9}{'ms':>9}{'share':>7}{'x 4':>7}{'x 8':>7}  share of the least time")
    device, found = Device(0.0, max(flop_rate(), multiply_rate())), []
    for model, context, dtype in itertools.product(options.models, options.contexts, options.dtypes):
        best = max(device.bytes_per_s, measured_bandwidth() * 1e9)  # the best of all, for other work disturbs each
        device = replace(device, bytes_per_s=best)
        found.append(measure(model, dtype, context, options.repeats, device))
        ms, share, times = (found[-1][key] for key in ("ms_per_layer", "share_of_bandwidth", "times_one_row"))
        print(
            f"{model:<14}{dtype:>10}{context:>9}{ms['1']:>9.3f}{share:>7.2f}{times['4']:>7.2f}{times['8']:>7.2f}  "
            + ", ".join(f"{rows}: {share:.2f}" for rows, share in found[-1]["share_of_least"].items()),
            flush=True,
        )
    if options.name is not None:
        facts = {"gb_per_s": round(device.bytes_per_s / 1e9, 1), "gflop_per_s": round(device.flops_per_s / 1e9, 1)}
        print("stored in", write(options.name, {**facts, "rows": found}))


if __name__ == "__main__":
    main()
