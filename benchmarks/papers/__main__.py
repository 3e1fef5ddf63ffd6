"""``python -m benchmarks.papers``: prints and stores every page, and writes ``benchmarks/report/papers.md``."""

from benchmarks.papers.command import PAPERS, main

if __name__ == "__main__":
    main(*PAPERS)
