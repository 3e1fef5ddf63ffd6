"""Several drafters run in lockstep over the same sequences; a drafter that fails or is late drops out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from cospec.core.interfaces import Clock
from cospec.core.submitted_step import Future
from cospec.core.types import DraftContext
from cospec.drafters.interfaces import NextLogits, StepwiseDrafter
from cospec.rng.random_streams import Floats

ResultT = TypeVar("ResultT")
Draw = Callable[[Floats, Sequence[DraftContext], Sequence[int]], list[int]]
"""Samples a token from each row of ``[R, V]``; see ``candidates.draw``."""

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

    def start_step(self, contexts: Sequence[DraftContext], distributions: bool) -> Future[Any] | None:
        """Request one candidate after each context from a drafter elsewhere."""

    def collect(self, future: Future[Any], started: float, failed: Any) -> Any:
        """Return the answer to a request of time ``started``, or ``failed``."""


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


class _PendingStep(NamedTuple):
    """A question to a drafter elsewhere, about the sequences ``rows`` by id."""

    future: Future[Any]
    rows: Mapping[str, int]
    started: float


@dataclass(slots=True)
class LockstepSession:
    """One step of lockstep drafting.

    Drafters elsewhere get one question per position, which has the path as assumed tokens. They work at the same time,
    also as local drafters do. A drafter whose answer is late drops out of the draft.

    Attributes:
        steppers: stepwise interfaces by drafter.
        members: the drafters of the pool, by number.
        calibrations: see ``PoolStats.calibrations``.
        draw: for combiners that draw from a distribution of their own.
        native: whether the native library may run all positions as one call.
        elsewhere: drafters in lockstep whose executors answer token by token.
        distributions: candidates of drafters elsewhere have the distributions of their tokens.
        candidates: current candidates of drafters elsewhere, by drafter and row; of the type that the combiner reads.
        reading: seconds spent on reading logits, a task that a drafter alone would do as well.
        logits: current logits by drafter.
        opened: number of sequences at the start.
    """

    steppers: Mapping[int, StepwiseDrafter]
    members: Sequence[LockstepMember]
    vocab_size: int
    clock: Clock
    calibrations: Floats
    draw: Draw
    native: bool = True
    elsewhere: frozenset[int] = frozenset()
    distributions: bool = False
    candidates: dict[int, dict[int, Any]] = field(default_factory=dict)
    reading: float = 0.0
    logits: dict[int, MemberLogits] = field(default_factory=dict)
    opened: int = 0
    _contexts: list[DraftContext] = field(default_factory=list)  # with the paths, for drafters elsewhere

    def open(
        self, contexts: Sequence[DraftContext], depths: Sequence[int], taking: Mapping[int, Sequence[int]]
    ) -> None:
        """Start the drafters on the sequences of ``taking``, for ``depths[row]`` tokens each."""
        self.opened, self._contexts = len(contexts), list(contexts)
        away = self._ask({member: rows for member, rows in taking.items() if member in self.elsewhere})
        for member, rows in taking.items():
            if member in self.elsewhere:
                continue
            opening: NextLogits = self.members[member].call(
                NextLogits((), _NO_ROWS),
                self.steppers[member].open,
                [contexts[row] for row in rows],
                [depths[row] for row in rows],
            )
            if opening.ids:
                number = {contexts[row].id: row for row in rows}
                self.logits[member] = MemberLogits([number[id] for id in opening.ids], opening.ids, opening.logits)
        self._take(away)

    def feed(self, tokens: Mapping[int, int]) -> None:
        """Feed the next token of each sequence; sequences without a token are finished."""
        away = dict[int, _PendingStep]()
        if self.candidates:
            for row, token in tokens.items():
                context = self._contexts[row]
                path = [*context.tokens, token]
                self._contexts[row] = replace(context, tokens=path, assumed=context.assumed + 1)
            left = {member: [row for row in found if row in tokens] for member, found in self.candidates.items()}
            away = self._ask({member: rows for member, rows in left.items() if rows})
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
        self._take(away)

    def _ask(self, taking: Mapping[int, Sequence[int]]) -> dict[int, _PendingStep]:
        """Ask drafters elsewhere, all before the first answer is waited for."""
        asked, started = dict[int, _PendingStep](), self.clock()
        for member, rows in taking.items():
            contexts = [self._contexts[row] for row in rows]
            future = self.members[member].start_step(contexts, self.distributions)
            if future is not None:
                asked[member] = _PendingStep(future, {self._contexts[row].id: row for row in rows}, started)
        return asked

    def _take(self, asked: Mapping[int, _PendingStep]) -> None:
        """Wait for the answers of drafters elsewhere, up to their deadlines."""
        self.candidates = {}
        for member, (future, rows, started) in asked.items():
            found = self.members[member].collect(future, started, {})
            if found:
                self.candidates[member] = {rows[id]: candidate for id, candidate in found.items()}

    def timed(self, read: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """Return ``read(*arguments)`` and add its time to ``reading``."""
        started = self.clock()
        found = read(*arguments)
        self.reading += self.clock() - started
        return found
