"""The engine: plan, submit, collect, commit; each verb is a call of one component."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from cospec.config import EngineConfig
from cospec.core.interfaces import Clock, ExecutionMode, Model, MultiStepRunner
from cospec.core.output_processor import OutputProcessor
from cospec.core.scheduler import Scheduler
from cospec.core.stats import StepStats
from cospec.core.submitted_step import FailedFuture, StepResult, SubmittedStep
from cospec.core.types import (
    Commit,
    DeclaredDistribution,
    Event,
    FinishReason,
    Request,
    RequestState,
    ScheduledRequest,
    SchedulerOutput,
    StepOutput,
)
from cospec.errors import InvalidInput, VerifierEnded, VerifierLost, failure
from cospec.metrics.engine_counters import Counters, EngineMetrics
from cospec.text.input_processor import InputProcessor

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineComponents:
    """The components of an engine; ``assembly`` builds these from a configuration."""

    model: Model
    scheduler: Scheduler
    execution_mode: ExecutionMode
    output_processor: OutputProcessor
    input_processor: InputProcessor
    distribution: DeclaredDistribution
    tokenizer: Any = None  # a Hugging Face fast tokenizer; None for models without text
    model_path: Path | None = None
    clock: Clock = time.monotonic
    model_paths: tuple[Path, ...] = ()  # of all members of an ensemble
    models: tuple[Model, ...] = ()  # the same
    drafter_weights: Callable[[], Mapping[str, float]] = dict  # of the drafters of a pool, by name
    nodes: Callable[[], list[dict[str, Any]]] = list  # the status of drafter nodes
    node_totals: Callable[[], list[dict[str, Any]]] = list  # their counts, those of lost nodes included
    closers: tuple[Callable[[], None], ...] = ()  # end the threads and processes of the components
    multi_step: MultiStepRunner | None = None


class _StepInFlight(NamedTuple):
    """A submitted step, and the seconds of the engine's thread so far; those of ``planning`` are part of them."""

    plan: SchedulerOutput
    submitted: SubmittedStep
    planning: float
    seconds: float


