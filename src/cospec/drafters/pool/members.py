"""One drafter of a pool: its name, how it is asked, and what becomes of it when it fails or is late.

A drafter that raises is left out of the round, and of more rounds each time it does so again; the sequences that it
knew are forgotten, because nobody can tell what state it is in. One that is late is left out alike: a local drafter
cannot be interrupted, so its result still counts; a result that is still on its way (``Drafter.executor``) is not
waited for.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cospec.core.interfaces import Clock, Future
from cospec.core.plugins import Drafter, StepwiseDrafter
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext, TokenScores
from cospec.errors import CospecError

FAILURES = (CospecError, ArithmeticError, LookupError, OSError, RuntimeError, ValueError)
LONGEST_REST = 64  # rounds

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Member:
    """A drafter in its pool. Written by the pool alone.

    Attributes:
        free: a proposal costs next to nothing, so it always takes part.
        stepper: how it is led, where the pool leads and it can be led; it is never asked for whole drafts then.
        deadline: seconds that a round may wait for it; None waits.
        later: it is asked for answers that come later.
        rest: rounds that it is still left out of, this one included.
        worked: it was asked in this round, and has not failed.
        lost: it raised, so the sequences that it knows have to be forgotten.
        left_out: rounds it was newly left out of, by reason.
        seconds: spent in it.
    """

    name: str
    drafter: Drafter
    clock: Clock
    free: bool = False
    stepper: StepwiseDrafter | None = None
    deadline: float | None = None
    later: bool = False
    rest: int = 0
    strikes: int = 0
    worked: bool = False
    lost: bool = False
    seconds: float = 0.0
    left_out: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, name: str, drafter: Drafter, clock: Clock, leads: bool, deadline: float | None = None) -> Member:
        """``leads``: the combiner leads drafters that can be led."""
        stepper = drafter.stepper() if leads else None
        later = stepper is None and drafter.executor is not None
        return cls(name, drafter, clock, drafter.capabilities.free, stepper, deadline, later)

    def call(self, verb: Callable[..., Any], *arguments: Any) -> Any:
        """What ``verb(*arguments)`` gives; None when it raises, or when the drafter is left out."""
        if self.rest:
            return None
        started = self.clock()
        result = self._guarded(verb, *arguments)
        taken = self.clock() - started
        self.seconds += taken
        if not self.rest:
            if self.deadline is not None and taken > self.deadline:
                self._leave_out("late", f"{taken:.3f} s")
            else:
                self.worked = True
        return result

    def spend(self, seconds: float) -> None:
        """It was at work for so long, without having been called."""
        self.seconds += seconds
        self.worked = True

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        """Whole drafts; none when it fails."""
        return self.call(self.drafter.propose, contexts, budgets) or []

    @property
    def looks(self) -> bool:
        """Whether it can tell what it makes of known tokens."""
        return self.stepper is not None or self.drafter.looks

    def look(self, contexts: Sequence[DraftContext]) -> dict[str, TokenScores]:
        """What it makes of the latest known tokens; nothing when it fails, or cannot tell."""
        return self.call(self._state.look, contexts) or {} if self.looks else {}

    def start(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> Future | None:
        """Ask for whole drafts that come later; None when the drafter works here, or fails."""
        executor = self.drafter.executor
        future: Future | None = None if executor is None else self.call(executor.submit, "propose", contexts, budgets)
        return future

    def collect(self, future: Future, started: float) -> list[Draft]:
        """What was asked for at ``started``, if it comes before the deadline."""
        began = self.clock()
        left = None if self.deadline is None else max(0.0, self.deadline - (began - started))
        if left == 0.0 and not future.done():
            self._leave_out("late", f"more than {self.deadline} s")
            return []
        drafts: list[Draft] = self._guarded(future.result, left) or []
        self.seconds += self.clock() - began
        return drafts

    def commit(self, commits: Sequence[Commit]) -> None:
        """Also while it is left out: it has to know what it will have to catch up on."""
        self._guarded(self._state.commit, commits)

    def forget(self, ids: Sequence[str]) -> None:
        """Forget sequences."""
        self._guarded(self._state.free, ids)

    def begin_round(self) -> None:
        """One round less to be left out of; a round that it worked in without failing makes up for a failure."""
        if self.worked:
            self.strikes = max(0, self.strikes - 1)
        self.worked, self.rest = False, max(0, self.rest - 1)

    def _guarded(self, verb: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return verb(*arguments)
        except TimeoutError:
            self._leave_out("late", f"more than {self.deadline} s")
        except FAILURES as error:
            self.lost = True
            self._leave_out("error", str(error) or type(error).__name__)
        return None

    def _leave_out(self, reason: str, what: str) -> None:
        """Of the rest of this round and of as many more as it failed before, doubled each time."""
        rounds = min(2**self.strikes, LONGEST_REST)
        self.rest, self.worked = rounds + 1, False
        self.strikes += 1
        self.left_out[reason] += 1
        log.warning("drafter %s is left out of %d rounds (%s: %s)", self.name, rounds, reason, what)

    @property
    def _state(self) -> Drafter | StepwiseDrafter:
        return self.drafter if self.stepper is None else self.stepper
