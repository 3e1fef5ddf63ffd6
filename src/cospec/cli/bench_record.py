"""``cospec bench record``: writes the proposals along recorded outputs for ``cospec simulate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cospec.cli import bench_common as output
from cospec.cli import bench_options as bench
from cospec.cli import options
from cospec.cli.bench_options import grouped
from cospec.cli.options import present
from cospec.cli.output_paths import check_file, writing
from cospec.errors import InvalidInput, words

Recorded = Annotated[
    list[str],
    typer.Option("--drafter", metavar="NAME=MODEL", help="A drafter with the target's vocabulary; may be repeated."),
]


@grouped
def record(
    prompts: bench.PromptFlags,
    engine: bench.EngineFlags,
    to: Annotated[Path, typer.Option("--output", metavar="FILE.npz", help="File for the recording.")],
    drafter: Recorded = [],  # noqa: B006
    model: options.Models = None,
    ensemble: options.OutputDistribution = None,
    num_prompts: bench.NumPrompts = 48,
    output_len: bench.OutputLen = 64,
    depth: Annotated[int, typer.Option(min=1, max=32, help="Tokens of each recorded draft.")] = 8,
) -> None:
    """Record what drafters propose along greedy outputs. The models of an ensemble may take the place of drafters.

    A scenario's key recording names the file.
    """
    from cospec.assembly.drafters import set_threads
    from cospec.bench.record import record as recording
    from cospec.ensemble.ensemble import distinct
    from cospec.llm import LLM
    from cospec.models.loading import load_model
    from cospec.sampling_params import SamplingParams

    check_file(to, "output", ".npz")
    targets = model or ["zoo"]
    members = dict(zip(distinct(targets), targets, strict=True)) if len(targets) > 1 else {}
    models = members | dict(map(_drafter, drafter))
    if not models:
        raise InvalidInput("drafter", words("missing"), "NAME=MODEL, or several models that form an ensemble")
    texts, common = prompts.take(num_prompts), engine.given(*targets) | present(ensemble=ensemble)
    set_threads(engine.threads)
    with LLM(speculative_config={"method": "off"}, **common) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        found = llm.generate([prompt.text for prompt in texts], params)
        vocab_size = llm.engine.vocab_size
        written = [
            (prompt.category, tuple(one.prompt_token_ids or ()), tuple(one.outputs[0].token_ids))
            for prompt, one in zip(texts, found, strict=True)
        ]
    loaded = {name: load_model(path) for name, path in models.items()}
    for name, one in loaded.items():
        if one.vocab_size != vocab_size:
            raise InvalidInput("drafter", f"{name}={models[name]}", f"a model with {vocab_size} tokens")
    with output.ProgressBar(len(loaded)) as bar:
        made = recording(loaded, written, vocab_size, depth, bar.advance)
    with writing(to, "output"):
        made.save(to)
    typer.echo(f"{made.tokens.shape[1]} positions of {len(written)} requests, {len(loaded)} models: {to}")


def _drafter(text: str) -> tuple[str, str]:
    name, mark, path = text.partition("=")
    if not name or not mark or not path:
        raise InvalidInput("drafter", text, "NAME=MODEL")
    return name, path
