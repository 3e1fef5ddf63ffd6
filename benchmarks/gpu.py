"""Decoding on one GPU: cospec and transformers on the same random weights in the shapes of Qwen3.

Run ``python -m benchmarks.gpu [--models Qwen3-8B] [--batch 1 8 32] [--seconds 280]``. A dry run without a GPU is
``python -m benchmarks.gpu --device cpu --models tiny --output /tmp``.

Without drafts all systems decode greedily, to a fixed length. ``static`` is ``generate`` of transformers with a static
cache, which compiles the forward on a GPU. ``continuous`` is its continuous batching. In each turn the systems run in
random order, once with all output tokens and once with a quarter of them. The difference divided by the number of
further steps is the time of a step; it includes no prompt and no fixed cost of a call. A ratio is a system's time over
cospec's. ``floor_ms`` is the time in which the device copies as many bytes as a step reads. ``--without`` adds cospec
without some of its faster implementations, see ``benchmarks.gpu_variants``.

One model also runs with a drafter, at temperature 1; ``benchmarks.gpu_models`` says how both models are made.
``assisted`` is assisted generation of transformers, and ``plain`` its generation without a drafter. These figures
include the prompt. Ratios are over cospec without drafts.

The results of each model are in a file of its own, which is written after each batch size. A system that fails has its
error in the results, and the others go on. Before each cell a system is skipped if fewer seconds are left than it
needed in the cell before. ``HF_HUB_OFFLINE=1`` keeps transformers from looking for kernels on the network.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib.metadata
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import write
from benchmarks.gpu_models import SHAPES
from benchmarks.gpu_run import BATCHES, OFF, ModelRun
from benchmarks.gpu_systems import Clock, one_line, synchronize
from benchmarks.gpu_variants import VARIANTS
from cospec.bench.roofline import bandwidth

COPY_BYTES = 2 << 30
OVERTIME = 60.0  # seconds after the end, for the call that runs then
SYSTEMS = (OFF, *BATCHES, "assisted")


def free() -> None:
    """Free unused memory of closed models, and compiled code, which refers to its model."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def copy_bandwidth(device: str) -> float:
    """Return bytes read and written per second by copies within the device's memory; on a CPU only bytes read."""
    if device == "cpu":
        return bandwidth() * 1e9
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target, best = torch.empty_like(source), float("inf")
    for _ in range(6):
        synchronize()
        started = time.perf_counter()
        for _ in range(4):
            target.copy_(source)
        synchronize()
        best = min(best, (time.perf_counter() - started) / 4)
    return 2 * COPY_BYTES / best


def device_facts(device: str) -> dict[str, Any]:
    """Return the GPU's name, driver and memory, and Triton's version."""
    facts: dict[str, Any] = {"name": "cpu"}
    if device != "cpu":
        facts = {"name": torch.cuda.get_device_name(), "memory_bytes": torch.cuda.mem_get_info()[1]}
        if shutil.which("nvidia-smi"):
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            facts["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    try:
        facts["triton"] = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        facts["triton"] = None
    return facts


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["Qwen3-8B", "Qwen3-0.6B", "Qwen3-1.7B"]
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=names, help="in this order")
    parser.add_argument("--speculate", choices=[*SHAPES, "none"], help="the model with a drafter; default: the largest")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--without", nargs="*", choices=VARIANTS, default=[], help="further variants of cospec")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128, help="at least 4")
    parser.add_argument("--seconds", type=float, default=280.0, help="for the whole run")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--folder", type=Path, help="of the temporary weights")
    parser.add_argument("--output", type=Path, default=Path("gpu"), help="folder of the results")
    options = parser.parse_args()
    options.speculate = options.speculate or max(options.models, key=lambda name: SHAPES[name].weights_read)
    return options


def main() -> None:
    """Measure, print, store."""
    options = parse()
    faulthandler.dump_traceback_later(options.seconds + OVERTIME, exit=True)  # shows a call that does not return
    clock, facts, rate = Clock(options.seconds), device_facts(options.device), copy_bandwidth(options.device)
    print(f"{facts['name']}: {rate / 1e9:.0f} GB/s", flush=True)
    settings = {key: value for key, value in vars(options).items() if key not in {"folder", "output"}}
    for each in options.models:
        free()
        if not clock.allows("model", SHAPES[each].weights_read):
            print(f"{each} skipped: {clock.left:.0f} s left")
            continue
        slug = re.sub(r"[^a-z0-9.]+", "-", f"{facts['name']} {each}".lower())

        def store(result: dict[str, Any], name: str = slug) -> None:
            write(str(options.output / name), {"device": facts, "bytes_per_s": rate, "options": settings, **result})

        run = ModelRun(SHAPES[each], options, clock, rate, store)
        try:
            run.run()
        except Exception as error:
            run.result["error"] = one_line(error)
            print(each, "error:", run.result["error"], flush=True)
        store(run.result)
        clock.needed("model", run.result.get("preparation_s", 0.0), SHAPES[each].weights_read)


if __name__ == "__main__":
    main()
