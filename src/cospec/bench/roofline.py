"""Compares the target's forwards with the limits of the device's memory and arithmetic.

A step reads every weight once and the keys and values of its sequences. A step does two operations per weight for each
computed token. The minimum time is the larger of bytes / bandwidth and operations / FLOP rate, both measured here. The
share is the minimum time over the measured time. Attention's operations are omitted: at a benchmark's contexts they are
a few percent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from cospec.bench.step_recorder import recorded_engine
from cospec.config import EngineConfig
from cospec.core.stats import StepStats
from cospec.models.files.array_file import huge_pages
from cospec.models.hf_loading import model_config
from cospec.models.load_options import LoadOptions, make_recipe
from cospec.models.memory import need_of
from cospec.native import library
from cospec.sampling_params import SamplingParams
from cospec.text.input_processor import make_requests

READ_BYTES = 256 << 20
SIDE = {"cpu": 1024, "cuda": 8192}
MOST_SECONDS = 3.0  # of the calls of one measurement; products in bfloat16 are slow without its instructions


@dataclass(frozen=True, slots=True)
class Device:
    """The device's measured rates: bytes read per second, and operations per second of large matrix products."""

    bytes_per_s: float
    flops_per_s: float

    def best(self, other: Device) -> Device:
        """Return the better of two measurements; measurements before and after handle a machine whose speed changes."""
        return Device(max(self.bytes_per_s, other.bytes_per_s), max(self.flops_per_s, other.flops_per_s))


@dataclass(frozen=True, slots=True)
class StepCost:
    """Costs of one model: weight bytes per forward, cache bytes per token, operations per token."""

    weight_bytes: float
    cache_bytes: float
    operations: float

    def of(self, steps: Sequence[StepStats]) -> tuple[float, float]:
        """Return bytes and operations of the target in these steps."""
        bytes_read = sum(self.weight_bytes + one.context_tokens * self.cache_bytes for one in steps)
        return bytes_read, sum(one.batched_tokens * self.operations for one in steps)


def measure_device(device: str = "cpu", dtype: torch.dtype = torch.float32) -> Device:
    """Measure bandwidth and FLOP rate, each the best of many tries. Measure on a quiet machine.

    Args:
        dtype: of the weights, which also steps the inputs of products.
    """
    # A processor without bfloat16 instructions multiplies such weights as float32.
    kinds = {torch.float32, dtype} if device == "cpu" else {torch.bfloat16}
    return Device(bandwidth(READ_BYTES, device) * 1e9, max(flop_rate(device, each) for each in kinds))


def bandwidth(size: int = READ_BYTES, device: str = "cpu") -> float:
    """Measure memory read bandwidth in GB/s: the best of several sums over more bytes than any cache.

    On a CPU all threads of the native library read huge pages, as they read weights.
    """
    if device == "cpu" and library.available():
        words = huge_pages(size).view(np.uint64)
        words.fill(1)  # the system gives pages at the first write
        return words.nbytes / _best(lambda: library.read_memory(words), 60) / 1e9
    data = torch.ones(size // 4, dtype=torch.float32, device=device)
    return data.numel() * 4 / _best(data.sum, 60) / 1e9


def flop_rate(device: str = "cpu", dtype: torch.dtype = torch.float32) -> float:
    """Measure operations per second of a product of two large matrices of ``dtype``."""
    side = SIDE[device]
    first, second = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2.0 * side**3 / _best(lambda: torch.mm(first, second), 20)


def _best(call: Callable[[], Any], tries: int) -> float:
    """Return the seconds of the fastest call, of at most ``tries`` and a few seconds."""
    best, end = float("inf"), time.perf_counter() + MOST_SECONDS
    for number in range(tries):
        started = time.perf_counter()
        if number and started > end:
            break
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return best


def cost_of(
    model: str, dtype: str = "auto", quantization: str | None = None, cuda: bool = False, kv_cache_dtype: str = "auto"
) -> StepCost:
    """Read the costs from file headers. An input embedding that is no output layer is only looked up."""
    device = "cuda" if cuda else "cpu"
    options = LoadOptions(device=device, dtype=dtype, quantization=quantization, kv_cache_dtype=kv_cache_dtype)
    recipe = make_recipe(model, options)
    source = recipe.source
    untied = "lm_head.weight" in source.shapes
    unread = [key for key in source.shapes if untied and key.endswith("embed_tokens.weight")]
    read = [shape for key, shape in source.shapes.items() if key not in unread]
    cache_bytes = float(need_of(model_config(model, recipe.folder).get_text_config(), 0, recipe.cache_dtype).token)
    weight_bytes = source.num_bytes(recipe.format, recipe.convert, unread)
    return StepCost(float(weight_bytes), cache_bytes, 2.0 * sum(map(prod, read)))


def watch(config: EngineConfig, texts: Sequence[str], max_tokens: int) -> tuple[StepCost, list[StepStats]]:
    """Run all ``texts`` together, greedily; return the model's costs, and the steps without prompts."""
    engine, seen = recorded_engine(config)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for turn in range(2):  # the first turn is a warm-up
        seen.clear()
        for number, text in enumerate(texts):
            (request,) = make_requests(f"roof-{turn}-{number}", engine.tokenizer.encode(text)[:128], params)
            engine.add(request)
        while engine.has_work:
            engine.step()
    writing = [one for one in seen.steps if one.batched_tokens - one.proposed == one.sequences == len(texts)]
    cuda = config.device != "cpu" and torch.cuda.is_available()
    return cost_of(config.model, config.dtype, config.quantization, cuda, config.kv_cache_dtype), writing


def figures(cost: StepCost, steps: Sequence[StepStats], device: Device) -> dict[str, Any]:
    """Return costs per committed token, and shares of the device's limits."""
    bytes_read, operations = cost.of(steps)
    tokens = sum(one.committed for one in steps)
    target = sum(one.times.target for one in steps)
    total = sum(one.total for one in steps)
    floor = max(bytes_read / device.bytes_per_s, operations / device.flops_per_s)
    return {
        "rounds": len(steps),
        "tokens": tokens,
        "megabytes_per_token": bytes_read / tokens / 1e6,
        "megaflop_per_token": operations / tokens / 1e6,
        "intensity": operations / bytes_read,
        "flops_per_s": operations / target,
        "floor_ms_per_token": floor / tokens * 1e3,
        "target_ms_per_token": target / tokens * 1e3,
        "ms_per_token": total / tokens * 1e3,
        "share_of_target": floor / target,
        "share_of_step": floor / total,
    }
