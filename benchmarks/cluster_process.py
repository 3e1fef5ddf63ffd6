"""``cospec cluster up`` as a process, and all processes below."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

READY = re.compile(r"cospec cluster \S+ serves at (\S+)")
REPLICA, NODE = "ray::ServeReplica:{name}:target", "ray::ServeReplica:{name}:drafter-"
START_SECONDS, STOP_SECONDS = 120.0, 60.0


class ClusterProcess:
    """A cluster of this machine, for the time of a ``with`` block.

    Args:
        config: the declaration, see ``cospec.cluster.config``.
        folder: for the declaration and the log.
        address: of a Ray cluster that runs; None starts Ray on this machine.

    Attributes:
        url: of the server.
        seen: process ids that were below the cluster at any look.
    """

    def __init__(
        self,
        config: dict[str, Any],
        folder: Path,
        environment: dict[str, str] | None = None,
        address: str | None = None,
    ) -> None:
        self._where = [] if address is None else ["--address", address]
        self.name = str(config["name"])
        self.config_file, self.log_file = folder / f"{self.name}.yaml", folder / f"{self.name}.log"
        self.config_file.write_text(yaml.safe_dump(config))
        self._environment = {**os.environ, **(environment or {})}
        self.url = ""
        self.seen: set[int] = set()

    def start(self) -> None:
        """Start the process, and do not wait for the cluster."""
        command = [sys.executable, "-m", "cospec", "cluster", "up", str(self.config_file), *self._where]
        with self.log_file.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=self._environment)

    def __enter__(self) -> ClusterProcess:
        self.start()
        deadline = time.monotonic() + START_SECONDS
        while not (found := READY.search(self.log)):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise RuntimeError(f"The cluster has not started:\n{self.log[-4000:]}")
            threading.Event().wait(0.1)
        self.url = found[1]
        self.below()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def log(self) -> str:
        """What the cluster has printed."""
        return self.log_file.read_text(errors="replace")

    def status(self) -> dict[str, Any]:
        """What ``cospec cluster status`` prints."""
        command = [sys.executable, "-m", "cospec", "cluster", "status", "--name", self.name]
        found = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if found.returncode:
            raise RuntimeError(f"cospec cluster status ended with {found.returncode}:\n{found.stderr}")
        return dict(json.loads(found.stdout))

    def below(self) -> dict[int, str]:
        """Command lines of all processes that the cluster has started, by process id."""
        found = descendants(self.process.pid)
        self.seen |= found.keys()
        return found

    def replicas(self) -> list[int]:
        """Process ids of the target's replicas."""
        return self._actors(REPLICA)

    def nodes(self) -> list[int]:
        """Process ids of the drafter nodes."""
        return self._actors(NODE)

    def engines(self) -> list[int]:
        """Process ids of the engines."""
        return self._modules("cospec.runtime.engine_process_main")

    def stages(self) -> list[int]:
        """Process ids of the stages of all replicas."""
        return self._modules("cospec.distributed.stage_worker")

    def _modules(self, module: str) -> list[int]:
        return [pid for pid, command in self.below().items() if module in command]

    def _actors(self, kind: str) -> list[int]:
        name = kind.format(name=self.name)
        return [pid for pid, command in self.below().items() if command.startswith(name)]

    def busy_replica(self, seconds: float = 0.1) -> int:
        """The replica whose engine used most processor time during ``seconds``."""
        engines = self.engines()
        before = {pid: _ticks(pid) for pid in engines}
        threading.Event().wait(seconds)
        return _parent(max(engines, key=lambda pid: _ticks(pid) - before[pid]))

    def idle(self, seconds: float = 1.0) -> bool:
        """Whether no engine used more than a tenth of a processor during ``seconds``; a start uses more."""
        before = {pid: _ticks(pid) for pid in self.engines()}
        threading.Event().wait(seconds)
        most = 0.1 * seconds * os.sysconf("SC_CLK_TCK")
        return before.keys() == set(self.engines()) and all(_ticks(pid) - before[pid] <= most for pid in before)

    def close(self) -> int:
        """Stop the cluster and return its exit status."""
        if self.process.poll() is None:
            self.below()
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS)
        if self.process.poll() is None:
            self.process.kill()
        return self.process.wait()

    def left(self, patience: float = 40.0) -> dict[int, str]:
        """Processes that still run ``patience`` seconds after the end, of all that were seen."""
        deadline = time.monotonic() + patience
        while (running := {pid: command for pid in self.seen if (command := _command(pid))}) and (
            time.monotonic() < deadline
        ):
            threading.Event().wait(0.2)
        return running


def descendants(root: int) -> dict[int, str]:
    """Command lines of the processes below ``root``, by process id."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                parents[int(folder.name)] = _parent(int(folder.name))
    found: dict[int, str] = {}
    layer = {root}
    while layer:
        layer = {pid for pid, parent in parents.items() if parent in layer}
        found |= {pid: _command(pid) for pid in layer}
    return {pid: command for pid, command in found.items() if command}


def _stat(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` after the name of the command."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _parent(pid: int) -> int:
    return int(_stat(pid)[1])


def _ticks(pid: int) -> int:
    """Processor time of a process."""
    return sum(map(int, _stat(pid)[11:13]))


def _command(pid: int) -> str:
    """The command line of a process that runs; empty for processes that have ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
