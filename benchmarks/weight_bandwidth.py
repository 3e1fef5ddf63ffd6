"""Share of the measured bandwidth that a forward of one row reaches, per weight format, in the shape of Llama 3.2 1B.

Run ``python -m benchmarks.weight_bandwidth``. The weights are random. A turn measures the bandwidth before and after
the forwards, and takes the larger of both, so a machine that changes speed changes both sides. A share is the bytes of
the weights over the bandwidth, divided by the median time of a forward. The result is the median of all turns.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import write
from benchmarks.gguf_files import MODELS, write_file
from benchmarks.load_time import make_models
from cospec.bench.roofline import bandwidth, cost_of
from cospec.core.interfaces import Model
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.models.loading import LoadOptions, load_model

SHAPE = MODELS["Llama-3.2-1B"]


@dataclass(frozen=True, slots=True)
class Format:
    """A weight format: where its weights come from, and the aim for the share."""

    name: str
    aim: float
    gguf: str = ""
    quantization: str | None = None
    dtype: str = "auto"


FORMATS = {
    each.name: each
    for each in (
        Format("fp32", 0.9, dtype="float32"),
        Format("bf16", 0.9),
        Format("fp16", 0.9, dtype="float16"),
        Format("int8", 0.9, quantization="int8"),
        Format("q8_0", 0.9, "q8_0"),
        Format("q4_0", 0.8, "q4_0"),
        Format("q4_k", 0.8, "q4_k_m"),
        Format("q5_k", 0.8, "q5_k"),
        Format("q6_k", 0.8, "q6_k"),
        Format("iq4_nl", 0.8, "iq4_nl"),
    )
}


def file_of(format: Format, folder: Path) -> Path:
    """Return the model of a format, written if there is none."""
    if not format.gguf:
        return make_models(folder)[1]
    path = folder / f"{SHAPE.name}-{format.gguf}.gguf"
    if not path.exists():
        write_file(path, SHAPE, format.gguf)
    return path


def one_row(model: Model, repeats: int) -> float:
    """Return the median seconds of a forward of one token, with a context of one token."""
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        model.forward(TokenBatch((SequenceSlice("a", 1, (5,)),)))
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def measure(format: Format, path: Path, turns: int, repeats: int) -> dict[str, Any]:
    """Return megabytes, milliseconds, bandwidth and share of a format."""
    size = cost_of(str(path), dtype=format.dtype, quantization=format.quantization).weight_bytes
    options = LoadOptions(device="cpu", dtype=format.dtype, quantization=format.quantization, num_pages=4)
    model = load_model(str(path), options)
    model.pages.open_sequence("a", ())
    assert model.pages.allocate("a", 2)
    model.forward(TokenBatch((SequenceSlice("a", 0, (5,)),)))
    times, speeds = [], [bandwidth()]
    for _ in range(turns):
        times.append(one_row(model, repeats))
        speeds.append(bandwidth())
    best = [max(pair) for pair in pairwise(speeds)]
    shares = [size / 1e9 / speed / seconds for speed, seconds in zip(best, times, strict=True)]
    return {
        "format": format.name,
        "megabytes": size / 1e6,
        "ms": 1e3 * statistics.median(times),
        "gb_per_s": statistics.median(best),
        "share": statistics.median(shares),
        "least": min(shares),
        "most": max(shares),
        "aim": format.aim,
    }


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/weight-bandwidth"), help="keeps the models")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--name", default="weight_bandwidth", help="of the result")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=10, help="forwards in a turn")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    table = Table("weights", "MB", "one row, ms", "bandwidth, GB/s", "share", "least", "most", "aim")
    rows = []
    for name in options.formats:
        rows.append(measure(FORMATS[name], file_of(FORMATS[name], options.folder), options.turns, options.repeats))
        gc.collect()  # frees the model before the next
        table.add_row(name, *(f"{value:.2f}" for value in list(rows[-1].values())[1:]))
    Console().print(table)
    print("stored in", write(options.name, {"turns": options.turns, "repeats": options.repeats, "rows": rows}))


if __name__ == "__main__":
    main()
