"""Several drafters led token by token over the same sequences; one that fails or is late is led no further."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from cospec.drafters.stepping import Opening, Stepper
from cospec.protocols import Clock
from cospec.types import Context

ResultT = TypeVar("ResultT")


class Led(Protocol):
    """A drafter of a pool as a session sees it."""

    def call(self, verb: Callable[..., Any], *arguments: Any) -> Any:
        """What ``verb(*arguments)`` gives, or None when the drafter has failed in it."""


class Seat(NamedTuple):
    """One drafter at one sequence; ``job`` counts the sequences of the round."""

    job: int
    member: int


@dataclass(slots=True)
class Session:
    """One round of leading.

    Attributes:
        steppers: by drafter.
        led: by drafter, what guards its calls.
        reading: seconds spent on reading logits, which every drafter does for itself where it drafts alone.
    """

    steppers: Mapping[int, Stepper]
    led: Mapping[int, Led]
    vocab_size: int
    clock: Clock
    reading: float = 0.0
    _rows: dict[int, tuple[list[Seat], Tensor]] = field(default_factory=dict)  # by drafter: where it stands, logits
    _ids: list[str] = field(default_factory=list)

    def open(self, contexts: Seq[Context], depths: Seq[int], members: Seq[Seq[int]]) -> None:
        """Begin: ``members[job]`` are led along ``contexts[job]``, ``depths[job]`` tokens far."""
        self._ids = [context.id for context in contexts]
        for member, stepper in self.steppers.items():
            jobs = [job for job, own in enumerate(members) if member in own]
            if not jobs:
                continue
            opening: Opening | None = self.led[member].call(
                stepper.open, [contexts[job] for job in jobs], [depths[job] for job in jobs]
            )
            if opening is None:
                continue
            number = {self._ids[job]: job for job in jobs}
            self._rows[member] = ([Seat(number[id], member) for id in opening.ids], opening.logits)

    def feed(self, tokens: Mapping[int, int]) -> None:
        """Go on: the next token by job. Jobs that are not named are led no further."""
        for member, (seats, _) in list(self._rows.items()):
            going = [seat for seat in seats if seat.job in tokens]
            logits = None
            if going:
                ids, fed = [self._ids[seat.job] for seat in going], [tokens[seat.job] for seat in going]
                logits = self.led[member].call(self.steppers[member].feed, ids, fed)
            if logits is None:
                del self._rows[member]
            else:
                self._rows[member] = (going, logits)

    def timed(self, read: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """``read(*arguments)``, counted as reading."""
        started = self.clock()
        found = read(*arguments)
        self.reading += self.clock() - started
        return found

    def rows(self) -> list[tuple[list[Seat], Tensor]]:
        """By drafter: where it stands, and the logits ``[len(seats), V]`` behind it, in the same order."""
        return list(self._rows.values())
