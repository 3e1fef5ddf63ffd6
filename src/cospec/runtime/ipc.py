"""How calls of a drafter and its answers travel between two processes of one machine.

Pickles, with two things made small: tokens go as packed numbers, and rows of probabilities beside the pickle, uncopied.
Both ends are one program that trusts itself; nothing else can reach the connection.
"""

from __future__ import annotations

import io
import pickle
from array import array
from collections.abc import Callable, Sequence
from dataclasses import fields
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cospec.core.rng import StreamKind
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext
from cospec.sampling_params import SamplingParams

NEWEST = 5  # the pickle protocol that can leave buffers out
WORD = array("q").itemsize


def send(connection: Connection, message: Any) -> None:
    """Send one message.

    Raises:
        OSError: the other end is gone.
    """
    head, rows = pack(message)
    connection.send_bytes(array("q", [len(rows), *map(len, rows)]).tobytes() + head)
    for row in rows:
        connection.send_bytes(row)


def receive(connection: Connection) -> Any:
    """Wait for one message.

    Raises:
        EOFError, OSError: the other end is gone.
    """
    first = memoryview(connection.recv_bytes())
    count = first[:WORD].cast("q")[0]
    end = WORD * (count + 1)
    rows = [bytearray(size) for size in first[WORD:end].cast("q")]
    for row in rows:
        connection.recv_bytes_into(row)
    return unpack(first[end:], rows)


def pack(message: Any) -> tuple[bytes, list[memoryview]]:
    """A pickle, and the arrays that belong into it."""
    head, rows = io.BytesIO(), list[pickle.PickleBuffer]()
    _Packer(head, NEWEST, buffer_callback=rows.append).dump(message)
    return head.getvalue(), [row.raw() for row in rows]


def unpack(head: bytes | memoryview, rows: Sequence[bytearray | memoryview]) -> Any:
    """What was packed; arrays live in ``rows``."""
    return pickle.loads(head, buffers=rows)


def _by_fields(cls: type) -> Callable[[Any], tuple[Any, ...]]:
    """Reduces a dataclass to a call of its class."""
    values = attrgetter(*(each.name for each in fields(cls)))
    return lambda one: (cls, values(one))


def _context(one: DraftContext) -> tuple[Any, ...]:
    packed = array("i", one.tokens)
    rest = one.prompt_len, one.sampling, one.seed, one.stream_kind, one.assumed, one.drafters
    return _unpacked, (one.id, packed, *rest)


def _unpacked(id: str, tokens: array[int], prompt_len: int, sampling: SamplingParams, *rest: Any) -> DraftContext:
    return DraftContext(id, tokens.tolist(), prompt_len, sampling, *rest)


def _state(one: torch.Tensor) -> tuple[Any, ...]:
    return _tensor, (one.detach().cpu().float().numpy(), str(one.device))


def _tensor(values: NDArray[np.float32], device: str) -> torch.Tensor:
    return torch.from_numpy(values).to(device)


class _Packer(pickle.Pickler):
    dispatch_table = {  # noqa: RUF012 - the name is pickle's
        DraftBudget: _by_fields(DraftBudget),
        Commit: _by_fields(Commit),
        Draft: _by_fields(Draft),
        DraftContext: _context,
        torch.Tensor: _state,
        StreamKind: lambda one: (StreamKind, (int(one),)),
    }
