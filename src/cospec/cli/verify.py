"""``cospec verify``: shows on this machine that speculation changes the speed and nothing else."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cospec.cli import options
from cospec.cli.options import present
from cospec.cli.output_paths import check_file, writing

if TYPE_CHECKING:
    from rich.console import Console

    from cospec.verify.context import Check


def verify(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="zoo, zoo:NAME, a folder, a GGUF file, or a hub name; several form the ensemble of --ensemble.",
            show_default="zoo",
        ),
    ] = None,
    speculative_config: options.SpeculativeConfig = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and shorter outputs.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Save every check to this file.")
    ] = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    instruction_set: options.InstructionSet = None,
    native: options.Native = None,
    ensemble: options.OutputDistribution = None,
    collaboration: options.Collaboration = None,
    plugins: options.Plugins = None,
    logits_processors: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="""Also check logits processors, such as '{"my-processor": {"size": 3}}'."""),
    ] = None,
) -> None:
    """Check on this machine that decoding is exact.

    The checks are enumeration, greedy identity, chi-square, drafter invariance and logits processors. Exit status 1 on
    a failure.
    """
    from rich.console import Console

    from cospec.config import read_json
    from cospec.verify import suite

    check_file(json_file, "json")
    started = time.monotonic()
    speculative = None if speculative_config is None else read_json(speculative_config, "speculative_config")
    blended = None if ensemble is None else read_json(ensemble, "ensemble")
    proposals = None if collaboration is None else read_json(collaboration, "collaboration")
    given = present(device=device, dtype=dtype, threads=threads, instruction_set=instruction_set, native=native)
    given |= present(ensemble=blended, collaboration=proposals, plugins=plugins or None)
    names = models or ["zoo"]
    processors = None if logits_processors is None else read_json(logits_processors, "logits_processors")
    context = suite.context_of_llm(names, speculative, quick, processors, **given)
    console = Console()
    checks = []
    with console.status("loading") as status:
        for check in suite.run_checks(context):
            checks.append(check)
            status.update(f"{check.check_group}: {check.name}")
    seconds = time.monotonic() - started
    _print(console, checks, seconds)
    if json_file is not None:
        about: dict[str, object] = {
            "models": names,
            "ensemble": blended,
            "speculative_config": speculative,
            "quick": quick,
            "logits_processors": processors,
        }
        _write(json_file, about, checks, seconds)
    if not all(check.passed for check in checks):
        raise typer.Exit(1)


def _print(console: Console, checks: list[Check], seconds: float) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("check_group", "check", "found", "wanted", "", box=None)
    for check in checks:
        verdict = Text("pass", "green") if check.passed else Text("FAIL", "bold red")
        table.add_row(Text(check.check_group), Text(check.name), Text(check.found), Text(check.wanted), verdict)
    console.print(table)
    for check in checks:
        for note in check.notes:
            console.print(Text(f"{check.check_group}, {check.name}: {note}"))
    failed = sum(not check.passed for check in checks)
    outcome = f"{failed} of {len(checks)} checks failed" if failed else f"all {len(checks)} checks passed"
    console.print(Text(f"{outcome} in {seconds:.0f} s"))
    console.print(Text(f"An exact engine fails such a run with probability {_false_alarm(checks):.0e}."))


def _false_alarm(checks: list[Check]) -> float:
    """Return an upper bound of the probability that an exact engine fails at least one of ``checks``."""
    return sum(check.false_alarm for check in checks)


def _write(path: Path, about: dict[str, object], checks: list[Check], seconds: float) -> None:
    from dataclasses import asdict

    found = {**about, "seconds": round(seconds, 1), "passed": all(check.passed for check in checks)}
    found["false_alarm"] = _false_alarm(checks)
    text = json.dumps({**found, "checks": [asdict(check) for check in checks]}, indent=1)
    with writing(path, "json"):
        path.write_text(text + "\n", encoding="utf-8")
