"""Memory and expected speed of models by weight format on this machine.

Run ``python -m benchmarks.fit``. One token reads all weights once, so tokens per second are at most the measured
bandwidth divided by the bytes of the weights. A batch of a few tokens costs little more, which speculation uses.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from benchmarks.common import write
from cospec.bench.roofline import bandwidth
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


def weights(shape: Shape) -> Iterator[tuple[int, int]]:
    """Yield the shapes ``[out, in]`` of the weights that a token reads, the output layer last."""
    hidden, inner, layers, queries, keys, vocabulary, _ = shape
    for _ in range(layers):
        yield from ((queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries))
        yield from ((inner, hidden), (inner, hidden), (hidden, inner))
    yield vocabulary, hidden


def main() -> None:
    """Measure the bandwidth, print the table, and store it."""
    speed, rows = bandwidth(), []
    table = Table("model", "format", "weights, GB", "tokens/s at most", box=None)
    for model, shape in MODELS.items():
        for name in (name for name in FORMATS if name in WEIGHT_FORMATS):
            size = bytes_of(WEIGHT_FORMATS.load(name)(), list(weights(shape))) / 1e9
            rows.append({"model": model, "format": name, "weights_gb": size, "tokens_per_s": speed / size})
            table.add_row(model, name, f"{size:.2f}", f"{speed / size:.0f}")
    Console().print(table)
    print(f"memory read at {speed:.1f} GB/s; stored in {write('fit', {'rows': rows})}")


if __name__ == "__main__":
    main()
