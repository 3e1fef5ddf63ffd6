"""Engines whose verifier answers later, and takes several steps at a time."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Lock

from cospec.core.engine import Engine
from cospec.core.interfaces import Verifier
from cospec.core.plugin_base import AcceptanceMethod
from cospec.core.types import Commit, Draft, FinishReason, Request, RequestState, ScheduledRequest, StepOutput
from cospec.errors import VerifierLost


class QueuedVerifier:
    """Computes submissions in one thread, in their order, as the first stage of a pipeline does.

    Args:
        fails: called before each computation; whether its result is lost, and when: "before" or "after".
    """

    def __init__(self, inner: Verifier, max_in_flight: int, fails: Callable[[], str | None] = lambda: None) -> None:
        self.max_in_flight, self.inner = max_in_flight, inner
        self.most = 0  # submissions that were unfinished at the same time
        self._fails, self._lock = fails, Lock()
        self._thread = ThreadPoolExecutor(1, "verifier")
        self._unfinished: set[Future[list[StepOutput]]] = set()

    def acceptance_method(self, sequence: RequestState) -> AcceptanceMethod:
        return self.inner.acceptance_method(sequence)

    def submit(self, entries: Sequence[ScheduledRequest], drafts: Mapping[str, Draft]) -> Future[list[StepOutput]]:
        future = _Tracked(self._thread.submit(self._compute, entries, drafts), self._unfinished)
        self.most = max(self.most, len(self._unfinished))
        assert len(self._unfinished) <= self.max_in_flight, "the engine submits more steps than the verifier takes"
        return future

    def commit(self, commits: Sequence[Commit]) -> None:
        with self._lock:
            self.inner.commit(commits)

    def free(self, ids: Sequence[str]) -> None:
        with self._lock:
            self.inner.free(ids)

    def _compute(self, entries: Sequence[ScheduledRequest], drafts: Mapping[str, Draft]) -> list[StepOutput]:
        with self._lock:
            fails = self._fails()
            if fails == "before":
                raise RuntimeError("a stage failed")
            outputs = self.inner.submit(entries, drafts).result()
            if fails == "after":
                raise VerifierLost("A stage is unreachable.")
            return outputs


class _Tracked(Future[list[StepOutput]]):
    """A future that counts as unfinished until the engine has its result."""

    def __init__(self, real: Future[list[StepOutput]], unfinished: set[Future[list[StepOutput]]]) -> None:
        super().__init__()
        self._real, self._unfinished = real, unfinished
        unfinished.add(self)

    def done(self) -> bool:
        return self._real.done()

    def result(self, timeout: float | None = None) -> list[StepOutput]:
        try:
            return self._real.result(timeout)
        finally:
            self._unfinished.discard(self)


def with_steps_in_flight(
    engine: Engine,
    count: int,
    fails: Callable[[], str | None] = lambda: None,
    cls: type[QueuedVerifier] = QueuedVerifier,
) -> Engine:
    """The engine with a verifier in another thread that takes ``count`` steps at a time."""
    components = engine.execution_mode.components
    verifier = cls(components.verifier, count, fails)
    engine.execution_mode = type(engine.execution_mode)(replace(components, verifier=verifier))
    engine.scheduler.limits = replace(engine.scheduler.limits, max_in_flight=count)
    return engine


def most_in_flight(engine: Engine) -> int:
    """Submissions that were unfinished at the same time."""
    verifier = engine.execution_mode.components.verifier
    assert isinstance(verifier, QueuedVerifier)
    return verifier.most


@dataclass
class Disturbed:
    """What a run with aborts and errors produced, by request."""

    tokens: dict[str, tuple[int, ...]]
    ends: dict[str, FinishReason] = field(default_factory=dict)


def run_disturbed(engine: Engine, requests: Sequence[Request], seed: int, aborts: float) -> Disturbed:
    """Run requests that arrive over time; each step aborts an unfinished request with probability ``aborts``."""
    chance, arriving = random.Random(seed), list(requests)
    found = Disturbed({request.id: () for request in requests})
    unfinished: list[str] = []
    for _ in range(100_000):
        if not arriving and not engine.has_work:
            return found
        if arriving and chance.random() < 0.5:
            unfinished.append(arriving[0].id)
            engine.add(arriving.pop(0))
        if unfinished and chance.random() < aborts:
            id = chance.choice(unfinished)
            engine.abort([id])
            unfinished.remove(id)
            found.ends[id] = FinishReason.ABORT
        for event in engine.step():
            assert found.ends.get(event.id) is None, "an event of a request that ended"
            found.tokens[event.id] += event.tokens
            if event.finish is not None:
                found.ends[event.id] = event.finish
                unfinished.remove(event.id)
        engine.check_integrity()
    raise AssertionError("the engine does not come to an end")
