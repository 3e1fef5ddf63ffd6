"""Seconds and memory of loading a model: GGUF Q4_0 and bfloat16 safetensors in the shape of Llama 3.2 1B.

Run ``python -m benchmarks.load_time``. The weights are random. Each load is a new process, which reads files from the
page cache. Own memory is memory that holds no mapped file, as pages of files are free for others. A load runs without
the cache of packed weights (``off``), fills the cache (``cold``), or finds its file in the cache (``warm``).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import ROOT, write
from cospec.core.interfaces import Model
from cospec.core.model_io import SequenceSlice, TokenBatch

CACHES = ("off", "cold", "warm")
TOKENS = 32  # of which each is timed; 4 pages hold 64
STATUS, STAT, UPTIME = Path("/proc/self/status"), Path("/proc/self/stat"), Path("/proc/uptime")
SAMPLE_SECONDS = 0.005
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_size": 2048,
    "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "tie_word_embeddings": True, "hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def make_models(folder: Path) -> list[Path]:
    """Write the two models, unless they exist; return their paths."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    from cospec.models.files.gguf_writer import write_gguf
    from cospec.models.files.weight_source_selection import open_source

    floats, blocks = folder / "bf16", folder / "q4_0.gguf"
    if not floats.exists():
        floats.mkdir(parents=True)
        (floats / "config.json").write_text(json.dumps(CONFIG), "utf-8")
        with torch.device("meta"):
            shapes = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(floats)).state_dict()
        generator = torch.Generator().manual_seed(0)
        tensors = {
            name: torch.empty(meta.shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
            if meta.dim() == 2
            else torch.ones(meta.shape, dtype=torch.bfloat16)
            for name, meta in shapes.items()
            if name != "lm_head.weight"
        }
        save_file(tensors, floats / "model.safetensors", {"format": "pt"})
    if not blocks.exists():
        write_gguf(blocks, floats, open_source(floats), "q4_0")
    return [blocks, floats]


def own_memory() -> int:
    """Return the bytes of this process that are no mapped files."""
    line = next(line for line in STATUS.read_text("utf-8").splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def process_seconds() -> float:
    """Return the seconds since this process started."""
    ticks = int(STAT.read_text("utf-8").rpartition(")")[2].split()[19])
    return float(UPTIME.read_text("utf-8").split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Sample own memory in the block; the list holds the largest sample."""
    found, done = [own_memory()], threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLE_SECONDS):
            found[0] = max(found[0], own_memory())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def load(path: str, cache: str) -> dict[str, float]:
    """Load in this process, and return seconds and gigabytes."""
    from cospec.models.loading import LoadOptions, load_model, memory_plan
    from cospec.models.weight_cache import WeightCache

    options = LoadOptions(num_pages=4, max_num_seqs=1, weight_cache=WeightCache(0 if cache == "off" else 1 << 36))
    weights = sum(each.bytes for each in memory_plan([(path, options)]).weights)
    before, began = own_memory(), time.perf_counter()
    with peak_memory() as peak:
        model = load_model(path, options)
    seconds, total = time.perf_counter() - began, process_seconds()
    assert model.vocab_size == CONFIG["vocab_size"]
    return {
        "token_ms": 1e3 * token_seconds(model),
        "total_s": total,
        "load_s": seconds,
        "weights_gb": weights / 1e9,
        "before_gb": before / 1e9,
        "peak_gb": peak[0] / 1e9,
        "after_gb": own_memory() / 1e9,
        "peak_share": (peak[0] - before) / weights,
    }


def token_seconds(model: Model) -> float:
    """Return the median seconds of a forward of one token."""
    model.pages.open_sequence("a", ())
    assert model.pages.allocate("a", TOKENS)
    taken = []
    for place in range(TOKENS):
        began = time.perf_counter()
        model.forward(TokenBatch((SequenceSlice("a", place, (5,)),)))
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def in_new_process(path: Path, cache: str, folder: Path) -> dict[str, float]:
    """Load in a new process with the caches of ``folder``."""
    if cache == "cold":
        shutil.rmtree(folder / "cospec" / "weights", ignore_errors=True)
    command = [sys.executable, "-m", "benchmarks.load_time", "--load", str(path), "--cache", cache]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder)}
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, env=environment)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="keeps the models (default: a temporary folder)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--make", action="store_true", help="only write the models")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    parser.add_argument("--cache", choices=CACHES, default="off", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        print(json.dumps(load(options.load, options.cache)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        models = make_models(options.folder or Path(temporary))
        if options.make:
            return
        in_new_process(models[0], "off", Path(temporary))  # fills the page cache
        runs = {
            (path.stem, cache): [in_new_process(path, cache, Path(temporary)) for _ in range(options.repeats)]
            for path in models
            for cache in CACHES
        }
    rows = [
        {"weights": name, "cache": cache, **{key: statistics.median(run[key] for run in own) for key in own[0]}}
        for (name, cache), own in runs.items()
    ]
    table = Table(
        "weights", "cache", "process, s", "load, s", "weights, GB", "own memory before, GB", "peak, GB",
        "peak / weights", "token, ms",
    )  # fmt: skip
    for row in rows:
        figures = (
            f"{row[key]:.2f}"
            for key in ("total_s", "load_s", "weights_gb", "before_gb", "peak_gb", "peak_share", "token_ms")
        )
        table.add_row(str(row["weights"]), str(row["cache"]), *figures)
    Console().print(table)
    print("stored in", write("load_time", {"repeats": options.repeats, "rows": rows}))


if __name__ == "__main__":
    main()
