"""Engines under every round, and drafters that come late, with gaps or not at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

from cospec.core.engine import Engine
from cospec.core.interfaces import Clock, Executor
from cospec.core.plugin_base import Drafter
from cospec.core.submitted_step import Future as Answer
from cospec.core.submitted_step import SubmittedStep
from cospec.core.types import Draft, DraftBudget, DraftContext, ScheduledRequest, SchedulerOutput
from cospec.errors import DrafterLost
from cospec.execution.auto import Auto
from cospec.execution.draft_ahead import DraftAhead
from cospec.execution.draft_for_outcomes import DraftForOutcomes
from cospec.execution.pipelined import Pipelined
from cospec.execution.sequential import Sequential
from cospec.models.toy import ToyModel
from cospec.runtime.codec import Codec
from cospec.runtime.drafter_proxy import DrafterProxy
from cospec.runtime.in_process_executors import InlineExecutor, ThreadExecutor
from cospec.runtime.messages import (
    Commits,
    ContextDecoder,
    ContextEncoder,
    DrafterCommand,
    DrafterInfo,
    DrafterReply,
    Drafts,
    Free,
    Propose,
)
from cospec.sampling_params import SamplingParams
from harness.toys import ScriptedDrafter, make_request, toy_engine

PARAMS = SamplingParams(temperature=0, max_tokens=24)
MODES = {
    "auto": Auto,
    "sequential": Sequential,
    "pipelined": Pipelined,
    "draft-ahead": DraftAhead,
    "draft-for-outcomes": DraftForOutcomes,
}


def _failed(error: Exception) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


class Fragile(InlineExecutor):
    """Every third answer is lost, and every fifth does not come in time."""

    def __init__(self, drafter: Drafter, clock: Clock) -> None:
        super().__init__(drafter, clock)
        self._asked = 0

    def submit(self, method: str, *args: Any) -> Future[Any]:
        future = super().submit(method, *args)
        self._asked += method == "propose"
        if method == "propose" and self._asked % 3 == 0:
            return _failed(DrafterLost("The drafter died."))
        if method == "propose" and self._asked % 5 == 0:
            return _failed(TimeoutError())
        return future


class Gaps(InlineExecutor):
    """Loses what continues every third length."""

    def submit(self, method: str, *args: Any) -> Future[Any]:
        future = super().submit(method, *args)
        if method != "propose":
            return future
        left: Future[Any] = Future()
        left.set_result([draft for draft in future.result() if draft.base_len % 3])
        return left


class Late(Future[Any]):
    """Not there until it is waited for."""

    def __init__(self, real: Future[Any]) -> None:
        super().__init__()
        self._real = real

    def done(self) -> bool:
        return False

    def result(self, timeout: float | None = None) -> Any:
        return self._real.result(timeout)


class Slow(InlineExecutor):
    """Answers only when the caller waits: drafts requested during a verification are not ready at its end."""

    def submit(self, method: str, *args: Any) -> Future[Any]:
        future = super().submit(method, *args)
        return Late(future) if method == "propose" else future


class Wired(InlineExecutor):
    """What goes in and comes out travels as between two processes."""

    def __init__(self, drafter: Drafter, clock: Clock) -> None:
        super().__init__(drafter, clock)
        self.info, self.weights = DrafterInfo.of(drafter), dict[str, float]()
        self._outgoing, self._incoming = ContextEncoder(), ContextDecoder()

    def submit(self, method: str, *args: Any) -> Future[Any]:
        if method == "commit":
            return super().submit(method, _sent(Commits(*args), DrafterCommand).commits)
        if method == "free":
            for side in (self._outgoing, self._incoming):
                side.free(*args)
            return super().submit(method, _sent(Free(*args), DrafterCommand).ids)
        contexts, budgets = args
        sent = _sent(Propose(0, [self._outgoing.encode(each) for each in contexts], budgets), DrafterCommand)
        made = super().submit(method, [self._incoming.decode(each) for each in sent.contexts], sent.budgets)
        future: Future[Any] = Future()
        future.set_result(_sent(Drafts(0, made.result(), 0.0), DrafterReply).drafts)
        return future


def over_wire(drafter: Drafter, clock: Clock) -> DrafterProxy:
    """The drafter as an engine sees a drafter of another process."""
    return DrafterProxy(Wired(drafter, clock))


def _sent(message: Any, accepts: Any) -> Any:
    """What the other process gets of a message."""
    return Codec(accepts).decode(Codec(accepts).encode(message))


def _own(drafter: Drafter, clock: Clock) -> Executor:
    """The executor of a drafter elsewhere."""
    return cast(DrafterProxy, drafter).executor


class Prompt:
    """Hands over each call and waits for its end, so that no draft is late: the order of events is always the same."""

    parallel = True

    def __init__(self, inner: Executor, clock: Clock) -> None:
        self.busy, self._inner, self._clock = 0.0, inner, clock

    @property
    def present(self) -> bool:
        return self._inner.present

    @property
    def load(self) -> float:
        return self._inner.load

    def submit(self, method: str, *args: Any) -> Answer[Any]:
        started = self._clock()
        future = self._inner.submit(method, *args)
        while not future.done():
            with suppress(Exception):
                future.result(1.0)
        self.busy += self._clock() - started
        return future

    def close(self) -> None:
        self._inner.close()


HANDLES: dict[str, Callable[[Drafter, Clock], Executor]] = {
    "inline": InlineExecutor,
    "wired": Wired,
    "worker": ThreadExecutor,
    "process": _own,
    "prompt worker": lambda drafter, clock: Prompt(ThreadExecutor(drafter, clock), clock),
    "fragile": Fragile,
    "gaps": Gaps,
    "slow": Slow,
}


class Picky(DraftAhead):
    """Wrong on purpose: keeps what was made ahead only where it likes the tokens."""

    def submit(self, plan: SchedulerOutput) -> SubmittedStep:
        self.dispatcher.collect()
        ready = [(request, draft) for request, draft in self.dispatcher.buffer.ready.values() if draft is not None]
        self.dispatcher.buffer.drop(
            [request.id for request, draft in ready if request.context.assumed and draft.tokens[1:2] == (0,)]
        )
        return super().submit(plan)


class Peeking(DraftAhead):
    """Wrong on purpose: cuts the draft under verification by what was drafted ahead of it in the same step."""

    def select(self, entries: Sequence[ScheduledRequest]) -> tuple[Sequence[ScheduledRequest], Mapping[str, Draft]]:
        entries, drafts = super().select(entries)
        self.dispatcher.collect()
        disliked = {id for id, (_, ahead) in self.dispatcher.buffer.ready.items() if ahead and ahead.tokens[0] == 0}
        return entries, {id: draft for id, draft in drafts.items() if id not in disliked}


def under(engine: Engine, name: str, executor: str = "inline", cls: Callable[..., Any] | None = None) -> Engine:
    """The engine with another round, or one of class ``cls``."""
    components = engine.execution_mode.components
    own = HANDLES[executor](components.drafter, components.clock) if components.drafter else None
    engine.execution_mode = (cls or MODES[name])(replace(components, executor=own))
    return engine


class Recording(ScriptedDrafter):
    """Writes down who is drafted for."""

    def __init__(self) -> None:
        super().__init__([0, 1])
        self.batches: list[set[str]] = []

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        self.batches.append({context.id for context in contexts})
        return super().propose(contexts, budgets)


def engine_under(execution_mode: str, drafter: Drafter, count: int) -> Engine:
    """An engine in an execution mode, with so many greedy requests of 24 tokens."""
    made = under(toy_engine(ToyModel(4), drafter, k=2), execution_mode)
    for n in range(count):
        made.add(make_request(f"r{n}", (n % 4, 1), PARAMS))
    return made
