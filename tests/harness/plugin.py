"""The example of a plug-in, installed as a user would install the package; the names of a table of plug-ins."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

from cospec.registry import PluginTable

SOURCE = Path(__file__).resolve().parents[2] / "examples" / "plugin"


class Thing(Protocol):
    """The interface of a table of its own."""

    exact: bool

    def verify(self) -> None: ...


def install(folder: Path) -> Path:
    """Build the example's wheel and unpack the wheel into ``folder``, with its entry points; needs no network."""
    options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(folder), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def every(table: PluginTable[Any]) -> list[str]:
    """What comes with cospec and what installed packages offer."""
    return [*table, *table.installed]
