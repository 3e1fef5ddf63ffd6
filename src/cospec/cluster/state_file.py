"""Files with which the commands of ``cospec cluster`` find a running cluster; only their owner can read the files."""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from cospec.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """A cluster that ``cospec cluster up`` keeps running.

    Attributes:
        pid: of the process that keeps the cluster.
        address: of Ray's head.
        url: of the HTTP server.
        token_path: the file with the token of the Ray cluster; empty where another program started Ray.
    """

    name: str
    pid: int
    address: str
    url: str
    token_path: str = ""

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True


def folder() -> Path:
    """The folder of these files, made where missing.

    Raises:
        InvalidInput: the folder belongs to another user.
    """
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    path = Path(base) / f"cospec-clusters-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise InvalidInput("XDG_RUNTIME_DIR", str(base), "a folder in which this user alone can read")
    return path


def make_token(name: str) -> Path:
    """Write a new secret for a Ray cluster."""
    path = folder() / f"{name}.token"
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    return path


def write(cluster: RunningCluster) -> None:
    """Note a running cluster."""
    (folder() / f"{cluster.name}.json").write_text(json.dumps(asdict(cluster)))


def read(name: str) -> RunningCluster:
    """Find a running cluster.

    Raises:
        InvalidInput: no cluster of that name runs for this user on this machine.
    """
    try:
        found = RunningCluster(**json.loads((folder() / f"{name}.json").read_text()))
    except (OSError, ValueError, TypeError):
        found = None
    if found is None or not found.alive:
        running = sorted(path.stem for path in folder().glob("*.json"))
        known = f"one of {', '.join(running)}" if running else "the name of a cluster that cospec cluster up started"
        raise InvalidInput("name", name, known)
    return found


def remove(name: str) -> None:
    """Forget a cluster."""
    for suffix in ("json", "token"):
        (folder() / f"{name}.{suffix}").unlink(missing_ok=True)
