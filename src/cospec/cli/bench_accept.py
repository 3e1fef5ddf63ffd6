"""``cospec bench accept``: measures the acceptance of drafters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cospec.cli import bench_common as output
from cospec.cli import bench_options as bench
from cospec.cli import options
from cospec.cli.bench_options import grouped
from cospec.errors import InvalidInput

if TYPE_CHECKING:
    from cospec.bench.acceptance import Row

Drafters = Annotated[
    list[str],
    typer.Option(
        "--drafter",
        metavar="NAME=JSON",
        help="A name and its speculative_config, or a method; may be repeated.",
        show_default="draft_model",
    ),
]


@grouped
def accept(
    prompts: bench.PromptFlags,
    engine: bench.EngineFlags,
    results: bench.ResultFlags,
    drafter: Drafters = [],  # noqa: B006
    model: options.Model = "zoo",
    num_prompts: bench.NumPrompts = 30,
    output_len: bench.OutputLen = 128,
    temperature: Annotated[list[float], typer.Option(min=0, help="May be repeated.")] = [0.0],  # noqa: B006
) -> None:
    """Measure the acceptance of drafters.

    The table is by drafter, domain, temperature and position, with intervals over prompts.
    """
    output.require()
    from cospec.bench import acceptance as measured
    from cospec.config import EngineConfig

    to, texts, common = results.place(), prompts.take(num_prompts), engine.given(model)
    drafters: dict[str, Mapping[str, Any]] = dict(map(_drafter, drafter or ["draft_model"]))
    configs = {
        name: EngineConfig.build({**common, "speculative_config": speculative})
        for name, speculative in drafters.items()
    }
    rows: list[Row] = []
    with output.ProgressBar(len(drafters)) as bar:
        for name, config in configs.items():
            bar.describe(name)
            rows += measured.measure(name, config, texts, temperature, output_len)
            bar.advance()
    _show_rows(rows)
    settings = {**common, "drafters": drafters, "num_prompts": num_prompts, "output_len": output_len}
    output.write(output.complete("accept", {**settings, "seed": prompts.seed}, {"runs": measured.as_runs(rows)}), to)


def _drafter(text: str) -> tuple[str, Mapping[str, Any]]:
    """Parse ``NAME=JSON`` or a method's name. The default policy is ``fixed``, so that the drafter always drafts."""
    from cospec.config import read_json

    name, mark, value = text.partition("=")
    if not name or name.startswith("{"):
        raise InvalidInput("drafter", text, "NAME=JSON, or the name of a method")
    given = read_json(value, f"drafter {name}") if mark else {"method": name}
    return name, {"policy": "fixed", **given}


def _show_rows(rows: Iterable[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    head = (
        "drafter",
        "domain",
        "T",
        "prompts",
        "α",
        "of proposed",
        "mean length",
        "calls / token",
        "by position",
    )
    table = Table(*head, title="acceptance, with 95% intervals over prompts")
    for row in rows:
        places = " ".join("-" if one.value is None else f"{one.value:.2f}" for one in row.by_position)
        figures = (row.alpha, row.draft_acceptance_rate, row.mean_acceptance_length, row.calls_per_token)
        table.add_row(
            row.drafter, row.domain, f"{row.temperature:g}", str(row.prompts), *map(str, figures), places or "-"
        )
    Console().print(table)
