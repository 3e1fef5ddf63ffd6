"""``cospec generate``: answer a file of prompts."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cospec.cli import options
from cospec.cli.options import present

if TYPE_CHECKING:
    from cospec.cli.batch import Result
    from cospec.cli.batch_io import ResultFile

INTERRUPTED = 130  # what a shell reports of a command that was ended by Ctrl-C
LONGEST = 256  # tokens of an output, unless given
WINDOW = 64  # jobs in the engine at a time, unless more sequences may run at once


def generate(
    prompts: Annotated[
        Path, typer.Option(help='JSON lines: {"id", "turns": [...]} or {"prompt"}; other keys are ignored.')
    ],
    output: Annotated[Path, typer.Option(help="JSON lines to append to; ids that it holds are skipped.")],
    model: options.Models = None,
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
        bool, typer.Option("--ignore-eos", help="Write on behind the end.", rich_help_panel=options.SAMPLING)
    ] = False,
    sampling_params: options.SamplingJson = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put prompts of one turn into the chat template too.")] = False,
    max_num_seqs: Annotated[
        int | None, typer.Option("--max-num-seqs", "--batch", help="Sequences at once.", rich_help_panel=options.ENGINE)
    ] = None,
    max_model_len: options.MaxModelLen = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    kv_cache_memory_bytes: options.KvCacheMemoryBytes = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    quantization: options.Quantization = None,
    threads: options.Threads = None,
    instruction_set: options.InstructionSet = None,
    plugins: options.Plugins = None,
) -> None:
    """Answer prompts from a file into a file; run it again to go on after an interruption."""
    from cospec.cli.batch import Batch
    from cospec.cli.batch_io import ResultFile, key, read_jobs
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
    jobs, complaints = read_jobs(prompts)
    if output.exists() and output.samefile(prompts):
        raise InvalidInput("output", words(f"{output}, the file of the prompts"), "another file")
    for complaint in complaints:
        _complain(prompts, complaint)
    with ResultFile(output) as results:
        left = [job for job in jobs if key(job.id) not in results.done]
        failures = 0
        if left:
            from cospec.llm import LLM

            engine_options = present(
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                max_num_batched_tokens=max_num_batched_tokens,
                kv_cache_memory_bytes=kv_cache_memory_bytes,
                device=device,
                dtype=dtype,
                quantization=quantization,
                threads=threads,
                instruction_set=instruction_set,
                plugins=plugins or None,
            )
            chosen = options.chosen_models(model or []) | present(ensemble=ensemble, collaboration=collaboration)
            config = _speculation(speculative_config)
            window = max(WINDOW, 2 * (max_num_seqs or 0))
            with LLM(speculative_config=config, **chosen, **engine_options) as llm:
                failures = _write(Batch(llm.engine, params, chat, window).run(left), results, len(left), prompts)
        elif not complaints:
            why = f"{output} has all of the answers" if jobs else "it holds no prompts"
            _complain(prompts, f"nothing to do, {why}")
    if complaints or failures:
        raise typer.Exit(1)


def _speculation(text: str | None) -> dict[str, object] | None:
    from cospec.config import read_json

    return None if text is None else read_json(text, "speculative_config")


def _write(found: Iterable[Result], results: ResultFile, total: int, prompts: Path) -> int:
    """Write results as they come, under a progress bar; returns how many jobs failed."""
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
                    _complain(prompts, f"line {result.job.line}: {result.error}")
                else:
                    results.write(result.row)
                    written += 1
                    tokens += result.tokens
                    calls += result.row["stats"]["target_calls"]
                told = f"{tokens} tokens, {tokens / calls:.2f} per target call" if calls else "no tokens"
                progress.update(bar, advance=1, description=told)
    except KeyboardInterrupt:
        print(f"Interrupted after {written} of {total}; run the same command to go on.", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    return failures


def _complain(path: Path, complaint: str) -> None:
    print(f"{path}: {complaint}", file=sys.stderr)
