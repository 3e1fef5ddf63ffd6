"""One look for every progress bar of a training run."""

from __future__ import annotations

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def bars() -> Progress:
    """A progress display to be used as a context: what is done, how far, how long it will still take."""
    return Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
