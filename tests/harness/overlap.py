"""Engines under every round, and drafters that come late, with gaps or not at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, cast

from cospec.engine.engine import Engine
from cospec.errors import DrafterLost
from cospec.plugins import Drafter
from cospec.protocols import Handle
from cospec.rounds.ahead import DraftAhead
from cospec.rounds.auto import Auto
from cospec.rounds.handles import Here, Worker
from cospec.rounds.pipelined import Pipelined
from cospec.rounds.remote import RemoteDrafter
from cospec.rounds.sequential import Sequential
from cospec.rounds.wire import pack, unpack
from cospec.types import Draft, Outcome, Plan, PlanEntry

ROUNDS = {"auto": Auto, "sequential": Sequential, "pipelined": Pipelined, "draft-ahead": DraftAhead}


def _failed(error: Exception) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


class Fragile(Here):
    """Every third answer is lost, and every fifth does not come in time."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self._asked = 0

    def submit(self, method: str, *args: Any) -> Future[Any]:
        future = super().submit(method, *args)
        self._asked += method == "propose"
        if method == "propose" and self._asked % 3 == 0:
            return _failed(DrafterLost("The drafter died."))
        if method == "propose" and self._asked % 5 == 0:
            return _failed(TimeoutError())
        return future


class Gaps(Here):
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


class Slow(Here):
    """Answers only when somebody waits: what is asked for beside a verification is not there at its end."""

    def submit(self, method: str, *args: Any) -> Future[Any]:
        future = super().submit(method, *args)
        return Late(future) if method == "propose" else future


class Wired(Here):
    """What goes in and comes out travels as between two processes."""

    def submit(self, method: str, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(_sent(super().submit(method, *_sent(args)).result()))
        return future


def _sent(message: Any) -> Any:
    head, rows = pack(message)
    return unpack(head, [bytearray(row) for row in rows])


HANDLES: dict[str, Callable[[Drafter], Handle]] = {
    "here": Here,
    "wired": Wired,
    "worker": Worker,
    "process": lambda drafter: cast(RemoteDrafter, drafter).handle,
    "fragile": Fragile,
    "gaps": Gaps,
    "slow": Slow,
}


class Picky(DraftAhead):
    """Wrong on purpose: keeps what was made ahead only where it likes the tokens."""

    def run(self, plan: Plan) -> list[Outcome]:
        self.desk.collect()
        ready = [(ask, draft) for ask, draft in self.desk.pool.ready.values() if draft is not None]
        self.desk.pool.drop([ask.id for ask, draft in ready if ask.context.assumed and draft.tokens[1:2] == (0,)])
        return super().run(plan)


class Peeking(DraftAhead):
    """Wrong on purpose: cuts the draft under verification by what was drafted ahead of it in the same step."""

    def choose(self, entries: Sequence[PlanEntry]) -> tuple[Sequence[PlanEntry], Mapping[str, Draft]]:
        entries, drafts = super().choose(entries)
        self.desk.collect()
        disliked = {id for id, (_, ahead) in self.desk.pool.ready.items() if ahead and ahead.tokens[0] == 0}
        return entries, {id: draft for id, draft in drafts.items() if id not in disliked}


def under(engine: Engine, name: str, handle: str = "here", cls: Callable[..., Any] | None = None) -> Engine:
    """The engine with another round, or one of class ``cls``."""
    crew = engine.round.crew
    own = HANDLES[handle](crew.drafter) if crew.drafter else None
    engine.round = (cls or ROUNDS[name])(replace(crew, handle=own))
    return engine
