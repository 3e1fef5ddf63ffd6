"""``cospec stage host`` as a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import TracebackType

import psutil

LISTENS = "cospec stage host listens at "


class HostProcess:
    """A stage host of this machine, for the time of a ``with`` block."""

    def __init__(self, token_file: Path, port: int = 0) -> None:
        self._command = [sys.executable, "-m", "cospec", "stage", "host", "--address", f"127.0.0.1:{port}"]
        self._command += ["--token-file", str(token_file)]

    def __enter__(self) -> HostProcess:
        self.process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        assert line.startswith(LISTENS), line
        self.address = line.removeprefix(LISTENS).strip()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.terminate()
        self.process.wait(20)
        assert self.process.stderr is not None
        self.process.stderr.close()

    @property
    def stages(self) -> list[int]:
        """Process ids of the stages that run here."""
        return [child.pid for child in psutil.Process(self.process.pid).children()]
