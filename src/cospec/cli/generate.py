"""``cospec generate``: answers a file of prompts."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cospec.cli import options
from cospec.cli.options import present

if TYPE_CHECKING:
    from cospec.cli.batch_io import ResultFile
    from cospec.cli.generate_runner import Result

INTERRUPTED = 130  # exit status of a command that Ctrl-C ended
LONGEST = 256  # tokens of an output by default
WINDOW = 64  # requests in the engine at a time, or ``max_num_seqs`` if larger


def generate(
    prompts: Annotated[
        Path, typer.Option(help='JSON lines: {"id", "turns": [...]} or {"prompt"}; other keys are ignored.')
    ],
    output: Annotated[Path, typer.Option(help="JSON lines to append to; requests with ids in the file are skipped.")],
    model: options.ModelArgument = None,
    models: options.Models = None,
    ensemble: options.OutputDistribution = None,
    collaboration: options.Collaboration = None,
    speculative_config: options.SpeculativeConfig = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    seed: options.Seed = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Longest output, in tokens.", rich_help_panel=options.SAMPLING, show_default=str(LONGEST)),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Continue after the EOS token.", rich_help_panel=options.SAMPLING),
    ] = False,
    sampling_params: options.SamplingJson = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use the chat template for single-turn prompts too.")] = False,
    max_num_seqs: Annotated[
        int | None, typer.Option("--max-num-seqs", "--batch", help="Sequences at once.", rich_help_panel=options.ENGINE)
    ] = None,
    max_model_len: options.MaxModelLen = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    kv_cache_memory_bytes: options.KvCacheMemoryBytes = None,
    weight_cache_bytes: options.WeightCacheBytes = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    quantization: options.Quantization = None,
    kv_cache_dtype: options.KvCacheDtype = None,
    threads: options.Threads = None,
    instruction_set: options.InstructionSet = None,
    native: options.Native = None,
    plugins: options.Plugins = None,
    pipeline_parallel_size: options.PipelineParallelSize = None,
    tensor_parallel_size: options.TensorParallelSize = None,
) -> None:
    """Answer a file of prompts; a second run continues."""
    from cospec.cli.batch_io import ResultFile, key, read_batch
    from cospec.cli.generate_runner import Batch
    from cospec.errors import InvalidInput, words

    params = options.sampling_params(
        sampling_params,
        LONGEST,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos or None,
    )
    batch_requests, warnings = read_batch(prompts)
    if output.exists() and output.samefile(prompts):
        raise InvalidInput("output", words(f"{output}, the file of the prompts"), "another file")
    for warning in warnings:
        _warn(prompts, warning)
    with ResultFile(output) as results:
        left = [batch_request for batch_request in batch_requests if key(batch_request.id) not in results.done]
        failures = 0
        if left:
            from cospec.llm import LLM

            engine_options = present(
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                max_num_batched_tokens=max_num_batched_tokens,
                kv_cache_memory_bytes=kv_cache_memory_bytes,
                weight_cache_bytes=weight_cache_bytes,
                device=device,
                dtype=dtype,
                quantization=quantization,
                kv_cache_dtype=kv_cache_dtype,
                threads=threads,
                instruction_set=instruction_set,
                native=native,
                plugins=plugins or None,
                pipeline_parallel_size=pipeline_parallel_size,
                tensor_parallel_size=tensor_parallel_size,
            )
            chosen = options.chosen_models(models or [], model) | present(
                ensemble=ensemble, collaboration=collaboration
            )
            config = _speculation(speculative_config)
            window = max(WINDOW, 2 * (max_num_seqs or 0))
            with LLM(speculative_config=config, **chosen, **engine_options) as llm:
                failures = _write(Batch(llm.engine, params, chat, window).run(left), results, len(left), prompts)
        elif not warnings:
            why = f"{output} has all answers" if batch_requests else "the file has no prompts"
            _warn(prompts, f"nothing to do, {why}")
    if warnings or failures:
        raise typer.Exit(1)


def _speculation(text: str | None) -> dict[str, object] | None:
    from cospec.config import read_json

    return None if text is None else read_json(text, "speculative_config")


def _write(found: Iterable[Result], results: ResultFile, total: int, prompts: Path) -> int:
    """Write results as they arrive, under a progress bar; return the number of failed requests."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    written = failures = tokens = calls = 0
    try:
        with Progress(*columns, console=Console(stderr=True)) as progress:
            bar = progress.add_task("starting", total=total)
            for result in found:
                if result.row is None:
                    failures += 1
                    _warn(prompts, f"line {result.batch_request.line}: {result.error}")
                else:
                    results.write(result.row)
                    written += 1
                    tokens += result.tokens
                    calls += result.row["stats"]["target_calls"]
                shown = f"{tokens} tokens, {tokens / calls:.2f} per target call" if calls else "no tokens"
                progress.update(bar, advance=1, description=shown)
    except KeyboardInterrupt:
        print(f"Interrupted after {written} of {total}; run the same command to continue.", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    return failures


def _warn(path: Path, warning: str) -> None:
    print(f"{path}: {warning}", file=sys.stderr)
