"""Several drafters run in lockstep over the same sequences; a drafter that fails or is late drops out.

Drafters with a native forward and without a deadline share one native call for each position. The others are called
one by one, because a drafter cannot be excluded in the middle of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from cospec.core.interfaces import Clock, NativeForward
from cospec.core.model_io import TokenBatch
from cospec.core.plugins import Opening, StepwiseDrafter
from cospec.core.types import DraftContext
from cospec.native.pool_lockstep import JointForward

ResultT = TypeVar("ResultT")

NO_ROWS = torch.empty(0, 0)


class LockstepMember(Protocol):
    """A drafter of a pool, as a session calls it."""

    @property
    def deadline(self) -> float | None:
        """Seconds that a step may wait for the drafter; None for no limit."""

    def spend(self, seconds: float) -> None:
        """Add seconds of work that ran outside ``call``."""

    def call(self, failed: Any, verb: Callable[..., Any], *arguments: Any) -> Any:
        """Return ``verb(*arguments)``, or ``failed`` if the drafter failed."""


class LogitsBlock(NamedTuple):
    """Current logits of one drafter or of several.

    Attributes:
        members: ``[R]``, the drafter of each row.
        rows: ``[R]``, the sequence of each row, an index into the sequences of the step.
        logits: ``[R, V]``; no rows if all drafters dropped out.
    """

    members: Sequence[int]
    rows: Sequence[int]
    logits: Tensor


NO_LOGITS = LogitsBlock((), (), NO_ROWS)


@dataclass(frozen=True, slots=True)
class Start:
    """The start of one drafter: it drafts ``depths [S]`` tokens for ``contexts [S]``, sequences ``rows [S]``."""

    member: int
    guard: LockstepMember
    stepper: StepwiseDrafter
    rows: Sequence[int]
    contexts: Sequence[DraftContext]
    depths: Sequence[int]

    def rows_of(self, ids: Sequence[str]) -> list[int]:
        """Return the sequences with these ids."""
        numbers = {context.id: row for context, row in zip(self.contexts, self.rows, strict=True)}
        return [numbers[id] for id in ids]


class SingleDrafter:
    """One drafter that is called by itself."""

    def __init__(self, start: Start) -> None:
        self._start, self.ids = (
            start,
            {row: context.id for context, row in zip(start.contexts, start.rows, strict=True)},
        )
        opening: Opening = start.guard.call(Opening((), NO_ROWS), start.stepper.open, start.contexts, start.depths)
        self.block = LogitsBlock([start.member] * len(opening.ids), start.rows_of(opening.ids), opening.logits)

    def feed(self, tokens: Mapping[int, int]) -> None:
        """Feed the next token of each sequence; sequences without a token are finished."""
        rows, start = [row for row in self.block.rows if row in tokens], self._start
        self.block, ids, fed = NO_LOGITS, [self._ids[row] for row in rows], [tokens[row] for row in rows]
        if rows:
            logits = start.guard.call(NO_ROWS, start.stepper.feed, ids, fed)
            if len(logits):
                self.block = LogitsBlock([start.member] * len(rows), rows, logits)

    def close(self) -> None:
        """Do nothing: the drafter knows its tokens."""


class JointDrafters:
    """Drafters that share one native call for each position."""

    def __init__(self, starts: Sequence[Start]) -> None:
        jobs = list[tuple[Start, NativeForward, TokenBatch]]()
        for start in starts:
            direct = start.stepper.model.direct
            batch: TokenBatch = start.guard.call(TokenBatch(()), start.stepper.prepare, start.contexts, start.depths)
            if direct is not None and batch.segments:
                jobs.append((start, direct, batch))
        self.block = NO_LOGITS
        self._starts = [start for start, _, _ in jobs]
        self._fed: dict[int, list[int]] = {row: [] for start in self._starts for row in start.rows}
        self._opened = [start.rows_of([part.id for part in batch.segments]) for start, _, batch in jobs]
        if jobs:
            self._forward = JointForward([direct for _, direct, _ in jobs], [batch for *_, batch in jobs])
            members = [start.member for start, rows in zip(self._starts, self._opened, strict=True) for _ in rows]
            self._score(members, [row for rows in self._opened for row in rows])

    def feed(self, tokens: Mapping[int, int]) -> None:
        """Feed the next token of each sequence; sequences without a token are finished."""
        members, rows, _ = self.block
        self.block = NO_LOGITS
        kept = [row in tokens for row in rows]
        if not any(kept):
            return
        if not all(kept):
            members, rows = list(compress(members, kept)), list(compress(rows, kept))
        for row, token in tokens.items():
            self._fed.setdefault(row, []).append(token)
        self._forward.feed(np.array(kept), np.array([tokens[row] for row in rows], dtype=np.int64))
        self._score(members, rows)

    def close(self) -> None:
        """Note in every drafter which tokens were fed."""
        for start, rows in zip(self._starts, self._opened, strict=True):
            ids = {row: context.id for context, row in zip(start.contexts, start.rows, strict=True)}
            fed = [self._fed[row] for row in rows]
            start.guard.call(None, start.stepper.extend, [ids[row] for row in rows], fed)

    def _score(self, members: Sequence[int], rows: Sequence[int]) -> None:
        logits = self._forward.score()
        for start, seconds, valid in zip(self._starts, *self._forward.outcomes(), strict=True):
            start.guard.spend(seconds)
            if not valid:  # the rows are no numbers, so the drafter has no candidates in this step
                start.guard.call(None, _refuse)
        self.block = LogitsBlock(members, rows, logits)


def _refuse() -> None:
    """Raise, so that the drafter is excluded."""
    raise ValueError("the native library refused the batch")


@dataclass(slots=True)
class LockstepSession:
    """One step of lockstep drafting.

    Attributes:
        steppers: stepwise interfaces by drafter.
        members: the drafters of the pool, by number.
        native: whether drafters may share native calls.
        reading: seconds spent on reading logits, a task that a drafter alone would do as well.
    """

    steppers: Mapping[int, StepwiseDrafter]
    members: Sequence[LockstepMember]
    vocab_size: int
    clock: Clock
    native: bool = True
    reading: float = 0.0
    _groups: list[SingleDrafter | JointDrafters] = field(default_factory=list)

    @property
    def blocks(self) -> list[LogitsBlock]:
        """The current logits of the drafters that are left."""
        return [group.block for group in self._groups if group.block.rows]

    def open(
        self, contexts: Sequence[DraftContext], depths: Sequence[int], taking: Mapping[int, Sequence[int]]
    ) -> None:
        """Start the drafters on the sequences of ``taking``, for ``depths[row]`` tokens each."""
        joint: list[Start] = []
        for member, rows in taking.items():
            given = [contexts[row] for row in rows], [depths[row] for row in rows]
            start = Start(member, self.members[member], self.steppers[member], rows, *given)
            if self._joins(start):
                joint.append(start)
            else:
                self._groups.append(SingleDrafter(start))
        if joint:
            self._groups.append(JointDrafters(joint))

    def feed(self, tokens: Mapping[int, int]) -> None:
        """Feed the next token of each sequence; sequences without a token are finished."""
        for group in self._groups:
            group.feed(tokens)

    def close(self) -> None:
        """End the step."""
        for group in self._groups:
            group.close()

    def timed(self, read: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """Return ``read(*arguments)`` and add its time to ``reading``."""
        started = self.clock()
        found = read(*arguments)
        self.reading += self.clock() - started
        return found

    def _joins(self, start: Start) -> bool:
        direct = start.stepper.model.direct
        able = direct is not None and direct.vocab_size == self.vocab_size
        return self.native and able and start.guard.deadline is None
