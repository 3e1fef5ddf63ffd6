"""``benchmarks/report/papers.md`` from the stored pages, and from nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.papers.common import How, Page, Row, Run, Section

HEAD = """# Figures of the papers, and figures of cospec

<!-- Written by `python -m benchmarks.papers` from benchmarks/results/papers. Do not edit. -->

Absolute speeds are not comparable. The papers ran targets of 1.5 to 70 billion parameters on GPUs and NPUs. Measured
figures here are of the small models of the package, on a processor. Simulated figures mostly have assumed times of
large models. Compare which system wins, by which factor, and where the order changes. Prompts of code are HumanEval's,
of math GSM8K's, of prose from *Treasure Island*.
[papers.md](../../docs/papers.md) lists the mechanisms and their files.

The column *how* names the origin of a figure:

* **measured here**, or **measured on a GPU**;
* **emulated**: processes and messages are real, times are injected, and for DSD acceptances too;
* **simulated**: the engine runs on a virtual clock, with drawn or recorded acceptances and computed times;
* **computed**: from an equation, by the policies' code, by drawing what the equation assumes, or from sizes;
* **not run**, with the reason.

The number in brackets leads to the command, the machine and the date below the table. *2 x AMD EPYC* and *AMD EPYC, 2
cores* both name two cores of one processor. The paper's column has the paper's figure or its claim in
words. A value with an equation or a theorem in brackets is computed from the paper's formula, a value with *computed*
from its tables. *A plot*: the paper shows the figure without a number. An empty cell: the paper has no such figure.
Figures that a paper quotes of other systems have no row. Intervals in brackets are 95%. Simulated figures are of one
seed and have no intervals.

"""


def document(pages: Iterable[Page]) -> str:
    """The whole file."""
    pages = list(pages)
    counts = [f"| [{page.title}](#{_anchor(page.title)}) | {' | '.join(map(str, _counts(page)))} |" for page in pages]
    table = ["| paper | " + " | ".join(How) + " |", "| --- " * (len(How) + 1) + "|", *counts]
    return HEAD + "\n".join(table) + "\n\n" + "\n".join(page_text(page) for page in pages)


def page_text(page: Page) -> str:
    """One paper."""
    return f"## {page.title}\n\n" + "\n".join(_section(section) for section in page.sections)


def _counts(page: Page) -> list[int]:
    rows = [row for section in page.sections for row in section.rows]
    return [sum(row.how is how for row in rows) for how in How]


def _section(section: Section) -> str:
    runs: list[Run] = list(dict.fromkeys(row.run for row in section.rows if row.run.command))
    lines = ["| | paper | here | how | note |", "| --- | --- | --- | --- | --- |"]
    lines += [_cells(row, runs.index(row.run) + 1 if row.run.command else None) for row in section.rows]
    sources = [f"{number}. {_source(run)}" for number, run in enumerate(runs, 1)]
    text = f"{section.text}\n\n" if section.text else ""
    below = "\n" + "\n".join(sources) + "\n" if sources else ""
    return f"### {section.title}\n\n{text}" + "\n".join(lines) + "\n" + below


def _cells(row: Row, number: int | None) -> str:
    how = row.how if number is None else f"{row.how} [{number}]"
    cells: Sequence[str] = (row.what, row.paper, row.ours, how, row.note)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _source(run: Run) -> str:
    if not run.date:
        return f"`{run.command}` would give this; it was not run yet."
    return f"`{run.command}`, on {run.machine}, {run.date}."


def _anchor(title: str) -> str:
    """As GitHub makes it."""
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")
