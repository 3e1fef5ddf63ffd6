"""Options of the verifier's side: ``speculative_config.drafter_nodes``."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from pydantic import Field

from cospec.errors import CospecError, InvalidInput, words
from cospec.plugin_options import Options

BIND = "speculative_config.drafter_nodes.bind"  # in errors
DEFAULT_BIND = "tcp://127.0.0.1:5710"
LOCAL = ("tcp://127.0.0.1:", "tcp://[::1]:", "tcp://localhost:", "ipc://", "inproc://")


class NodesOptions(Options):
    """How drafter nodes reach the server.

    Attributes:
        bind: the ZeroMQ address that nodes connect to.
        keys: a folder of ``cospec node keys``; None: no encryption, allowed within one machine only.
        quantile: the server waits for a node until this share of the node's answers has come, between 0 and 1.
        deadline: the longest wait for a node, in seconds, at most 60.
        trusted: nodes may send the distributions that their tokens were drawn from. A node that lies about them
            changes outputs. Otherwise the acceptance method ``match`` verifies all tokens that nodes draw.
    """

    bind: str = DEFAULT_BIND
    keys: Path | None = Field(default=None, strict=False)
    quantile: float = Field(default=0.95, gt=0, lt=1)
    deadline: float = Field(default=2.0, gt=0, le=60, strict=False)
    trusted: bool = False


def check_address(field: str, address: str, keys: Path | None) -> None:
    """Raise ``InvalidInput`` for an address without transport, and for one of another machine without keys."""
    if "://" not in address:
        raise InvalidInput(field, address, "tcp://HOST:PORT")
    if keys is None and not address.startswith(LOCAL):
        given = words(f"{address} without keys")
        raise InvalidInput(field, given, "an address of this machine, or any address with keys")


def zeromq() -> ModuleType:
    """The module ``zmq``.

    Raises:
        CospecError: ZeroMQ is not installed.
    """
    try:
        import zmq
    except ImportError:
        raise CospecError("Drafter nodes need ZeroMQ; install it with: pip install cospec[cluster]") from None
    return zmq
