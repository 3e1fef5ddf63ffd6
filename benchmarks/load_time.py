"""Seconds and memory of loading a model: GGUF Q4_0 and bfloat16 safetensors in the shape of Llama 3.2 1B.

Run ``python -m benchmarks.load_time``. The weights are random. Each load is a new process, which reads files from the
page cache. Own memory is memory that holds no mapped file, as pages of files are free for others.
"""

from __future__ import annotations

import argparse
import json
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

STATUS = Path("/proc/self/status")
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
    from cospec.models.files.open_source import open_source

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


def load(path: str) -> dict[str, float]:
    """Load in this process, and return seconds and gigabytes."""
    began = time.perf_counter()
    import transformers.models.llama.modeling_llama  # noqa: F401 - the load of a model imports the module

    from cospec.models.loading import LoadOptions, load_model, memory_plan

    options = LoadOptions(num_pages=4, max_num_seqs=1)
    weights = sum(each.bytes for each in memory_plan([(path, options)]).weights)
    before, imported = own_memory(), time.perf_counter()
    with peak_memory() as peak:
        model = load_model(path, options)
    seconds = time.perf_counter() - imported
    assert model.vocab_size == CONFIG["vocab_size"]
    return {
        "import_s": imported - began,
        "load_s": seconds,
        "weights_gb": weights / 1e9,
        "before_gb": before / 1e9,
        "peak_gb": peak[0] / 1e9,
        "after_gb": own_memory() / 1e9,
        "peak_share": (peak[0] - before) / weights,
    }


def in_new_process(path: Path) -> dict[str, float]:
    """Load in a new process."""
    command = [sys.executable, "-m", "benchmarks.load_time", "--load", str(path)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="keeps the models (default: a temporary folder)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--make", action="store_true", help="only write the models")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        print(json.dumps(load(options.load)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        models = make_models(options.folder or Path(temporary))
        if options.make:
            return
        runs = {path.stem: [in_new_process(path) for _ in range(options.repeats)] for path in models}
    rows = [
        {"weights": name, **{key: statistics.median(run[key] for run in own) for key in own[0]}}
        for name, own in runs.items()
    ]
    table = Table(
        "weights", "imports, s", "load, s", "weights, GB", "own memory before, GB", "peak, GB", "peak / weights"
    )
    for row in rows:
        figures = (
            f"{row[key]:.2f}" for key in ("import_s", "load_s", "weights_gb", "before_gb", "peak_gb", "peak_share")
        )
        table.add_row(str(row["weights"]), *figures)
    Console().print(table)
    print("stored in", write("load_time", {"repeats": options.repeats, "rows": rows}))


if __name__ == "__main__":
    main()
