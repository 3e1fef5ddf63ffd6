"""The messages between an engine and the stages of its target.

Windows go from the engine through all stages; tokens and logits return from the last. One message is one traversal: a
window carries the page tables of its sequences, and the cache entries that earlier windows' accepted nodes move to.
Therefore stages know no sequences, and a commit costs no message of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cospec.config import LinkConfig
from cospec.distributed.links import Address
from cospec.models.stage import StageBatch
from cospec.runtime.messages import Failed, ProtocolMessage, Start

Array = np.ndarray[Any, np.dtype[Any]]
Moves = tuple[NDArray[np.int64], NDArray[np.int64]]


class Listening(ProtocolMessage, frozen=True):
    """A process has loaded its part of the model, and listens.

    Attributes:
        store: where the shards of the stage can meet, from the first of several shards.
    """

    address: Address
    store: Address | None = None


class Connect(ProtocolMessage, frozen=True):
    """Names a stage's neighbours.

    Attributes:
        token: the secret that every connection between stages begins with.
        next: the next stage; None for the last stage.
        shards: the other shards of the stage, for its first shard.
        store: where the shards of the stage meet; None for one shard.
    """

    token: str
    next: Address | None
    shards: tuple[Address, ...] = ()
    store: Address | None = None


class Connected(ProtocolMessage, frozen=True):
    """A stage has all its connections."""


class SetLink(ProtocolMessage, frozen=True):
    """Changes the delays that are added to a stage's link, while no window is in flight."""

    link: LinkConfig


class Cancel(ProtocolMessage, frozen=True):
    """Stages need not compute a window whose result nothing reads; stages after them pass the window on."""

    number: int


class Window(ProtocolMessage, frozen=True):
    """A packed batch on its way through the stages.

    Attributes:
        number: counts windows from 0.
        slices, ids, parents, pages: see ``StageBatch``.
        sources, targets: int64 ``[M]``, slots that every stage copies first.
        states: float32 ``[T, hidden]``, after the layers of the stages before; None from the engine.
        draws: ``[D, FIELDS]`` for slices whose tokens the last stage draws, see ``stage_sampling``; None for none.
        error: why a stage before did not compute the window; later stages pass the window on.
    """

    number: int
    slices: Array
    ids: Array
    parents: Array
    pages: Array
    sources: Array
    targets: Array
    states: Array | None = None
    draws: Array | None = None
    error: str | None = None

    @classmethod
    def of(cls, number: int, batch: StageBatch, moves: Moves, draws: Array | None = None) -> Window:
        """Return the window that the engine sends."""
        return cls(number, batch.slices, batch.ids, batch.parents, batch.pages, *moves, draws=draws)

    @property
    def batch(self) -> StageBatch:
        """The packed batch."""
        return StageBatch(self.slices, self.ids, self.parents, self.pages)

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return _bytes_of(
            self.slices, self.ids, self.parents, self.pages, self.sources, self.targets, self.states, self.draws
        )


class WindowOutput(ProtocolMessage, frozen=True):
    """The result of a window, see ``BatchOutput``, or the reason why there is none.

    Attributes:
        logits: float32 ``[R, V]``; None without such rows.
        tokens: int64 ``[S]``; None without such rows.
    """

    number: int
    logits: Array | None = None
    tokens: Array | None = None
    error: str | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return _bytes_of(self.logits, self.tokens)


def _bytes_of(*arrays: Array | None) -> int:
    return sum(each.nbytes for each in arrays if each is not None)


StageCommand = Start | Connect | SetLink | Cancel
StageReply = Listening | Connected | Failed
