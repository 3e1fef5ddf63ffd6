"""Measures the native kernels: products of few rows, the fused forward, and the memory bandwidth.

Run by hand on a quiet machine: ``python benchmarks/kernels.py [--format bf16] [--threads 2] [--repeats 15]``. Row
counts alternate within each repeat and the tables show medians, so that a disturbance does not affect one row count.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from cospec.bench.roofline import bandwidth
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.models.block_manager import BlockPool
from cospec.models.input_batch import InputBatch
from cospec.models.kv_cache import KVCache, LayerShape
from cospec.models.llama import FusedLlama
from cospec.models.weights.format import WeightFormat, bytes_of
from cospec.native import operators
from cospec.native.library import ISAS
from cospec.native.operators import PackedLinear
from cospec.registry import WEIGHT_FORMATS

ROWS = (1, 4, 5, 8, 16, 64)
CONTEXT = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama of some size."""

    name: str
    hidden: int
    layers: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int = 4096

    @property
    def products(self) -> list[tuple[int, int]]:
        """``(out, in)`` of every linear layer in the order of the forward."""
        kv = self.hidden * self.kv_heads // self.heads
        layer = [(self.hidden + 2 * kv, self.hidden), (self.hidden, self.hidden)]
        layer += [(2 * self.inner, self.hidden), (self.hidden, self.inner)]
        return layer * self.layers + [(self.vocab, self.hidden)]


SHAPES = (Shape("1M", 128, 3, 384, 4, 2), Shape("22M", 512, 7, 1376, 8, 4), Shape("30M", 512, 10, 1376, 8, 4))


def medians(calls: dict[int, Callable[[], Any]], repeats: int) -> dict[int, float]:
    """Return the median seconds of each call; the calls alternate."""
    times: dict[int, list[float]] = {key: [] for key in calls}
    for _ in range(repeats):
        for key, call in calls.items():
            begin = time.perf_counter()
            call()
            times[key].append(time.perf_counter() - begin)
    return {key: statistics.median(taken) for key, taken in times.items()}


def bench_linear(shape: Shape, format: WeightFormat, repeats: int) -> None:
    """Time all products of a forward in sequence, so that weights come from the usual memory."""
    layers = [PackedLinear(format.read(torch.randn(size)), None) for size in shape.products]
    weights, size = sum(out * width for out, width in shape.products), bytes_of(format, shape.products)

    def call(rows: int) -> Callable[[], Any]:
        inputs = {width: torch.randn(rows, width) for _, width in shape.products}

        def run() -> None:
            for layer in layers:
                layer(inputs[layer.in_features])

        return run

    taken = medians({rows: call(rows) for rows in ROWS}, repeats)
    print(f"\nlinear layers of {shape.name}, {format.name}, {size / 1e6:.1f} MB")
    print(f"{'rows':>6}{'ms':>10}{'GB/s':>10}{'GFLOP/s':>10}{'x row 1':>10}")
    for rows, seconds in taken.items():
        speed, flops = size / seconds / 1e9, 2 * weights * rows / seconds / 1e9
        print(f"{rows:>6}{seconds * 1e3:>10.3f}{speed:>10.1f}{flops:>10.1f}{seconds / taken[1]:>10.2f}")


def bench_forward(shape: Shape, format: WeightFormat, repeats: int, speed: float) -> None:
    """Time whole forwards of one sequence; rows as in the verification of a chain."""
    fused, cache = _model(shape, format)

    def batch(rows: int) -> InputBatch:
        return cache.pack(TokenBatch((SequenceSlice("a", CONTEXT, (1,) * rows),)))

    def call(rows: int) -> Callable[[], Any]:
        packed = batch(rows)
        return lambda: fused.logits(packed, cache.layers)

    taken = medians({rows: call(rows) for rows in ROWS}, repeats)
    floor = bytes_of(format, shape.products) / speed
    print(
        f"\nfused forward of {shape.name}, {format.name}, context {CONTEXT}; weights / bandwidth = {floor * 1e3:.3f} ms"
    )
    print(f"{'rows':>6}{'ms':>10}{'x floor':>10}{'x row 1':>10}")
    for rows, seconds in taken.items():
        print(f"{rows:>6}{seconds * 1e3:>10.3f}{seconds / floor:>10.2f}{seconds / taken[1]:>10.2f}")


def _model(shape: Shape, format: WeightFormat) -> tuple[FusedLlama, KVCache]:
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.inner,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    pool = BlockPool(64)
    pool.allocate("a", CONTEXT + max(ROWS))
    size = LayerShape(shape.kv_heads, shape.hidden // shape.heads)
    cache = KVCache([size] * shape.layers, pool, torch.float32, torch.device("cpu"))
    return FusedLlama.from_hf(model, cache, format), cache


def main(arguments: Sequence[str] | None = None) -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=WEIGHT_FORMATS.names, default="bf16", help="format of the weights")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--isa", choices=ISAS, help="an instruction set below the best one")
    parser.add_argument("--repeats", type=int, default=31)
    options = parser.parse_args(arguments)
    if not operators.available():
        raise SystemExit(f"There is nothing to measure because {operators.why_not()}.")
    operators.set_threads(options.threads)
    torch.set_num_threads(options.threads)
    if options.isa:
        operators.set_isa(options.isa)
    format = WEIGHT_FORMATS.load(options.format)()
    speed = 1e9 * bandwidth()
    print(f"{operators.isa()}, {operators.threads()} threads, memory read at {speed / 1e9:.1f} GB/s")
    for shape in SHAPES:
        bench_linear(shape, format, options.repeats)
        bench_forward(shape, format, options.repeats, speed)


if __name__ == "__main__":
    main()
