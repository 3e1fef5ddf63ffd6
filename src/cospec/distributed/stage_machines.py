"""The engine's side of stage hosts: starts each stage on its machine, or on another machine that answers."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence

from cospec.distributed.links import Address, greet
from cospec.distributed.stage_host import ADMITTED
from cospec.errors import ModelError
from cospec.models.shard import Shard
from cospec.runtime.drafter_process_executor import Worker
from cospec.runtime.transport import ChannelClosed

ANSWER_SECONDS = 5.0  # for a host; a frozen host accepts connections and answers nothing
RETRY_SECONDS = 0.5  # between two rounds through the hosts
REFUSES, SILENT = "refuses the token", "does not answer"


class RemoteStage:
    """A stage process on another machine, as a ``Worker``. The end of the connection ends the process.

    Attributes:
        pid: 0, because process ids of another machine mean nothing here.
    """

    pid = 0

    def __init__(self, stream: socket.socket, host: Address) -> None:
        self.stream, self._host = stream, host

    def kill(self) -> None:
        """End the connection; the host ends the process by force if need be."""
        with contextlib.suppress(OSError):
            self.stream.shutdown(socket.SHUT_RDWR)

    def ending(self) -> str:
        """See ``Worker``."""
        return f"at the stage host {self._host} has closed its connection"

    def close(self) -> None:
        """End the connection."""
        self.stream.close()


class StageMachines:
    """Launches stages on hosts; a ``Launch``.

    Args:
        hosts: stage ``n`` prefers host ``n`` modulo their number, and takes the next hosts in order.
        patience: seconds to wait for a host, such as a host that is started again.
    """

    def __init__(self, hosts: Sequence[Address], token: str, patience: float) -> None:
        self._hosts, self._token, self._patience = tuple(hosts), token, patience

    def __call__(self, name: str, shard: Shard) -> Worker:
        """Start the process of a shard.

        Raises:
            ModelError: no host answers, or all hosts refuse the token.
        """
        first = shard.stage % len(self._hosts)
        order = [*self._hosts[first:], *self._hosts[:first]]
        end, refused = time.monotonic() + self._patience, False
        while True:
            reasons = []
            for host in order:
                found = self._ask(host)
                if not isinstance(found, str):
                    return RemoteStage(found, host)
                reasons.append(found)
            # A host that was killed meanwhile closes the connection too, so the second refusal counts.
            if time.monotonic() > end or (refused and set(reasons) == {REFUSES}):
                listed = ", ".join(f"{host} {reason}" for host, reason in zip(order, reasons, strict=True))
                raise ModelError(f"No stage host starts stage {shard.stage}: {listed}.")
            refused = set(reasons) == {REFUSES}
            time.sleep(RETRY_SECONDS)

    def _ask(self, host: Address) -> socket.socket | str:
        """Return a connection to a new process, or why the host gives none."""
        try:
            stream = greet(host, self._token)
        except ChannelClosed:
            return SILENT
        try:
            stream.settimeout(ANSWER_SECONDS)
            if stream.recv(1) == ADMITTED:
                return stream
            reason = REFUSES
        except TimeoutError:
            reason = SILENT
        except OSError:
            reason = REFUSES
        stream.close()
        return reason
