"""Lines of tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Found = Mapping[str, Any]


def heading(*names: str) -> Iterator[str]:
    """Yield the names of columns and the line below."""
    yield line(*names)
    yield "| --- " * len(names) + "|"


def line(*cells: str) -> str:
    """Return one line of a table."""
    return "| " + " | ".join(cells) + " |"


def interval(row: Found | None) -> str:
    """Return a ratio with its interval; nothing without a row."""
    if row is None:
        return ""
    bounds = "" if row["low"] is None else f" ({row['low']:.2f} to {row['high']:.2f})"
    return f"{row['ratio']:.2f}{bounds}"
