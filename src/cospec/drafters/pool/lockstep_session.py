"""Several drafters run in lockstep over the same sequences; a drafter that fails or is late drops out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from cospec.core.interfaces import Clock
from cospec.core.rng import Floats
from cospec.core.types import DraftContext
from cospec.drafters.interfaces import StartLogits, StepwiseDrafter

ResultT = TypeVar("ResultT")

_NO_ROWS = torch.empty(0, 0)


class LockstepMember(Protocol):
    """A drafter of a pool, as a session calls it."""

    @property
    def deadline(self) -> float | None:
        """Seconds that a step may wait for the drafter; None for no limit."""

    def spend(self, seconds: float) -> None:
        """Add seconds of work that ran outside ``call``."""

    def call(self, failed: Any, verb: Callable[..., Any], *arguments: Any) -> Any:
        """Return ``verb(*arguments)``, or ``failed`` if the drafter failed."""


class MemberLogits(NamedTuple):
    """The current logits of one drafter.

    Attributes:
        rows: indices of the sequences in the step.
        ids: ids of the sequences.
        logits: ``[len(rows), V]``, in the same order.
    """

    rows: Sequence[int]
    ids: Sequence[str]
    logits: Tensor


@dataclass(slots=True)
class LockstepSession:
    """One step of lockstep drafting.

    Attributes:
        steppers: stepwise interfaces by drafter.
        members: the drafters of the pool, by number.
        calibrations: see ``PoolStats.calibrations``.
        native: whether the native library may run all positions as one call.
        reading: seconds spent on reading logits, a task that a drafter alone would do as well.
        logits: current logits by drafter.
        opened: number of sequences at the start.
    """

    steppers: Mapping[int, StepwiseDrafter]
    members: Sequence[LockstepMember]
    vocab_size: int
    clock: Clock
    calibrations: Floats
    native: bool = True
    reading: float = 0.0
    logits: dict[int, MemberLogits] = field(default_factory=dict)
    opened: int = 0

    def open(
        self, contexts: Sequence[DraftContext], depths: Sequence[int], taking: Mapping[int, Sequence[int]]
    ) -> None:
        """Start the drafters on the sequences of ``taking``, for ``depths[row]`` tokens each."""
        self.opened = len(contexts)
        for member, rows in taking.items():
            opening: StartLogits = self.members[member].call(
                StartLogits((), _NO_ROWS),
                self.steppers[member].open,
                [contexts[row] for row in rows],
                [depths[row] for row in rows],
            )
            if opening.ids:
                number = {contexts[row].id: row for row in rows}
                self.logits[member] = MemberLogits([number[id] for id in opening.ids], opening.ids, opening.logits)

    def feed(self, tokens: Mapping[int, int]) -> None:
        """Feed the next token of each sequence; sequences without a token are finished."""
        for member, (rows, ids, _) in list(self.logits.items()):
            if len(tokens) < self.opened:  # otherwise all sequences continue
                pairs = [(row, id) for row, id in zip(rows, ids, strict=True) if row in tokens]
                rows, ids = [row for row, _ in pairs], [id for _, id in pairs]
            fed = [tokens[row] for row in rows]
            logits = self.members[member].call(_NO_ROWS, self.steppers[member].feed, ids, fed) if rows else _NO_ROWS
            if len(logits):
                self.logits[member] = MemberLogits(rows, ids, logits)
            else:
                del self.logits[member]

    def timed(self, read: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """Return ``read(*arguments)`` and add its time to ``reading``."""
        started = self.clock()
        found = read(*arguments)
        self.reading += self.clock() - started
        return found
