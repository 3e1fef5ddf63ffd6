"""What running a page does: its cheap sources where that is asked for, then the page."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import import_module
from multiprocessing import get_context

from rich.console import Console

from benchmarks.common import ROOT
from benchmarks.papers.common import How, Page, load, save, show
from benchmarks.papers.render import document
from benchmarks.papers.sources import Results, Source, make

PAPERS = ("cosine", "dsd", "cos", "smartspec", "minions")
WORKERS = 2
REPORT = ROOT / "benchmarks" / "report" / "papers.md"


def main(*names: str) -> None:
    """Print and store the pages of ``names``, and write ``benchmarks/report/papers.md`` from all stored pages."""
    parser = argparse.ArgumentParser(description="A paper's tables and figures, compared with ours.")
    parser.add_argument(
        "--run", nargs="*", metavar="SOURCE", help="run the sources that take seconds first; none named: all of them"
    )
    options = parser.parse_args()
    console = Console(width=200)
    if options.run is not None:
        run(names, options.run)
    for name in names:
        show(build(name), console)
    pages = [page for name in PAPERS if (page := load(name)) is not None]
    REPORT.write_text(document(pages), encoding="utf-8")


def build(name: str) -> Page:
    """One page, stored."""
    page: Page = import_module(f"benchmarks.papers.{name}").page(Results(name))
    save(page)
    return page


def run(names: Sequence[str], words: Sequence[str] = ()) -> None:
    """The sources of some pages with one of ``words`` in their name, all without words.

    Simulations count on a clock of their own, so two run at a time; what is measured runs alone after them.
    """
    found = {source.file: (name, source) for name in names for source in sources(name)}
    wanted = {file: one for file, one in found.items() if not words or any(word in file for word in words)}
    virtual = {file: name for file, (name, source) in wanted.items() if source.how is How.SIMULATED}
    with ProcessPoolExecutor(WORKERS, get_context("spawn")) as pool:
        jobs = {pool.submit(again, name, file): file for file, name in virtual.items()}
        for job in as_completed(jobs):
            print(f"{jobs[job]}: {job.result():.0f} s", flush=True)
    for file, (name, _) in wanted.items():
        if file not in virtual:
            print(f"{file}: {again(name, file):.0f} s", flush=True)


def sources(name: str) -> list[Source]:
    """Those of a page that can be run from here."""
    found: Sequence[Source] = import_module(f"benchmarks.papers.{name}").SOURCES
    return [source for source in found if source.make is not None]


def again(name: str, file: str) -> float:
    """Make one source of a page; the seconds it took."""
    started = time.monotonic()
    for source in sources(name):
        if source.file == file:
            make(source)
    return time.monotonic() - started
