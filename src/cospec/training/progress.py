"""The common style of progress bars of a training run."""

from __future__ import annotations

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def bars() -> Progress:
    """Return a progress display for a ``with`` block: task, progress, remaining time."""
    return Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
