"""Engines whose verifier answers later, and takes several steps at a time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, cast

from torch import Tensor

from cospec.core.engine import Engine
from cospec.core.interfaces import Model, PipelinedModel
from cospec.core.model_io import BatchOutput, TokenBatch
from cospec.core.types import Commit, FinishReason, Request
from cospec.core.verifier import TargetVerifier
from cospec.distributed.pipeline_parallel_verifier import PipelineParallelVerifier
from cospec.errors import VerifierLost
from harness.methods import override


class QueuedModel:
    """Computes batches in one thread, in their order, as a pipeline does; see ``PipelinedModel``.

    Args:
        fails: called before each computation; whether its result is lost, and when: "before" or "after".

    Attributes:
        hidden_states: of the batch whose result was read last.
    """

    def __init__(self, inner: Model, max_in_flight: int, fails: Callable[[], str | None]) -> None:
        self.max_in_flight, self.inner = max_in_flight, inner
        self.most = 0  # batches that were unfinished at the same time
        self.cancelled = 0
        self.lock = Lock()
        self.hidden_states: Tensor | None = None
        self._fails, self._thread = fails, ThreadPoolExecutor(1, "target")
        self._unfinished: set[Future[BatchOutput]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def submit(self, batch: TokenBatch) -> Future[BatchOutput]:
        future = _Tracked(self._thread.submit(self._compute, batch), self)
        self._unfinished.add(future)
        self.most = max(self.most, len(self._unfinished))
        assert len(self._unfinished) <= self.max_in_flight, "the engine submits more steps than the target takes"
        return future

    def forget(self, future: Future[BatchOutput]) -> None:
        """The engine has the result, or has cancelled the batch."""
        self._unfinished.discard(future)

    def _compute(self, batch: TokenBatch) -> tuple[Tensor, Tensor | None]:
        with self.lock:
            fails = self._fails()
            if fails == "before":
                raise RuntimeError("a stage failed")
            logits = self.inner.forward(batch)
            if fails == "after":
                raise VerifierLost("A stage is unreachable.")
            return logits, self.inner.hidden_states


class _Tracked(Future[BatchOutput]):
    """A future that counts as unfinished until the engine has its result, or cancels it.

    ``done`` is False until then: what the engine does meanwhile depends on no thread's speed.
    """

    def __init__(self, real: Future[tuple[Tensor, Tensor | None]], model: QueuedModel) -> None:
        super().__init__()
        self._real, self._model, self._read = real, model, False

    def done(self) -> bool:
        return self._read

    def result(self, timeout: float | None = None) -> BatchOutput:
        try:
            logits, self._model.hidden_states = self._real.result(timeout)
        finally:
            self._read = True
            self._model.forget(self)
        return BatchOutput(logits, ())

    def cancel(self) -> bool:
        self._model.cancelled += 1
        self._model.forget(self)
        return self._real.cancel()


class QueuedVerifier(PipelineParallelVerifier):
    """A verifier whose target is a ``QueuedModel``."""

    def __init__(self, inner: TargetVerifier, max_in_flight: int, fails: Callable[[], str | None]) -> None:
        target = inner.model.inner if isinstance(inner.model, QueuedModel) else inner.model
        self.model = QueuedModel(target, max_in_flight, fails)
        inner.model = cast(PipelinedModel, self.model)
        override(inner, draws_suffice=lambda task: False)  # hidden states have the rows of all logits
        super().__init__(inner.model, inner)

    def commit(self, commits: Sequence[Commit]) -> None:
        with self.model.lock:
            super().commit(commits)

    def free(self, ids: Sequence[str]) -> None:
        with self.model.lock:
            super().free(ids)


def with_steps_in_flight(
    engine: Engine,
    count: int,
    fails: Callable[[], str | None] = lambda: None,
    cls: type[QueuedVerifier] = QueuedVerifier,
) -> Engine:
    """The engine with a verifier in another thread that takes ``count`` steps at a time."""
    components = engine.execution_mode.components
    assert isinstance(components.verifier, TargetVerifier)
    verifier = cls(components.verifier, count, fails)
    engine.execution_mode = type(engine.execution_mode)(replace(components, verifier=verifier))
    engine.scheduler.limits = replace(engine.scheduler.limits, max_in_flight=count)
    return engine


def most_in_flight(engine: Engine) -> int:
    """Submissions that were unfinished at the same time."""
    verifier = engine.execution_mode.components.verifier
    assert isinstance(verifier, QueuedVerifier)
    return verifier.model.most


def cancelled(engine: Engine) -> int:
    """Batches that the engine cancelled."""
    verifier = engine.execution_mode.components.verifier
    assert isinstance(verifier, QueuedVerifier)
    return verifier.model.cancelled


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
