"""The stored pages of the papers are what the stored results give today, and the report is what the pages give."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("cosine", "dsd", "cos", "smartspec", "minions")


@pytest.fixture
def papers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module


def anywhere(page: Any) -> Any:
    """The page without the machine and the day of its own command, which differ wherever it runs."""
    own = replace(page.run, machine="", date="")

    def row(given: Any) -> Any:
        return replace(given, run=own) if given.run.command == own.command else given

    sections = tuple(replace(each, rows=tuple(map(row, each.rows))) for each in page.sections)
    return replace(page, sections=sections, run=own)


@pytest.mark.parametrize("name", NAMES)
def test_a_stored_page_is_what_the_stored_results_give(papers: Any, name: str) -> None:
    """After a change of results or texts, ``python -m benchmarks.papers`` writes the pages again."""
    common, sources = papers("benchmarks.papers.common"), papers("benchmarks.papers.sources")
    built = papers(f"benchmarks.papers.{name}").page(sources.Results(name))
    stored = common.load(name)
    for own, other in zip(anywhere(stored).sections, anywhere(built).sections, strict=True):
        assert own == other, own.title
    assert anywhere(stored) == anywhere(built)


def test_the_report_is_what_the_stored_pages_give(papers: Any) -> None:
    command, common = papers("benchmarks.papers.command"), papers("benchmarks.papers.common")
    pages = [common.load(name) for name in command.PAPERS]
    assert command.REPORT.read_text(encoding="utf-8") == papers("benchmarks.papers.render").document(pages)
