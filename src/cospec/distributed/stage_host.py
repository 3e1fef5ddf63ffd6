"""Starts stage processes on this machine for engines on other machines.

A connection is one stage process: the host checks the token, answers one byte, and gives the connection to a new
process. That process then speaks with the engine as a local stage does. The host reads nothing after the token.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import tempfile
import threading
from pathlib import Path

from cospec.distributed.links import Address, admit
from cospec.errors import InvalidInput, words
from cospec.runtime.transport import ChildProcess

WORKER = "cospec.distributed.stage_worker"  # not imported: the host needs no torch
ADMITTED = b"\1"
LEAST_TOKEN = 16  # characters
POLL_MILLISECONDS = 100  # between two checks whether a process has ended
HANGUP = select.POLLRDHUP if sys.platform == "linux" else select.POLLHUP
KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # ends connections to a machine without power


def read_token(path: Path | None) -> str:
    """Read the secret that a stage host and its engines share.

    Raises:
        InvalidInput: the file is missing or too short.
    """
    allowed = f"a readable file of at least {LEAST_TOKEN} characters, as `cospec stage token` writes"
    if path is None:
        raise InvalidInput("stage_token_file", words("not given"), allowed)
    try:
        with path.open(encoding="utf-8") as file:
            if file.seekable():  # outside Linux, descriptors of a ``TokenFile`` share their place
                file.seek(0)
            token = file.read().strip()
    except (OSError, UnicodeDecodeError):
        raise InvalidInput("stage_token_file", str(path), allowed) from None
    if len(token) < LEAST_TOKEN:
        raise InvalidInput("stage_token_file", words(f"{path} with {len(token)} characters"), allowed)
    return token


class TokenFile:
    """A token for child processes, in a file that never has a name.

    The system drops the file with the last process that holds the descriptor, so a killed process leaves nothing.

    Attributes:
        descriptor: of the file; a child that inherits the descriptor can read ``path``.
    """

    def __init__(self, token: str) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # open until ``close``
        self._file.write(token.encode())
        self._file.flush()
        self.descriptor = self._file.fileno()

    @property
    def path(self) -> Path:
        """Where this process, and a child with the descriptor, reads the token."""
        return Path(f"/dev/fd/{self.descriptor}")

    def close(self) -> None:
        """Close the file in this process."""
        self._file.close()


def parse_address(field: str, text: str) -> Address:
    """Read ``HOST:PORT``.

    Raises:
        InvalidInput: the text is something else.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) >= 1 << 16:
        raise InvalidInput(field, text, "HOST:PORT")
    return Address(host, int(port))


class StageHost:
    """Listens for engines.

    Args:
        address: to listen on; port 0 takes a free port.

    Attributes:
        address: with the port.

    Raises:
        InvalidInput: the address is in use, or of another machine.
    """

    def __init__(self, address: Address, token: str) -> None:
        try:
            self._listener = socket.create_server((address.host, address.port))
        except OSError as error:
            raise InvalidInput(
                "address", words(f"{address} ({error.strerror})"), "a free address of this machine"
            ) from None
        self.address = Address(address.host, self._listener.getsockname()[1])
        self._token = token
        self._lock = threading.Lock()
        self._processes: set[ChildProcess] = set()

    def serve(self) -> None:
        """Start a process for each connection that knows the token, for ever."""
        for stream, _ in admit(self._listener, self._token):
            threading.Thread(target=self._run, args=(stream,), daemon=True).start()

    def close(self) -> None:
        """End all processes."""
        self._listener.close()
        with self._lock:
            processes = list(self._processes)
        for each in processes:
            each.close()

    def _run(self, stream: socket.socket) -> None:
        """Run the process of a connection until the process or the connection ends, then end both."""
        with stream, contextlib.suppress(OSError):  # the engine is gone before the process runs
            _keep_alive(stream)
            stream.sendall(ADMITTED)
            process = ChildProcess(WORKER, [f"{WORKER}:plan_of", str(stream.fileno())], files=[stream.fileno()])
            with self._lock:
                self._processes.add(process)
            ended = select.poll()
            ended.register(stream, HANGUP)
            while process.running and not ended.poll(POLL_MILLISECONDS):
                pass
            process.close()
            with self._lock:
                self._processes.discard(process)


def _keep_alive(stream: socket.socket) -> None:
    """Have the kernel end the connection to a machine that is off or unreachable."""
    stream.setblocking(True)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if name in vars(socket):  # other systems have other names
            stream.setsockopt(socket.IPPROTO_TCP, vars(socket)[name], value)
