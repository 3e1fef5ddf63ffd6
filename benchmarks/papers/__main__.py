"""``python -m benchmarks.papers``: prints every page, stores it, and writes ``docs/results.md``."""

from __future__ import annotations

from benchmarks.common import ROOT
from benchmarks.papers.command import PAPERS, main
from benchmarks.papers.common import load
from benchmarks.papers.render import document


def write_document() -> None:
    """``docs/results.md`` from the stored pages."""
    pages = [page for name in PAPERS if (page := load(name)) is not None]
    (ROOT / "docs" / "results.md").write_text(document(pages), encoding="utf-8")


if __name__ == "__main__":
    main(*PAPERS)
    write_document()
