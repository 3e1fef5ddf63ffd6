"""``cospec calibrate``: fits the key tokens of the blend ``adaptive`` on reference answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from cospec.cli import options
from cospec.cli.options import present
from cospec.errors import InvalidInput, reason, words


def calibrate(
    model: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="The target: zoo, zoo:NAME, a folder, a GGUF file, or a hub name."),
    ],
    drafter: Annotated[str, typer.Argument(metavar="DRAFTER", help="The drafter, with the target's vocabulary.")],
    references: Annotated[
        Path, typer.Option(metavar="FILE", help="JSON lines with prompt (or turns) and reference, the answer.")
    ],
    max_divergence: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Most total variation from the target at any position.")
    ] = 0.1,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Most loss of the answers' log-likelihood, in nats per token.")
    ] = 0.01,
    limit: Annotated[int, typer.Option(min=1, help="Most answers that are read.")] = 40,
    threads: options.Threads = None,
    instruction_set: options.InstructionSet = None,
) -> None:
    """Fit the blend adaptive to reference answers.

    The fit finds key tokens. Prints the option --ensemble with lambda1, lambda2 and lambda3, and its gain and loss.
    """
    from cospec.assembly.drafters import set_threads
    from cospec.config import EngineConfig
    from cospec.ensemble.key_token_calibration import calibrate as fit
    from cospec.ensemble.key_token_calibration import read_answers
    from cospec.llm import LLM
    from cospec.models.loading import load_model, resolve
    from cospec.native.library import use_instruction_set

    answers = read_references(references, limit)
    config = EngineConfig.build(present(threads=threads, instruction_set=instruction_set))
    set_threads(config.threads)
    use_instruction_set(config.instruction_set)
    llm = LLM(model, {"method": "off"}, **present(threads=threads))
    texts = [(llm.encode(prompt), llm.encode(answer)) for prompt, answer in answers]
    rows = read_answers([llm.engine.parts.model, load_model(str(resolve(drafter)))], texts)
    found = fit(rows, max_divergence, tolerance)
    exact = fit(rows, 0.0, 0.0)
    typer.echo(json.dumps({"method": "adaptive", **found.options.model_dump()}))
    typer.echo(
        f"{len(rows)} tokens: acceptance rate {found.acceptance:.3f} instead of {exact.acceptance:.3f}, "
        f"loss {found.loss:.4f} nats per token, mean divergence {found.divergence:.4f}."
    )


def read_references(path: Path, limit: int) -> list[tuple[str, str]]:
    """Return at most ``limit`` prompts with their reference answers.

    Raises:
        InvalidInput: the file is unreadable, or a line has no prompt or no answer.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput("references", str(path), f"a readable file of JSON lines ({reason(error)})") from None
    return [_pair(line, number) for number, line in enumerate(lines, 1) if line.strip()][:limit]


def _pair(line: str, number: int) -> tuple[str, str]:
    try:
        given: Any = json.loads(line)
    except ValueError:
        given = None
    row = given if isinstance(given, Mapping) else {}
    turns = row.get("turns") or [row.get("prompt")]
    prompt, answer = turns[0] if isinstance(turns, list) else None, row.get("reference")
    if not isinstance(prompt, str) or not isinstance(answer, str) or not prompt or not answer:
        allowed = "an object with prompt (or turns) and reference, both texts"
        raise InvalidInput(f"references, line {number}", words(line[:40]), allowed)
    return prompt, answer
