"""Where the figures of a page come from: files that commands wrote, read with the command, the machine and the date."""

from __future__ import annotations

import datetime
import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, write
from benchmarks.papers.common import RESULTS, How, Row, Run
from cospec.bench.report import describe

Found = Mapping[str, Any]
NOT_RUN = "not run"
DIGEST = re.compile(r"[0-9a-f]{16}")  # of the native library, which says nothing to a reader


@dataclass(frozen=True, slots=True)
class Source:
    """A file and the command that writes it.

    Attributes:
        file: below ``benchmarks/results``, without its suffix; a path from the repository's root where it has one.
        options: of the command, as far as it is worth naming them before it ran.
        make: gives the figures again, where that takes seconds.
        fresh: whether stored figures still answer the question that is asked today.
    """

    file: str
    command: str
    how: How = How.MEASURED
    make: Callable[[], Found] | None = None
    fresh: Callable[[Found], bool] | None = None

    @property
    def path(self) -> Path:
        """From the folder of results or the repository's root."""
        return Path(self.file if self.file.endswith(".json") else f"{self.file}.json")


class Results:
    """All that was stored. What is missing, or lacks the figure, its machine or its date, reads "not run"."""

    def __init__(self, page: str, folder: Path = RESULTS, root: Path = ROOT) -> None:
        self._page, self._folder, self._root = page, folder, root

    @cached_property
    def here(self) -> Run:
        """This command, now."""
        today = datetime.date.today().isoformat()
        return Run(f"python -m benchmarks.papers.{self._page}", machine_words(describe()), today)

    def read(self, source: Source) -> Found | None:
        """What the source holds; None where it was not run, or answers another question by now."""
        path = (self._root if source.file.endswith(".json") else self._folder) / source.path
        if not path.exists():
            return None
        found: Found = json.loads(path.read_text(encoding="utf-8"))
        return found if source.fresh is None or source.fresh(found) else None

    # ``...``: the lambdas of a loop bind its variables by defaults, which mypy does not infer against one argument
    def row(self, what: str, paper: str, source: Source, pick: Callable[..., str], note: str = "") -> Row:
        """One figure; ``pick`` takes what was found and raises ``LookupError`` where the source does not have it."""
        missing = Row(what, paper, NOT_RUN, How.NOT_RUN, Run(source.command), note)
        found = self.read(source)
        run = None if found is None else run_of(found, source)
        if found is None or run is None:
            return missing
        try:
            ours = pick(found)
        except LookupError:
            return missing
        how = How.GPU if source.how is How.MEASURED and on_gpu(found) else source.how
        return Row(what, paper, ours, how, run, note)

    def sentence(self, source: Source, pick: Callable[..., str]) -> str:
        """Words about a source for a text or a note; empty where the source does not have the figure."""
        found = self.read(source)
        try:
            return "" if found is None else pick(found)
        except LookupError:
            return ""

    def computed(self, what: str, paper: str, ours: str, note: str = "") -> Row:
        """A figure that follows from an equation."""
        return Row(what, paper, ours, How.COMPUTED, self.here, note)


def make(source: Source) -> Path | None:
    """Run a source that can be run from here, and store what came out; None for one that cannot."""
    if source.make is None:
        return None
    return write(source.file, {"command": source.command, **source.make()})


def run_of(found: Found, source: Source) -> Run | None:
    """What wrote the file; None where it does not say on which machine and when, since no figure stands without."""
    machine = found.get("machine") or {}
    date = str(found.get("date") or machine.get("date") or "")[:10]
    return Run(_command(found, source), machine_words(machine), date) if machine and date else None


def on_gpu(found: Found) -> bool:
    """Whether the machine that is named has one; a profile names its device, with threads where it is a processor."""
    machine = found.get("machine") or {}
    return bool(machine.get("gpu")) or ("device" in machine and "threads" not in machine)


def machine_words(machine: Mapping[str, Any]) -> str:
    """A machine in a few words."""
    parts = [str(machine[key]) for key in ("processor", "device", "gpu") if machine.get(key)]
    parts += [
        f"{machine[key]} {key if machine[key] > 1 else key[:-1]}" for key in ("threads", "cores") if machine.get(key)
    ]
    named = [key for key in ("torch", "kernels") if machine.get(key)]
    parts += [f"{key} {machine[key]}" for key in named if not DIGEST.fullmatch(str(machine[key]))]
    return ", ".join(parts)


def _command(found: Found, source: Source) -> str:
    """As stored; where only its options were, the source's command with all of them; else the source's command."""
    if "command" in found:
        return str(found["command"])
    if not found.get("options"):
        return source.command
    words = []
    for name, value in found["options"].items():
        if value is None or value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        values = value if isinstance(value, list) else [] if value is True else [value]
        words += [f"{each:g}" if isinstance(each, float) else str(each) for each in values]
    return " ".join([source.command.split(" --")[0], shlex.join(words)]).strip()
