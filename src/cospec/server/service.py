"""What every endpoint shares: the engine's client, the tokenizer, the metrics, and one call in progress."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request as HttpRequest

from cospec.engine.requests import make_requests
from cospec.engine.serving import EngineClient
from cospec.engine.tokens import Tokens
from cospec.errors import CospecError, InvalidInput, words
from cospec.params import SamplingParams
from cospec.server.errors import Overloaded, UnknownModel
from cospec.server.metrics import ServerMetrics
from cospec.server.schemas import Sampled
from cospec.stats import RequestStats, TokenLogprobs
from cospec.types import Event, Finish, Request

Prompt = tuple[str, tuple[int, ...]]  # its text, needed for ``echo`` only, and its token ids


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request that asks for outputs.

    Attributes:
        id: of the answer, such as ``cmpl-...``.
        requests: one per choice, in order of the choices' indices: prompts first, then ``n``.
        prompts: the text of each choice's prompt, for ``echo``.
        muted: whether the output is thrown away, as ``max_tokens`` 0 wants it.
    """

    id: str
    requests: tuple[Request, ...]
    prompts: tuple[str, ...]
    model: str
    body: Sampled
    muted: bool = False
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(slots=True)
class Output:
    """What one choice has gathered so far. Written by ``take`` alone."""

    prompt: str
    request: Request
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish: Finish | None = None
    stop_reason: str | int | None = None
    stats: RequestStats | None = None
    law: str = "target"
    started: bool = False

    def take(self, event: Event) -> None:
        """Add an event."""
        self.text += event.text
        self.tokens.extend(event.tokens)
        self.sources.extend(event.sources)
        self.logprobs.extend(event.logprobs)
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        self.finish, self.stop_reason = event.finish, event.stop_reason
        self.stats = event.stats or self.stats
        self.law = event.law
        self.started = True


class Service:
    """The engine as the endpoints see it.

    Args:
        limit: outputs that may be written or wait at once; None for any number.
        strict: refuse keys of a request that are not known.
    """

    def __init__(
        self,
        client: EngineClient,
        tokens: Tokens,
        metrics: ServerMetrics,
        limit: int | None = None,
        strict: bool = False,
    ) -> None:
        self.client = client
        self.limit, self.strict = limit, strict
        self.tokens = tokens
        self.metrics = metrics
        self.info = client.info
        self.started = int(time.time())

    def check_model(self, name: str | None) -> None:
        """Raises ``UnknownModel`` when ``name`` is given and is not the served model."""
        if name is not None and name != self.info.model_name:
            raise UnknownModel(name, self.info.model_name)

    def call(self, prefix: str, body: Sampled, prompts: Sequence[Prompt], params: SamplingParams) -> Call:
        """Make the requests of a call: every prompt, ``params.n`` times.

        Raises:
            InvalidInput: a token id is outside the vocabulary, or the call alone is above the limit.
            Overloaded: too much is under way.
        """
        self.tokens.known(params.stop_token_ids, "stop_token_ids")
        self.tokens.known(tuple(params.logit_bias or ()), "logit_bias")
        self._check_room(len(prompts) * params.n)
        id = f"{prefix}-{uuid.uuid4().hex}"
        now = time.monotonic()
        requests: list[Request] = []
        for number, (_, ids) in enumerate(prompts):
            made = make_requests(f"{id}-{number}", ids, params, body.choice(), now)
            # Nobody reads along unless the answer streams: one event for all of an output is enough.
            requests.extend(
                dataclasses.replace(request, priority=body.priority, law=body.law, streams=bool(body.stream))
                for request in made
            )
        texts = tuple(text for text, _ in prompts for _ in range(params.n))
        return Call(id, tuple(requests), texts, self.info.model_name, body)

    def _check_room(self, outputs: int) -> None:
        if self.limit is None:
            return
        if outputs > self.limit:
            allowed = f"at most {self.limit} for all prompts together"
            raise InvalidInput("n", words(f"giving {outputs} outputs"), allowed)
        if self.client.active + outputs > self.limit:
            raise Overloaded(self.limit)

    async def events(self, http: HttpRequest, call: Call) -> AsyncGenerator[tuple[int, Event], None]:
        """The events of a call with the index of their choice. A sender who goes away ends it and frees its memory."""
        index = {request.id: number for number, request in enumerate(call.requests)}
        watcher = asyncio.create_task(self._abort_on_disconnect(http, tuple(index)))
        clocks = {request.id: self.metrics.clock(request.arrival) for request in call.requests}
        try:
            async with contextlib.aclosing(self.client.submit(call.requests)) as events:
                async for event in events:
                    if watcher.done():  # nobody reads what is left in the queue
                        return
                    clocks[event.id].observe(event, time.monotonic())
                    yield index[event.id], _muted(event) if call.muted else event
        finally:
            watcher.cancel()

    async def _abort_on_disconnect(self, http: HttpRequest, ids: tuple[str, ...]) -> None:
        with contextlib.suppress(CospecError):
            while (await http.receive())["type"] != "http.disconnect":
                pass
            self.client.abort(ids)


def _muted(event: Event) -> Event:
    finish = Finish.LENGTH if event.finish in (Finish.STOP, Finish.LENGTH) else event.finish
    return dataclasses.replace(event, text="", tokens=(), sources=(), logprobs=(), finish=finish, stop_reason=None)
