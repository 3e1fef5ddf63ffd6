"""What a comparison with a paper is made of: rows in sections on a page, each figure with where it comes from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.common import ROOT

RESULTS = ROOT / "benchmarks" / "results"
PAGES = RESULTS / "papers"
PLOT = "a plot"  # the paper shows the figure without a number


class How(StrEnum):
    """How a figure of ours came about."""

    MEASURED = "measured here"
    GPU = "measured on a GPU"
    EMULATED = "emulated"
    SIMULATED = "simulated"
    COMPUTED = "computed"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Run:
    """What gave a figure, or would: the command; where and when it ran, both empty where it did not."""

    command: str
    machine: str = ""
    date: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: what it is of, what the paper says (empty where it says nothing), what came out here."""

    what: str
    paper: str
    ours: str
    how: How
    run: Run
    note: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A table or figure of the paper."""

    title: str
    rows: tuple[Row, ...]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """All of one paper.

    Attributes:
        name: of the file and of the module that made it.
        run: that made the page.
    """

    name: str
    title: str
    sections: tuple[Section, ...]
    run: Run

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Page:
        """Back from what ``save`` wrote."""
        sections = tuple(
            Section(each["title"], tuple(_row(row) for row in each["rows"]), each["text"]) for each in given["sections"]
        )
        return cls(given["name"], given["title"], sections, Run(**given["run"]))


def paragraph(*sentences: str) -> str:
    """The text of a section; sentences without figures are empty and left out."""
    return " ".join(filter(None, sentences))


def unclear(low: float, high: float) -> str:
    """Words after an interval of a ratio that includes 1; else empty."""
    return ", no clear difference" if low <= 1.0 <= high else ""


def save(page: Page, folder: Path = PAGES) -> Path:
    """Write ``<name>.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{page.name}.json"
    path.write_text(json.dumps(asdict(page), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def load(name: str, folder: Path = PAGES) -> Page | None:
    """A stored page; None where there is none."""
    path = folder / f"{name}.json"
    return Page.from_json(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def show(page: Page, console: Console) -> None:
    """One table for each section."""
    console.print(f"[bold]{escape(page.title)}[/]")
    for section in page.sections:
        table = Table("", "paper", "here", "how", "note", title=section.title, title_justify="left", expand=True)
        for row in section.rows:
            table.add_row(*(escape(cell) for cell in (row.what, row.paper, row.ours, row.how, row.note)))
        console.print(table)


def _row(given: Mapping[str, Any]) -> Row:
    return Row(**{**given, "how": How(given["how"]), "run": Run(**given["run"])})
