"""What running a page does: its cheap sources where that is asked for, then the page."""

from __future__ import annotations

import argparse
from collections.abc import Sequence as Seq
from importlib import import_module

from rich.console import Console

from benchmarks.common import ROOT
from benchmarks.papers.common import Page, load, save, show
from benchmarks.papers.render import document
from benchmarks.papers.sources import Results, make

PAPERS = ("cosine", "dsd", "cos", "smartspec", "minions")


def main(*names: str) -> None:
    """Print and store the pages of ``names``, and write ``docs/results.md`` from all that are stored."""
    parser = argparse.ArgumentParser(description="A paper's tables and figures beside ours.")
    parser.add_argument(
        "--run", nargs="*", metavar="SOURCE", help="run the sources that take seconds first; none named: all of them"
    )
    options = parser.parse_args()
    console = Console(width=200)
    for name in names:
        show(build(name, options.run), console)
    pages = [page for name in PAPERS if (page := load(name)) is not None]
    (ROOT / "docs" / "results.md").write_text(document(pages), encoding="utf-8")


def build(name: str, run: Seq[str] | None = None) -> Page:
    """One page, stored; ``run`` None runs no source, no words run all, words those with one of them in their name."""
    module = import_module(f"benchmarks.papers.{name}")
    for source in module.SOURCES if run is not None else ():
        if not run or any(word in source.file for word in run):
            print("running", source.file, flush=True)
            make(source)
    page: Page = module.page(Results(name))
    save(page)
    return page
