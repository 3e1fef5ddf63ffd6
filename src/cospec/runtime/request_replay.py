"""The requests that an engine process works on, and what a new process needs to go on with them.

A new process is given the delivered tokens as ``Request.resumed_output``. Under ``match`` the text of a request is a
function of prompt, parameters and seed, so the new process writes what the dead process would have written. Other
acceptance methods keep the distribution: the numbers of a step depend on the number of tokens before the step, so no
number that decided about a delivered token decides about a later token (``rng/random_streams.py``). Only the time of a
lost step may depend on its tokens: a native call of several steps ends early at a stop token.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace

from cospec.core.types import Event, FinishReason, Request
from cospec.errors import CospecError

MAX_CRASHES = 2  # a request that was live at so many crashes may be their cause


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request that has not finished, and what was delivered of its output.

    Attributes:
        losses: engine processes or replicas that were lost with the request.
        crashes: losses that the request may have caused.
    """

    request: Request
    events: asyncio.Queue[Event | CospecError]
    tokens: list[int] = field(default_factory=list)
    sources: Counter[str] = field(default_factory=Counter)
    ttft: float | None = None
    losses: int = 0
    crashes: int = 0

    def deliver(self, event: Event, now: float) -> None:
        """Pass an event of the engine on; ``now`` is of the monotonic clock."""
        if event.tokens and self.ttft is None and self.request.streams:
            self.ttft = now - self.request.arrival
        self.tokens += event.tokens
        self.sources.update(event.sources)
        self.events.put_nowait(self._whole(event) if self.losses else event)

    def fail(self, error: CospecError) -> None:
        """End the stream with an error."""
        self.events.put_nowait(error)

    def abort(self) -> None:
        """End the stream with finish reason ``abort``."""
        request = self.request
        self.events.put_nowait(Event(request.id, request.parent, request.index, "", (), (), finish=FinishReason.ABORT))

    def survives(self, most: int = MAX_CRASHES, crashed: bool = True) -> bool:
        """Note a loss; returns whether the request is to be replayed, which happens after less than ``most`` crashes.

        Args:
            crashed: whether a request may be the cause.
        """
        self.losses += 1
        self.crashes += crashed
        return self.crashes < most

    def resumed(self) -> Request:
        """The request as a new process has to be given it."""
        return replace(self.request, resumed_output=(*(self.request.resumed_output or ()), *self.tokens))

    def _whole(self, event: Event) -> Event:
        """The last event of a replayed request counts the tokens of the earlier process too."""
        if event.stats is None:
            return event
        ttft = event.stats.ttft if self.ttft is None else self.ttft
        return replace(event, stats=replace(event.stats, tokens_by_source=dict(self.sources), ttft=ttft))


async def next_event(events: asyncio.Queue[Event | CospecError], open_ids: set[str]) -> Event:
    """Return the next event of requests that share a queue, and remove a finished request from ``open_ids``.

    Raises:
        CospecError: a request failed.
    """
    item = await events.get()
    if isinstance(item, CospecError):
        raise item
    if item.finish is not None:
        open_ids.discard(item.id)
    return item
