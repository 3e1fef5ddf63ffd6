"""A step between its submission and its outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, NamedTuple, NoReturn, Protocol, TypeVar

from cospec.core.stats import StepTimes
from cospec.core.types import ScheduledRequest, StepOutput

if TYPE_CHECKING:
    from cospec.core.interfaces import Clock

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Future(Protocol[T_co]):
    """A result that may arrive later; ``concurrent.futures.Future`` implements it."""

    def done(self) -> bool:
        """Whether ``result`` returns without waiting."""

    def result(self, timeout: float | None = None) -> T_co:
        """Wait for the result.

        Raises:
            TimeoutError: the result did not arrive within ``timeout`` seconds.
            DrafterLost: a drafter's result will never arrive.
            VerifierLost: a verifier's result will never arrive.
        """


class CancellableFuture(Future[T_co], Protocol[T_co]):
    """A result that may be cancelled."""

    def cancel(self) -> object:
        """Save the work that is left, where that is possible; nothing reads the result."""


@dataclass(frozen=True, slots=True)
class FinishedFuture(Generic[T]):
    """A result that was computed at once."""

    value: T

    def done(self) -> bool:
        """Always True."""
        return True

    def result(self, timeout: float | None = None) -> T:
        """Return the result."""
        return self.value

    def cancel(self) -> None:
        """Do nothing: no work is left."""


@dataclass(frozen=True, slots=True)
class FailedFuture:
    """A result that will never arrive; ``result`` raises ``error``."""

    error: Exception

    def done(self) -> bool:
        """Always True."""
        return True

    def result(self, timeout: float | None = None) -> NoReturn:
        """Raise the error."""
        raise self.error

    def cancel(self) -> None:
        """Do nothing: no work is left."""


class StepResult(NamedTuple):
    """What a step produced.

    Attributes:
        outputs: one per entry; one per entry and step where one call runs several steps.
        times: seconds of the engine's thread: drafting, and submitting to the target and waiting for the target.
        python_path: requests with a part in Python, by id, each with the reason.
    """

    outputs: list[StepOutput]
    times: StepTimes
    python_path: Mapping[str, str]


class SubmittedStep(NamedTuple):
    """A step whose outputs the verifier computes.

    Attributes:
        entries: the requests in flight; an execution mode may leave out entries of the plan.
        future: outputs of the entries that were submitted to the verifier.
        times: seconds so far, see ``StepResult.times``.
        python_path: see ``StepResult.python_path``.
        failed: outputs of entries whose drafting raised, each with an error.
    """

    entries: Sequence[ScheduledRequest]
    future: CancellableFuture[list[StepOutput]]
    times: StepTimes = StepTimes()
    python_path: Mapping[str, str] = {}
    failed: Sequence[StepOutput] = ()

    def collect(self, clock: Clock) -> StepResult:
        """Wait for the outputs; raises what ``future`` raises."""
        if self.future.done():
            outputs, times = self.future.result(), self.times
        else:
            started = clock()
            outputs = self.future.result()
            times = replace(self.times, target=self.times.target + clock() - started)
        return StepResult([*outputs, *self.failed] if self.failed else outputs, times, self.python_path)
