"""The findings of ``cospec doctor`` as plain data: installation, machine, memory plan, smoke test."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cospec.config import EngineConfig
from cospec.errors import ModelError
from cospec.native import library

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "fastapi", "uvicorn", "msgspec")
PROMPT = "Question: Tom has 3 apples and buys 4 more. How many apples does he have?\nAnswer:"
TOKENS = 16  # tokens of the smoke test's answer
FEW_CORES = 2
SWAP = 256 << 20  # bytes in use that show more than a few idle pages
MEMORY_FILES = ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree")


def versions() -> dict[str, str | None]:
    """Return the installed versions; None for a missing package."""
    import cospec

    found: dict[str, str | None] = {"cospec": cospec.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def machine() -> dict[str, Any]:
    """Return processors and memory; bytes are None if the system does not report the value."""
    from cospec.profiling.store import machine as known

    memory = memory_info()
    swap = memory["SwapTotal"] - memory["SwapFree"] if "SwapTotal" in memory else None
    return {
        "system": platform.platform(),
        "processor": known("cpu")["device"],
        "cores": cores(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "memory_bytes": memory.get("MemTotal"),
        "available_bytes": memory.get("MemAvailable"),
        "swap_used_bytes": swap,
        "cuda": _cuda(),
    }


def cores() -> int:
    """Return the processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def kernels(threads: int | None) -> dict[str, Any]:
    """Describe the native kernels: whether they were built, the instruction set in use, and the available sets."""
    from cospec.assembly.drafters import set_threads

    set_threads(threads)
    if not library.available():
        return {"native": False, "reason": library.why_not(), "isa": None, "available": [], "threads": None}
    usable = list(library.offered())
    return {"native": True, "reason": "", "isa": library.isa(), "available": usable, "threads": library.threads()}


def memory(config: EngineConfig) -> dict[str, Any]:
    """Return the memory plan of a model and its drafter.

    Raises:
        CospecError: the model cannot be served here; the message is one sentence.
    """
    from cospec.assembly.build import memory_plan_of
    from cospec.metrics.start_report import parameters
    from cospec.models.model_folder import resolve

    planned, drafting = memory_plan_of(config)
    return {
        "model": config.model,
        "parameters": parameters(resolve(config.model)),
        "speculation": drafting,
        "weights": [{"model": each.model, "formats": each.formats, "bytes": each.bytes} for each in planned.weights],
        "kv_cache_dtypes": list(planned.cache_dtypes),
        "kv_cache_bytes_per_token": planned.token_bytes,
        "kv_cache_tokens": planned.kv_cache_tokens,
        "max_model_len": planned.max_model_len,
        "total_bytes": planned.bytes,
        "cut": planned.cut,
        "slow": planned.slow,
    }


def weight_cache() -> dict[str, Any]:
    """Describe the cache of packed weights: folder, models, bytes, and the limit."""
    from cospec.models import weight_cache as cache

    models, size = cache.usage()
    limit = cache.WeightCache.of(None).max_bytes
    return {"folder": str(cache.folder()), "models": models, "bytes": size, "max_bytes": limit}


def smoke_test() -> dict[str, Any]:
    """Answer one prompt with the zoo's target: with native kernels, with torch's kernels, and with drafts.

    All runs compute in float32, because near-ties then do not depend on the order of a sum.

    Raises:
        CospecError: the zoo is missing or cannot run.
    """
    from cospec.models.model_folder import zoo_members

    if "target" not in zoo_members():
        raise ModelError("The smoke test needs the zoo, which this installation lacks.")
    plain = {"speculative_config": {"method": "off"}}
    ways: dict[str, dict[str, Any]] = {
        "torch": {**plain, "linear_backend": "torch", "attention_backend": "sdpa"},
        "drafted": {"speculative_config": {"num_speculative_tokens": 3}},
    }
    if library.available():
        ways["native"] = {**plain, "linear_backend": "native", "attention_backend": "native"}
    texts = {name: smoke_test_text(options) for name, options in ways.items()}
    return {"prompt": PROMPT, "texts": texts, "equal": len(set(texts.values())) == 1}


def smoke_test_text(options: Mapping[str, Any]) -> str:
    """Return the text that the zoo's target generates with these options of ``LLM``."""
    from cospec import LLM, SamplingParams

    common: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "kv_cache_memory_bytes": 1 << 23,
        "measure_at_start": False,
    }
    with LLM("zoo", **common, **options) as llm:
        (found,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=TOKENS))
    return found.outputs[0].text


def slow(found: Mapping[str, Any]) -> list[str]:
    """List reasons why this machine or this model is slow, one sentence each, with the remedy.

    Args:
        found: the parts ``machine``, ``kernels`` and ``memory`` of a report; ``memory`` may be None.
    """
    here, built, memory_plan_of = found["machine"], found["kernels"], found["memory"]
    reasons = []
    if not built["native"]:
        reasons.append(
            f"CPU models run on torch's kernels, because {built['reason']}; install g++ or clang++ and install cospec "
            "again."
        )
    elif "bf16" not in built["isa"] and (memory_plan_of is None or "bf16" in memory_plan_of["weights"][0]["formats"]):
        reasons.append(
            f"The instruction set is {built['isa']}, which has no bfloat16 products, so the kernels emulate them; "
            "compare the speed with --dtype float32."
        )
    if built["threads"] is not None and built["threads"] < here["cores"]:
        reasons.append(f"The kernels use {built['threads']} of {here['cores']} processors; see --threads.")
    if here["cores"] <= FEW_CORES:
        reasons.append(f"This process may use {here['cores']} processors only; more of them give more tokens/s.")
    if here["load"] is not None and here["load"] > 0.5 * here["cores"]:
        reasons.append(f"Other processes use the processors: the load is {here['load']} on {here['cores']} processors.")
    if (here["swap_used_bytes"] or 0) > SWAP:
        reasons.append(f"The system has moved {here['swap_used_bytes'] >> 20} MiB to swap; end other processes.")
    if memory_plan_of is not None:
        if memory_plan_of["slow"]:
            reasons.append(
                f"{memory_plan_of['model']} runs in transformers' layers, because the model {memory_plan_of['slow']}."
            )
        if memory_plan_of["cut"]:
            reasons.append(f"A sequence has at most {memory_plan_of['max_model_len']} tokens: {memory_plan_of['cut']}.")
        if memory_plan_of["speculation"] == "off":
            reasons.append("No drafter speeds the model up; see docs/reference/options.md.")
    return reasons


def problems(found: Mapping[str, Any]) -> list[str]:
    """List the problems of the installation: missing packages, too little memory, smoke test texts that differ."""
    wrong = [f"The package {name} is missing." for name, value in found["versions"].items() if value is None]
    here, memory_plan_of, smoke = found["machine"], found["memory"], found["smoke_test"]
    if memory_plan_of is not None and here["available_bytes"] is not None and here["cuda"] is None:
        needed = sum(each["bytes"] for each in memory_plan_of["weights"])
        if needed > here["available_bytes"]:
            free = here["available_bytes"] >> 20
            wrong.append(f"The weights take {needed >> 20} MiB, while {free} MiB of memory are available.")
    if smoke is not None and not smoke["equal"]:
        wrong.append(f"The smoke test's texts differ: {smoke['texts']}.")
    return wrong


def memory_info() -> dict[str, int]:
    """Return bytes by name from ``/proc/meminfo``; empty if the file does not exist."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux
        return {}
    pairs = (line.split(":") for line in lines)
    return {name: int(value.split()[0]) * 1024 for name, value in pairs if name in MEMORY_FILES}


def _cuda() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
