"""``cospec doctor``: checks the installation, the memory for a model, the engine and the speed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cospec.cli import options
from cospec.cli.options import present

if TYPE_CHECKING:
    from cospec.config import EngineConfig


def doctor(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="The model to plan for: zoo, zoo:NAME, a folder, a GGUF file, or a hub name."
        ),
    ] = "zoo",
    speculative_config: options.SpeculativeConfig = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    smoke: Annotated[
        bool, typer.Option("--smoke-test/--no-smoke-test", help="Generate a few tokens with the zoo.")
    ] = True,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = None,
    kv_cache_memory_bytes: options.KvCacheMemoryBytes = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    quantization: options.Quantization = None,
    kv_cache_dtype: options.KvCacheDtype = None,
    threads: options.Threads = None,
) -> None:
    """Check the installation, the memory and the engine. Lists what is slow. Exit status 1 on a problem."""
    from cospec.config import EngineConfig

    given = present(
        speculative_config=speculative_config,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        device=device,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        threads=threads,
    )
    found = examine(EngineConfig.build({"model": model, **given}), smoke)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        for line in _lines(found):
            print(line)
    if found["problems"]:
        raise typer.Exit(1)


def examine(config: EngineConfig, smoke: bool) -> dict[str, Any]:
    """Return all findings. A failed part is None, and its error is among the problems.

    Args:
        smoke: whether to run the smoke test.
    """
    from cospec.cli import doctor_checks
    from cospec.errors import CospecError

    failed: list[str] = []

    def attempt(part: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        try:
            return part()
        except CospecError as error:
            failed.append(str(error))
            return None

    found: dict[str, Any] = {
        "versions": doctor_checks.versions(),
        "machine": doctor_checks.machine(),
        "kernels": doctor_checks.kernels(config.threads),
        "memory": attempt(lambda: doctor_checks.memory(config)),
        "weight_cache": attempt(doctor_checks.weight_cache),
        "smoke_test": attempt(doctor_checks.smoke_test) if smoke else None,
    }
    return {**found, "slow": doctor_checks.slow(found), "problems": failed + doctor_checks.problems(found)}


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the findings as lines of text."""
    here, built = found["machine"], found["kernels"]
    yield "installed: " + ", ".join(f"{name} {value or 'missing'}" for name, value in found["versions"].items())
    yield f"machine: {here['processor']}, {here['cores']} processors, {here['system']}"
    if here["memory_bytes"] is not None:
        yield f"memory: {_mib(here['available_bytes'])} available of {_mib(here['memory_bytes'])}"
    yield f"GPU: {here['cuda'] or 'none'}"
    if built["native"]:
        from cospec.metrics.start_report import of_threads

        usable = ", ".join(built["available"])
        yield f"kernels: native, {built['isa']} (available: {usable}); {of_threads(built['threads'])}"
    else:
        yield f"kernels: torch's, because {built['reason']}"
    if found["memory"] is not None:
        yield from _plan(found["memory"])
    if found["weight_cache"] is not None:
        kept = found["weight_cache"]
        models = "1 model" if kept["models"] == 1 else f"{kept['models']} models"
        used = f"{models}, {_mib(kept['bytes'])} of {_mib(kept['max_bytes'])} in {kept['folder']}"
        yield f"packed weights on disk: {used if kept['max_bytes'] else 'off'}"
    if found["smoke_test"] is not None:
        ways = ", ".join(found["smoke_test"]["texts"])
        yield f"smoke test: {'equal texts' if found['smoke_test']['equal'] else 'texts differ'} ({ways})"
    yield from (f"slow: {reason}" for reason in found["slow"])
    yield from (f"problem: {problem}" for problem in found["problems"])
    if not found["problems"]:
        yield "no problems"


def _plan(plan: Mapping[str, Any]) -> Iterator[str]:
    from cospec.metrics.start_report import count

    weights = " + ".join(f"{_mib(each['bytes'])} {each['formats']}" for each in plan["weights"])
    each_token = plan["kv_cache_bytes_per_token"]
    cache = f"{_mib(plan['kv_cache_tokens'] * each_token)} {' + '.join(plan['kv_cache_dtypes'])}"
    yield f"model: {plan['model']}, {count(plan['parameters'])} parameters"
    yield f"speculation: {plan['speculation']}"
    yield f"plan: weights {weights}; KV cache {cache} for {plan['kv_cache_tokens']:,} tokens of {each_token:,} bytes"
    yield f"longest sequence: {plan['max_model_len']:,} tokens"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
