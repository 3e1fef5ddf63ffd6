"""Measures products of weights in each format: milliseconds, share of the memory bandwidth, and the cost of rows.

Run by hand on a quiet machine: ``python -m benchmarks.block_products [--formats q4_0 q8_0] [--isa avx2] [--out FILE]``.
The products are those of some layers of a model, with random weights that no cache holds. Numbers of rows alternate.

``--compute`` measures arithmetic alone: a weight [1024, 1024] that stays in the cache, one thread, the least of many
times. Other load on the machine changes these figures little.

``--prompts`` measures products of many rows with a weight [2048, 2048], and the same products of torch (oneDNN). Its
results are stored. ``--isa avx2`` limits torch's products to AVX2 too.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import write
from benchmarks.kernels import Shape, medians
from cospec.bench.roofline import bandwidth as measured_bandwidth
from cospec.machine import processor
from cospec.models.weights.format import StoredWeight, WeightFormat
from cospec.native import operators
from cospec.native.library import ISAS, offered
from cospec.native.operators import PackedLinear
from cospec.registry import WEIGHT_FORMATS

ROWS = (1, 4, 8)
PROMPT = 256  # rows
MODELS = (Shape("Qwen2.5-0.5B", 896, 24, 4864, 14, 2), Shape("Llama-3.2-1B", 2048, 16, 8192, 32, 8))
FORMATS = ("bf16", "int8", "q8_0", "q6_k", "q5_k", "q4_k", "q4_0")
WORKING_SET = 160 << 20  # bytes, several times a cache
TORCH_LIMITS = {"avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}}
"""Environments that limit the libraries of torch's products; the libraries read them at their first product."""


def random_weight(format: WeightFormat, outputs: int, inputs: int) -> StoredWeight:
    """Return a weight of random floats or bytes, of the shapes of zeros in the format."""
    parts = [torch.zeros_like(part) for part in format.encode(torch.zeros(1, inputs))]
    random = [part.expand(outputs, *part.shape[1:]).clone() for part in parts]
    for part in random:
        if part.dim() == 2 and part.is_floating_point():  # random bytes would be subnormal numbers, which are slow
            part.normal_(std=0.02)
            continue
        whole = part.view(torch.uint8) if part.dim() == 2 else part
        whole.random_(0, 60) if whole.dtype is torch.uint8 else whole.fill_(0.01)
    return StoredWeight(format, tuple(random), inputs)


def measure(model: Shape, format: WeightFormat, repeats: int, bandwidth: float) -> dict[str, Any]:
    """Time the products of as many layers as the working set takes."""
    layer = model.products[:4]
    size = sum(format.num_bytes(*shape) for shape in layer)
    layers = min(model.layers, math.ceil(WORKING_SET / size))
    products = [PackedLinear(random_weight(format, *shape), None) for _ in range(layers) for shape in layer]

    def call(rows: int) -> Callable[[], Any]:
        inputs = {width: torch.randn(rows, width) for _, width in layer}

        def run() -> None:
            for product in products:
                product(inputs[product.in_features])

        return run

    taken = medians({rows: call(rows) for rows in ROWS}, repeats)
    prompt = medians({PROMPT: call(PROMPT)}, 1)[PROMPT]
    return {
        "model": model.name, "format": format.name, "isa": operators.isa(), "bytes": layers * size, "layers": layers,
        "ms": {str(rows): round(1e3 * seconds, 3) for rows, seconds in taken.items()},
        "prompt_ms": round(1e3 * prompt, 1),
        "share_of_bandwidth": round(layers * size / taken[1] / bandwidth, 3),
        "times_one_row": {str(rows): round(seconds / taken[1], 3) for rows, seconds in taken.items()},
    }  # fmt: skip