class Engine:
    """Writes the outputs of many requests at once. Not thread-safe: one thread adds, steps and aborts."""

    def __init__(self, parts: EngineComponents, config: EngineConfig | None = None) -> None:
        self.parts, self.config = parts, config or EngineConfig()
        self.scheduler, self.execution_mode = parts.scheduler, parts.execution_mode
        self.output_processor = parts.output_processor
        self.counters = Counters()
        self._sequences: dict[str, RequestState] = {}
        self._added = 0  # requests so far; part of a seed where something learns, see ``own_seed``
        self._logged: dict[str, set[str]] = {}  # reasons that were logged, by request
        self._in_flight: deque[_StepInFlight] = deque()  # in the order of submission
        self._aborted: set[str] = set()  # requests in flight that were aborted
        self.ended: str | None = None  # why the target computes no step any more

    @property
    def tokenizer(self) -> Any:
        return self.parts.tokenizer

    @property
    def model_path(self) -> Path | None:
        return self.parts.model_path

    @property
    def model_paths(self) -> tuple[Path, ...]:
        """Folders of all models that the distribution depends on."""
        return self.parts.model_paths or tuple(filter(None, [self.model_path]))

    @property
    def model_name(self) -> str:
        return self.config.served_model_name or self.config.model

    @property
    def distribution(self) -> str:
        """The name of the distribution of requests without an ensemble of their own."""
        return self.parts.distribution.name

    @property
    def vocab_size(self) -> int:
        return self.parts.model.vocab_size

    @property
    def max_model_len(self) -> int:
        return self.parts.input_processor.max_len

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def add(self, request: Request) -> None:
        """Queue one output.

        Raises:
            InvalidInput: the request cannot be served by this model; nothing was queued.
        """
        if request.id in self._sequences:
            raise InvalidInput("request id", request.id, "one that no unfinished request has")
        resolved = self.parts.input_processor.resolve(request, self._added)
        self._added += 1
        sequence = RequestState(resolved, [*resolved.prompt, *(resolved.resumed_output or ())])
        self._sequences[sequence.id] = sequence
        self.scheduler.add(sequence)

    def abort(self, ids: Iterable[str]) -> None:
        """End outputs now; unknown ids are ignored.

        Their cache pages are freed now, or for requests in flight when the step is collected.
        """
        ended = []
        for id in ids:
            sequence = self._sequences.get(id)
            if sequence is None or sequence.finish is not None:
                continue
            sequence.finish = FinishReason.ABORT
            self.counters.finish(sequence.stats, sequence.prompt_len, FinishReason.ABORT)
            self.output_processor.forget(id)
            if self.scheduler.is_in_flight(id):
                self._aborted.add(id)
            else:
                ended.append(id)
        self._forget(ended)

    def step(self) -> list[Event]:
        """Submit steps while the verifier takes more, then collect the oldest; returns the events of its requests."""
        most = self.scheduler.limits.max_in_flight
        while len(self._in_flight) < most and self._submit(self.scheduler.plan, self.execution_mode.submit):
            pass
        while (length := self._draft_ahead()) is not None and len(self._in_flight) < most:
            plan, windows = partial(self.scheduler.plan_window, length), self.execution_mode.windows_ahead
            oldest_done = self._in_flight[0].submitted.future.done
            if windows is None or not self._submit(plan, partial(windows.submit, oldest_done=oldest_done)):
                break
        return self._collect() if self._in_flight else []

    def _draft_ahead(self) -> int | None:
        """Draft ahead for a request that runs alone; returns the number of tokens before its next window, if any."""
        windows, alone = self.execution_mode.windows_ahead, self.scheduler.alone_in_flight
        if windows is None or alone is None or self._in_flight[0].submitted.future.done():  # may refute windows
            return None
        return windows.draft(alone)

    def _submit(self, make: Callable[[], SchedulerOutput], submit: Callable[[SchedulerOutput], SubmittedStep]) -> bool:
        """Plan and submit one step; False where no request is ready."""
        started = self.parts.clock()
        plan = make()
        if not plan.entries:
            return False
        planned = self.parts.clock()
        try:
            submitted = submit(plan)
        except Exception as error:  # other steps, and requests that wait, go on
            submitted = SubmittedStep(plan.entries, FailedFuture(error))
        if not submitted.entries:
            return False
        self.scheduler.start_step(submitted.entries)
        self._in_flight.append(_StepInFlight(plan, submitted, planned - started, self.parts.clock() - started))
        return True

    def _collect(self) -> list[Event]:
        """Wait for the oldest step in flight, and commit its outputs.

        The seconds of a step are those of this thread. Overlapping steps never count the same time.
        """
        started, step = self.parts.clock(), self._in_flight[0]
        entries = step.submitted.entries
        try:
            result = self.execution_mode.collect(step.submitted)
        except VerifierLost as error:
            return self._recover(self._end_oldest(entries), error)
        except Exception as error:  # as in ``_submit``
            log.error("a step of %d requests failed", len(entries), exc_info=error)
            return self._retry(self._end_oldest(entries), error)
        current = self._end_oldest(entries)
        if len(current) < len(entries):
            result = _only({entry.sequence.id for entry in current}, result)
        sequences = [output.entry.sequence for output in result.outputs]
        contexts = sum([sequence.computed for sequence in sequences])
        commits, events = self.output_processor.commit(result.outputs)
        self._broadcast(commits, sequences)
        if commits:
            seconds = step.seconds + self.parts.clock() - started
            self._observe(step, result, commits, contexts, seconds)
        return events

    def _end_oldest(self, entries: Sequence[ScheduledRequest]) -> list[ScheduledRequest]:
        """The oldest step is no longer in flight; returns the entries whose outputs count.

        The others are refuted windows, and windows of aborted requests, which the engine forgets now.
        """
        self._in_flight.popleft()
        current = self.scheduler.clear_in_flight(entries)
        if self._aborted:
            aborted = self._aborted.intersection([entry.sequence.id for entry in current])
            self._aborted -= aborted
            self._forget(list(aborted))
            current = [entry for entry in current if entry.sequence.id not in aborted]
        return current

    def _cancel_refuted(self) -> None:
        """Cancel steps in flight whose outputs nothing reads any more (PipeInfer's early exit)."""
        kept: list[_StepInFlight] = []
        for step in self._in_flight:
            entries = step.submitted.entries
            if any(map(self.scheduler.is_current, entries)):
                kept.append(step)
            else:
                step.submitted.future.cancel()
                self.scheduler.clear_in_flight(entries)
                self.counters.cancelled_steps += 1
        if len(kept) < len(self._in_flight):
            self._in_flight = deque(kept)

    def _retry(self, entries: Sequence[ScheduledRequest], error: Exception) -> list[Event]:
        """Compute the requests of a failed step again from their committed tokens; some may have failed too often.

        All components forget the requests first. The outputs are dropped, so no random number is used twice.
        """
        sequences = [entry.sequence for entry in entries]
        self.execution_mode.free([sequence.id for sequence in sequences])
        given_up = {sequence.id for sequence in self.scheduler.retry(sequences)}
        ended = [entry for entry in entries if entry.sequence.id in given_up]
        outputs = [StepOutput(entry, None, None, error=failure(error)) for entry in ended]
        _, events = self.output_processor.commit(outputs)
        self._end([entry.sequence for entry in ended])
        self._cancel_refuted()
        return events

    def _recover(self, failed: Sequence[ScheduledRequest], error: VerifierLost) -> list[Event]:
        """Compute all running requests again: the target's caches are lost, and all steps in flight with these."""
        self.counters.verifier_losses += 1
        self.ended = str(error) if isinstance(error, VerifierEnded) else None
        entries = {entry.sequence.id: entry for entry in failed}
        while self._in_flight:
            step = self._in_flight[0].submitted
            with suppress(Exception):  # the verifier still uses the caches of steps that it has not answered
                self.execution_mode.collect(step)
            entries |= {entry.sequence.id: entry for entry in self._end_oldest(step.entries)}
        left = [entry for entry in entries.values() if entry.sequence.id in self._sequences]  # others were aborted
        events = self._retry(left, error)
        self.execution_mode.free([sequence.id for sequence in self.scheduler.lose_cache()])
        return events

    def set_wakeup_fd(self, descriptor: int) -> None:
        """A readable descriptor signals pending commands; the call then stops after one step."""
        if self.parts.multi_step is not None:
            self.parts.multi_step.wakeup_fd = descriptor

    def on_idle(self) -> None:
        """Have policies learn while no request waits, so that no step waits for learning."""
        self.scheduler.policy.learn()

    def metrics(self) -> EngineMetrics:
        """Counts since the start, and the present load."""
        scheduler, mode = self.scheduler, self.execution_mode.info
        counted = self.counters.snapshot(
            len(scheduler.running), len(scheduler.waiting), scheduler.pages.usage, scheduler.preempted
        )
        return replace(
            counted,
            steps_in_flight=len(self._in_flight),
            policy={name: float(value) for name, value in scheduler.policy.gauges().items()},
            nodes=self.parts.nodes(),
            node_totals=self.parts.node_totals(),
            drafter_weights={name: float(value) for name, value in self.parts.drafter_weights().items()},
            drafts_ahead=dict(mode.drafts_ahead),
            prices=self.config.prices,
            execution_mode_info={"execution_mode": mode.name, "reason": mode.reason},
        )

    def close(self) -> None:
        """Abort everything and end threads and processes; the engine cannot be used afterwards."""
        self.abort(list(self._sequences))
        while self._in_flight:
            self._collect()
        for close in self.parts.closers:
            close()

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when a sequence or a cache page was lost; costs too much for every step."""
        scheduler = self.scheduler
        assert {s.id for s in (*scheduler.waiting, *scheduler.running)} == set(self._sequences), "a sequence was lost"
        steps = [step.submitted.entries for step in self._in_flight]
        current = [entry for entries in steps for entry in entries if scheduler.is_current(entry)]
        assert len(current) == scheduler.windows_in_flight, "the scheduler knows of other steps in flight"
        first = [entry.sequence.id for entry in current if entry.assumed is None or entry.holds]
        assert len(first) == len(set(first)), "a sequence is in two steps"
        assert all([any(map(scheduler.is_current, entries)) for entries in steps]), "a refuted step is in flight"
        in_flight = {entry.sequence.id for entry in current}
        assert self._aborted <= in_flight, "an aborted sequence is kept without a step in flight"
        for sequence in scheduler.running:
            assert 0 <= sequence.computed < len(sequence.tokens), "the last known token must not be computed"
        scheduler.pages.check_integrity()

    def _broadcast(self, commits: list[Commit], sequences: list[RequestState]) -> None:
        """Report the commits to target, drafter and scheduler; ``_observe`` reports the commits to the policy."""
        self.execution_mode.commit(commits)
        self._end(self.scheduler.apply_commits(commits, sequences))
        if self._in_flight:
            self.scheduler.drop_refuted(sequences)
            self._cancel_refuted()

    def _end(self, sequences: Iterable[RequestState]) -> None:
        """Count and forget sequences that ended."""
        ended = []
        for sequence in sequences:
            self.counters.finish(sequence.stats, sequence.prompt_len, str(sequence.finish))
            ended.append(sequence.id)
        self._forget(ended)

    def _forget(self, ids: list[str]) -> None:
        if not ids:
            return
        for id in ids:
            del self._sequences[id]
            self._logged.pop(id, None)
        self.scheduler.remove(ids)
        self.execution_mode.free(ids)

    def _observe(
        self, step: _StepInFlight, result: StepResult, commits: list[Commit], contexts: int, seconds: float
    ) -> None:
        known = proposed = accepted = committed = depth = drafts = 0
        for output, commit in zip(result.outputs, commits, strict=True):
            known += output.entry.num_tokens
            committed += len(commit.tokens)
            if commit.drafted:
                drafts += 1
                proposed += commit.drafted
                accepted += len(commit.path)
            if output.draft is not None:
                depth = max(depth, output.draft.depth)
        stats = StepStats(
            step=step.plan.step,
            sequences=len(commits),
            batched_tokens=known + proposed,
            context_tokens=contexts,
            depth=depth,
            proposed=proposed,
            accepted=accepted,
            committed=committed,
            times=result.times,
            total=seconds,
            drafts=drafts,
            planning=step.planning,
            groups=self.execution_mode.info.groups,
            planned_sequences=len(step.plan.entries),
        )
        self.scheduler.policy.observe(stats, commits)
        self.counters.observe(result.outputs, commits, stats)
        self._count_paths(len(commits), result.python_path)

    def _count_paths(self, ran: int, python_path: Mapping[str, str]) -> None:
        """Count the requests of a step by how they ran, and log each reason once per request."""
        self.counters.ran(ran, python_path)
        if python_path and log.isEnabledFor(logging.DEBUG):
            for id, reason in python_path.items():
                logged = self._logged.setdefault(id, set()) if id in self._sequences else {reason}
                if reason not in logged:
                    logged.add(reason)
                    log.debug("request %s uses the Python path: %s", id, reason)


def _only(ids: Container[str], result: StepResult) -> StepResult:
    """The result with the outputs of some requests alone."""
    outputs = [output for output in result.outputs if output.entry.sequence.id in ids]
    python_path = {id: reason for id, reason in result.python_path.items() if id in ids}
    return result._replace(outputs=outputs, python_path=python_path)
