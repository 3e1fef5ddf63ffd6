"""Several drafters led token by token over the same sequences; one that fails or is late is led no further."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from cospec.core.interfaces import Clock
from cospec.core.plugins import Opening, StepwiseDrafter
from cospec.core.types import DraftContext

ResultT = TypeVar("ResultT")


class LockstepMember(Protocol):
    """A drafter of a pool as a session sees it."""

    @property
    def deadline(self) -> float | None:
        """Seconds that a round may wait for it."""

    def spend(self, seconds: float) -> None:
        """It was at work for so long, without having been called."""

    def call(self, verb: Callable[..., Any], *arguments: Any) -> Any:
        """What ``verb(*arguments)`` gives, or None when the drafter has failed in it."""


class MemberLogits(NamedTuple):
    """Where one drafter stands.

    Attributes:
        rows: the sequences, counted in the order of the round.
        ids: theirs.
        logits: ``[len(rows), V]``, in the same order.
    """

    rows: list[int]
    ids: list[str]
    logits: Tensor


@dataclass(slots=True)
class LockstepSession:
    """One round of leading.

    Attributes:
        steppers: by drafter.
        led: by drafter, what guards its calls.
        reading: seconds spent on reading logits, which every drafter does for itself where it drafts alone.
        stands: by drafter.
        opened: sequences that it began with.
    """

    steppers: Mapping[int, StepwiseDrafter]
    led: Sequence[LockstepMember]
    vocab_size: int
    clock: Clock
    reading: float = 0.0
    stands: dict[int, MemberLogits] = field(default_factory=dict)
    opened: int = 0

    def open(
        self, contexts: Sequence[DraftContext], depths: Sequence[int], taking: Mapping[int, Sequence[int]]
    ) -> None:
        """Begin: drafters are led along the sequences that they are ``taking``, ``depths[row]`` tokens far."""
        self.opened = len(contexts)
        for member, rows in taking.items():
            opening: Opening | None = self.led[member].call(
                self.steppers[member].open, [contexts[row] for row in rows], [depths[row] for row in rows]
            )
            if opening is None:
                continue
            ids = list(opening.ids)
            if len(ids) < len(rows):
                number = {contexts[row].id: row for row in rows}
                rows = [number[id] for id in ids]
            self.stands[member] = MemberLogits(list(rows), ids, opening.logits)

    def feed(self, tokens: Mapping[int, int]) -> None:
        """Go on: the next token by sequence. Those that are not named are led no further."""
        for member, (rows, ids, _) in list(self.stands.items()):
            if len(tokens) < self.opened:  # otherwise everybody goes on
                pairs = [(row, id) for row, id in zip(rows, ids, strict=True) if row in tokens]
                rows, ids = [row for row, _ in pairs], [id for _, id in pairs]
            fed = [tokens[row] for row in rows]
            logits = self.led[member].call(self.steppers[member].feed, ids, fed) if rows else None
            if logits is None:
                del self.stands[member]
            else:
                self.stands[member] = MemberLogits(rows, ids, logits)

    def timed(self, read: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """``read(*arguments)``, counted as reading."""
        started = self.clock()
        found = read(*arguments)
        self.reading += self.clock() - started
        return found
