"""One drafter of a pool: its name, its calls, and its exclusion after failures or delays.

A drafter that raises is excluded from the step, and from more steps after each repetition. Its sequences are freed,
because its state is undefined. A late drafter is excluded alike. A local drafter cannot be interrupted, so its late
result still counts; a pending result of a remote drafter (``Drafter.executor``) is not waited for.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cospec.core.drafter_capabilities import TokenScores
from cospec.core.interfaces import Clock, Executor
from cospec.core.plugin_base import Drafter
from cospec.core.submitted_step import Future
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext
from cospec.drafters.interfaces import StepwiseDrafter
from cospec.errors import CospecError

FAILURES = (CospecError, ArithmeticError, LookupError, OSError, RuntimeError, ValueError)
LONGEST_REST = 64  # steps

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Member:
    """A drafter in its pool. Written by the pool alone.

    Attributes:
        costless: a proposal costs next to nothing, so the drafter always takes part.
        stepper: the stepwise interface, if the pool runs the drafter in lockstep; whole drafts are then never
            requested.
        steps_elsewhere: the same, where the drafter's executor answers token by token.
        deadline: seconds that a step may wait for the drafter; None waits without limit.
        later: its answers are asynchronous.
        rest: steps of its exclusion, the current step included.
        worked: it was called in this step, and has not failed.
        lost: it raised, so its sequences must be freed.
        left_out: number of exclusions, by reason.
        seconds: spent in the drafter.
        executor: the drafter's own; None for a local drafter.
    """

    name: str
    drafter: Drafter
    clock: Clock
    costless: bool = False
    stepper: StepwiseDrafter | None = None
    steps_elsewhere: bool = False
    deadline: float | None = None
    later: bool = False
    rest: int = 0
    failures: int = 0
    worked: bool = False
    lost: bool = False
    seconds: float = 0.0
    left_out: Counter[str] = field(default_factory=Counter)
    notices: list[Future[Any]] = field(default_factory=list)  # commits and frees of an asynchronous drafter
    scoring: list[Future[Any]] = field(default_factory=list)  # scores that an asynchronous drafter was asked for
    executor: Executor | None = field(init=False)

    def __post_init__(self) -> None:
        self.executor = self.drafter.executor

    @classmethod
    def of(
        cls,
        name: str,
        drafter: Drafter,
        clock: Clock,
        lockstep: bool,
        deadline: float | None = None,
        token_steps: bool = False,
    ) -> Member:
        """Create a member.

        Args:
            lockstep: the combiner runs stepwise drafters in lockstep.
            token_steps: also drafters on nodes, with one question per token.
        """
        stepper = drafter.stepper() if lockstep else None
        later = stepper is None and drafter.executor is not None
        elsewhere = later and lockstep and token_steps and drafter.is_stepwise
        return cls(name, drafter, clock, drafter.capabilities.costless, stepper, elsewhere, deadline, later)

    def call(self, failed: Any, verb: Callable[..., Any], *arguments: Any) -> Any:
        """Return ``verb(*arguments)``; ``failed`` if it raises, or if the drafter is excluded."""
        if self.rest:
            return failed
        started = self.clock()
        result = self._guarded(failed, verb, *arguments)
        taken = self.clock() - started
        self.seconds += taken
        if not self.rest:
            if self.deadline is not None and taken > self.deadline:
                self._exclude("late", f"{taken:.3f} s")
            else:
                self.worked = True
        return result

    def spend(self, seconds: float) -> None:
        """Add seconds of work that ran outside ``call``."""
        self.seconds += seconds
        self.worked = True

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        """Return whole drafts; none on failure."""
        drafts: list[Draft] = self.call([], self.drafter.propose, contexts, budgets)
        return drafts

    @property
    def present(self) -> bool:
        """Whether the drafter can take part: it is not excluded, and its process runs."""
        return not self.rest and (self.executor is None or self.executor.present)

    @property
    def is_parallel(self) -> bool:
        """Whether the drafter works in another process, or on another machine."""
        return self.executor is not None and self.executor.parallel

    @property
    def load(self) -> float:
        """Proposals of earlier steps that wait for an answer."""
        return 0.0 if self.executor is None else self.executor.load

    @property
    def scores_known_tokens(self) -> bool:
        """Whether the drafter can score known tokens."""
        return self.stepper is not None or self.drafter.scores_known_tokens

    def score_known_tokens(self, contexts: Sequence[DraftContext]) -> dict[str, TokenScores]:
        """Return scores of the latest known tokens; none on failure, or if the drafter cannot score."""
        if not self.scores_known_tokens:
            return {}
        scores: dict[str, TokenScores] = self.call({}, self._state.score_known_tokens, contexts)
        return scores

    def start_scoring(self, contexts: Sequence[DraftContext]) -> None:
        """Request scores asynchronously; the drafter reads the tokens while the target works."""
        if self.executor is None or not self.scores_known_tokens:
            return
        copies = [replace(context, tokens=list(context.tokens)) for context in contexts]  # the lists grow meanwhile
        future: Future[Any] | None = self.call(None, self.executor.submit, "score_known_tokens", copies)
        if future is not None:
            self.scoring.append(future)

    def collect_scores(self) -> list[dict[str, TokenScores]]:
        """Return the scores that have arrived; never waits."""
        done = [future for future in self.scoring if future.done()]
        self.scoring = [future for future in self.scoring if future not in done]
        return [self._guarded({}, future.result, 0) for future in done]

    def start(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> Future[Any] | None:
        """Request whole drafts asynchronously; None if the drafter is local, or on failure."""
        if self.executor is None:
            return None
        future: Future[Any] | None = self.call(None, self.executor.submit, "propose", contexts, budgets)
        return future

    def start_step(self, contexts: Sequence[DraftContext], distributions: bool) -> Future[Any] | None:
        """Request one candidate after each context from a drafter elsewhere; None on failure."""
        assert self.executor is not None, "a local drafter is stepped by its stepper"
        future: Future[Any] | None = self.call(None, self.executor.submit, "candidates", contexts, distributions)
        return future

    def collect(self, future: Future[Any], started: float, failed: Any) -> Any:
        """Return the result of a request of time ``started``; ``failed`` if none comes before the deadline."""
        began = self.clock()
        left = None if self.deadline is None else max(0.0, self.deadline - (began - started))
        if left == 0.0 and not future.done():
            self._exclude("late", f"more than {self.deadline} s")
            return failed
        result = self._guarded(failed, future.result, left)
        self.seconds += self.clock() - began
        return result

    def commit(self, commits: Sequence[Commit]) -> None:
        """Commit also while excluded: the drafter must know which tokens it misses."""
        self._notify("commit", commits)

    def forget(self, ids: Sequence[str]) -> None:
        """Forget sequences."""
        self._notify("free", ids)

    def begin_step(self) -> None:
        """Count one step less of exclusion; a step with work and without failure compensates for one failure."""
        if self.notices:
            done = [future for future in self.notices if future.done()]
            self.notices = [future for future in self.notices if future not in done]
            for future in done:
                self._guarded(None, future.result, 0)
        if self.worked:
            self.failures = max(0, self.failures - 1)
        self.worked, self.rest = False, max(0, self.rest - 1)

    def _notify(self, method: str, argument: Any) -> None:
        """Call ``commit`` or ``free``; a failure of an asynchronous drafter shows in a later step."""
        if self.executor is None or self.stepper is not None:
            state = self._state
            self._guarded(None, state.commit if method == "commit" else state.free, argument)
        else:
            future: Future[Any] | None = self._guarded(None, self.executor.submit, method, argument)
            if future is not None:
                self.notices.append(future)

    def _guarded(self, failed: Any, verb: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return verb(*arguments)
        except TimeoutError:
            self._exclude("late", f"more than {self.deadline} s")
        except FAILURES as error:
            self.lost = True
            self._exclude("error", str(error) or type(error).__name__)
        return failed

    def _exclude(self, reason: str, what: str) -> None:
        """Exclude the drafter from this step and more: twice as many after each failure."""
        steps = min(2**self.failures, LONGEST_REST)
        self.rest, self.worked = steps + 1, False
        self.failures += 1
        self.left_out[reason] += 1
        log.warning("drafter %s is left out of %d steps (%s: %s)", self.name, steps, reason, what)

    @property
    def _state(self) -> Drafter | StepwiseDrafter:
        return self.drafter if self.stepper is None else self.stepper