def arithmetic(format: WeightFormat, repeats: int) -> dict[str, Any]:
    """Time products of a weight that stays in the cache: the least microseconds of each number of rows."""
    product = PackedLinear(random_weight(format, 1024, 1024), None)
    least = {}
    for rows in (1, 2, 4, 5, 8, 16, 64):
        x, times = torch.randn(rows, 1024), []
        for _ in range(repeats):
            begin = time.perf_counter()
            product(x)
            times.append(time.perf_counter() - begin)
        least[str(rows)] = round(1e6 * min(times), 1)
    return {"format": format.name, "isa": operators.isa(), "bytes": format.num_bytes(1024, 1024), "us": least}


def compute(formats: Sequence[str], out: Path | None) -> None:
    """Print the arithmetic of every format and instruction set, and write the results."""
    operators.set_threads(1)
    found = []
    for isa in offered():
        operators.set_isa(isa)
        for name in formats:
            found.append(arithmetic(WEIGHT_FORMATS.load(name)(), 20 if isa == "base" else 150))
            print(f"{isa:12} {name:7}" + "".join(f"{rows:>5}: {us:8.1f} us" for rows, us in found[-1]["us"].items()))
    if out:
        out.write_text(json.dumps({"processor": processor(), "arithmetic": found}, indent=1) + "\n", encoding="utf-8")


def prompts(formats: Sequence[str], repeats: int, result: str) -> None:
    """Print and store GFLOP/s of products of many rows in each format, and of torch's products."""
    found: list[dict[str, Any]] = []
    side, weights = 2048, torch.randn(2048, 2048)
    calls: dict[str, Callable[[Tensor], Any]] = {
        name: PackedLinear(random_weight(WEIGHT_FORMATS.load(name)(), side, side), None) for name in formats
    }
    for dtype in (torch.float32, torch.bfloat16):
        calls[f"torch {dtype}"] = partial(_torch_product, weights.to(dtype))
    for rows in (256, 2048):
        x = torch.randn(rows, side)
        taken = medians({number: partial(call, x) for number, call in enumerate(calls.values())}, repeats)
        for name, seconds in zip(calls, taken.values(), strict=True):
            found.append({"weights": name, "rows": rows, "gflop_per_s": 2 * side * side * rows / seconds / 1e9})
            print("{rows:>6} rows  {weights:<15}{gflop_per_s:>8.0f} GFLOP/s".format_map(found[-1]))
    print("stored in", write(result, {"rows": found}))


def _torch_product(weight: Tensor, x: Tensor) -> Tensor:
    return torch.nn.functional.linear(x.to(weight.dtype), weight)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=WEIGHT_FORMATS.names, default=FORMATS)
    parser.add_argument("--isa", choices=ISAS, help="an instruction set below the best one")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--compute", action="store_true", help="arithmetic alone, on every instruction set")
    parser.add_argument("--prompts", action="store_true", help="products of many rows, and those of torch")
    parser.add_argument("--out", type=Path, help="a JSON file")
    options = parser.parse_args(arguments)
    if options.isa:
        operators.set_isa(options.isa)
        os.environ.update(TORCH_LIMITS.get(options.isa, {}))
    if options.prompts:
        prompts(
            options.formats, options.repeats, f"prompt_products_{options.isa}" if options.isa else "prompt_products"
        )
        return
    if options.compute:
        compute(options.formats, options.out)
        return
    bandwidth = measured_bandwidth() * 1e9
    print(f"{processor()}, {operators.threads()} threads, memory read at {bandwidth / 1e9:.1f} GB/s")
    found = []
    for model in MODELS:
        for name in options.formats:
            one = measure(model, WEIGHT_FORMATS.load(name)(), options.repeats, bandwidth)
            found.append(one)
            rows = "  ".join(
                f"{rows}: {one['ms'][rows]:.2f} ms ({one['times_one_row'][rows]:.2f})" for rows in one["ms"]
            )
            print(f"{model.name} {name:7} {rows}  {PROMPT}: {one['prompt_ms']:.0f} ms  {one['share_of_bandwidth']:.0%}")
    facts = {"processor": processor(), "threads": operators.threads(), "bandwidth_gb_s": round(bandwidth / 1e9, 1)}
    if options.out:
        options.out.write_text(json.dumps({**facts, "products": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
