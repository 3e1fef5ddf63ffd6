"""The engine: a loop of named verbs over parts that know nothing of each other."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cospec.config import EngineConfig
from cospec.core.interfaces import Clock, ExecutionMode, Model, MultiStepRunner
from cospec.core.output_processor import OutputProcessor
from cospec.core.scheduler import Scheduler
from cospec.core.stats import StepStats
from cospec.core.types import (
    Commit,
    Event,
    FinishReason,
    Request,
    RequestState,
    SchedulerOutput,
    StepOutput,
)
from cospec.errors import InvalidInput
from cospec.metrics.engine import Counters, EngineMetrics
from cospec.text.input_processor import InputProcessor

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineComponents:
    """What an engine is made of; see ``engine.build`` for how a configuration becomes parts."""

    model: Model
    scheduler: Scheduler
    execution_mode: ExecutionMode
    committer: OutputProcessor
    resolver: InputProcessor
    distribution: str
    tokenizer: Any = None  # a Hugging Face fast tokenizer; None for models without text
    model_path: Path | None = None
    clock: Clock = time.monotonic
    model_paths: tuple[Path, ...] = ()  # of all members of an ensemble
    weights: Callable[[], Mapping[str, float]] = dict  # of a pool's drafters, by name
    closers: tuple[Callable[[], None], ...] = ()  # what ends the threads and processes of the parts
    multi_step: MultiStepRunner | None = None


class Engine:
    """Writes the outputs of many requests at once. Not thread-safe: one thread adds, steps and aborts."""

    def __init__(self, parts: EngineComponents, config: EngineConfig | None = None) -> None:
        self.parts, self.config = parts, config or EngineConfig()
        self.scheduler, self.execution_mode, self.committer = parts.scheduler, parts.execution_mode, parts.committer
        self.counters = Counters()
        self._sequences: dict[str, RequestState] = {}
        self._taken = 0  # requests so far
        self._told: dict[str, set[str]] = {}  # reasons that were logged, by request

    @classmethod
    def build(cls, config: EngineConfig) -> Engine:
        """Load the models that ``config`` names.

        Raises:
            CospecError: a model, option or combination that cannot be served, in one sentence.
        """
        from cospec.core.assembly import build_components  # heavy imports, only when an engine is wanted

        return cls(build_components(config), config)

    @property
    def tokenizer(self) -> Any:
        return self.parts.tokenizer

    @property
    def model_path(self) -> Path | None:
        return self.parts.model_path

    @property
    def model_paths(self) -> tuple[Path, ...]:
        """Folders of all models that the distribution depends on."""
        single = (self.model_path,) if self.model_path is not None else ()
        return self.parts.model_paths or single

    @property
    def model_name(self) -> str:
        return self.config.served_model_name or self.config.model

    @property
    def distribution(self) -> str:
        return self.parts.distribution

    @property
    def vocab_size(self) -> int:
        return self.parts.model.vocab_size

    @property
    def max_model_len(self) -> int:
        return self.parts.resolver.max_len

    @property
    def acceptance_methods(self) -> tuple[str, str]:
        """See ``InputProcessor.acceptance_methods``."""
        return self.parts.resolver.acceptance_methods

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
        resolved = self.parts.resolver.resolve(request, self._taken)
        self._taken += 1
        sequence = RequestState(resolved, [*resolved.prompt, *resolved.committed])
        self._sequences[sequence.id] = sequence
        self.scheduler.add(sequence)

    def abort(self, ids: Iterable[str]) -> None:
        """End outputs now and give back their cache; unknown ids are ignored."""
        gone = [id for id in ids if id in self._sequences]
        for id in gone:
            sequence = self._sequences[id]
            sequence.finish = FinishReason.ABORT
            self.counters.finish(sequence.stats.cached_prompt_tokens, sequence.prompt_len, FinishReason.ABORT)
            self.committer.forget(id)
        self._forget(gone)

    def step(self) -> list[Event]:
        """Run one step for all requests that can take part; returns their events."""
        started = self.parts.clock()
        plan = self.scheduler.plan()
        if not plan.entries:
            return []
        planning = self.parts.clock() - started
        outcomes = self.execution_mode.run(plan)
        sequences = [outcome.entry.sequence for outcome in outcomes]
        contexts = sum([sequence.computed for sequence in sequences])
        commits, events = self.committer.commit(outcomes)
        self._broadcast(commits, sequences)
        self._observe(plan, outcomes, commits, contexts, planning, self.parts.clock() - started)
        return events

    def set_wakeup_fd(self, descriptor: int) -> None:
        """While the file descriptor is readable, a call runs one step only: a request is to be added or aborted."""
        if self.parts.multi_step is not None:
            self.parts.multi_step.wakeup_fd = descriptor

    def on_idle(self) -> None:
        """Called while no request waits: policies learn now, so that no step has to wait for learning."""
        self.scheduler.policy.learn()

    def metrics(self) -> EngineMetrics:
        """Counts since the start, and the present load."""
        scheduler = self.scheduler
        counted = self.counters.snapshot(
            len(scheduler.running), len(scheduler.waiting), scheduler.pages.usage, scheduler.preempted
        )
        return replace(
            counted,
            policy={name: float(value) for name, value in scheduler.policy.gauges().items()},
            drafter_weights={name: float(value) for name, value in self.parts.weights().items()},
            execution_mode_info={
                "execution_mode": self.execution_mode.info.name,
                "reason": self.execution_mode.info.reason,
            },
        )

    def close(self) -> None:
        """Abort everything and end threads and processes; the engine is of no use afterwards."""
        self.abort(list(self._sequences))
        for close in self.parts.closers:
            close()

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when a sequence or a cache page was lost; costs too much for every step."""
        scheduler = self.scheduler
        assert {s.id for s in (*scheduler.waiting, *scheduler.running)} == set(self._sequences), "a sequence was lost"
        for sequence in scheduler.running:
            assert 0 <= sequence.computed < len(sequence.tokens), "the last known token must not be computed"
        scheduler.pages.check_integrity()

    def _broadcast(self, commits: list[Commit], sequences: list[RequestState]) -> None:
        """Tell every part that follows the sequences what they gained."""
        self.execution_mode.commit(commits)
        ended = self.scheduler.finish_step(commits, sequences)
        for sequence in ended:
            self.counters.finish(sequence.stats.cached_prompt_tokens, sequence.prompt_len, str(sequence.finish))
        self._forget([sequence.id for sequence in ended])

    def _forget(self, ids: list[str]) -> None:
        if not ids:
            return
        for id in ids:
            del self._sequences[id]
            self._told.pop(id, None)
        self.scheduler.remove(ids)
        self.execution_mode.free(ids)

    def _observe(
        self,
        plan: SchedulerOutput,
        outcomes: list[StepOutput],
        commits: list[Commit],
        contexts: int,
        planning: float,
        seconds: float,
    ) -> None:
        known = proposed = accepted = committed = depth = drafts = 0
        for outcome, commit in zip(outcomes, commits, strict=True):
            known += outcome.entry.tokens
            committed += len(commit.tokens)
            if commit.drafted:
                drafts += 1
                proposed += commit.drafted
                accepted += len(commit.path)
            if outcome.draft is not None:
                depth = max(depth, outcome.draft.depth)
        stats = StepStats(
            step=plan.step,
            sequences=len(outcomes),
            batched_tokens=known + proposed,
            context_tokens=contexts,
            depth=depth,
            proposed=proposed,
            accepted=accepted,
            committed=committed,
            times=self.execution_mode.times,
            total=seconds,
            drafts=drafts,
            planning=planning,
        )
        self.scheduler.policy.observe(stats, commits)
        self.counters.observe(outcomes, commits, stats)
        self._count_paths(len(outcomes))

    def _count_paths(self, ran: int) -> None:
        """Count the requests of a step by how they ran, and log each reason once per request."""
        readable = self.execution_mode.readable
        self.counters.ran(ran, readable)
        if readable and log.isEnabledFor(logging.DEBUG):
            for id, reason in readable.items():
                told = self._told.setdefault(id, set()) if id in self._sequences else {reason}
                if reason not in told:
                    told.add(reason)
                    log.debug("request %s runs the readable way: %s", id, reason)
