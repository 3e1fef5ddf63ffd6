"""Shared state of the endpoints: the engine's client, the tokenizer, the metrics, and the calls."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request as HttpRequest

from cospec.core.stats import RequestStats, TokenLogprobs
from cospec.core.types import Event, FinishReason, Request
from cospec.errors import CospecError
from cospec.runtime.engine_client import EngineClient
from cospec.sampling_params import SamplingParams
from cospec.server.admission import Admission, AdmissionLimits, ticket
from cospec.server.errors import RequestTimeout, UnknownModel
from cospec.server.metrics import ServerMetrics
from cospec.server.schemas import Sampled
from cospec.server.settings import ServerSettings
from cospec.text.input_processor import make_requests
from cospec.text.tokenizer import TextTokenizer

Prompt = tuple[str, tuple[int, ...]]  # text, needed for ``echo`` only, and token ids


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request for outputs.

    Attributes:
        id: id of the answer, such as ``cmpl-...``.
        requests: one per choice, in the order of choice indices: prompts first, then ``n``.
        prompts: the prompt text of each choice, for ``echo``.
        muted: whether the output is dropped, for ``max_tokens`` 0.
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
    """The events of one choice so far. Only ``take`` and ``count`` change the fields."""

    prompt: str
    request: Request
    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    stats: RequestStats | None = None
    distribution: str = "target"
    exact: bool = True
    started: bool = False

    @property
    def text(self) -> str:
        """The text of all events."""
        return "".join(self.texts)

    def take(self, event: Event) -> None:
        """Add an event."""
        self.texts.append(event.text)
        self.sources.extend(event.sources)
        self.logprobs.extend(event.logprobs)
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        self.count(event)

    def count(self, event: Event) -> None:
        """Add an event that was sent on: its text, sources and log-probabilities are not read again."""
        self.tokens.extend(event.tokens)
        self.finish, self.stop_reason = event.finish, event.stop_reason
        self.stats = event.stats or self.stats
        self.distribution, self.exact = event.distribution, event.exact
        self.started = True


class Service:
    """The engine's interface for the endpoints.

    Args:
        limits: bounds of the queue.
    """

    def __init__(
        self,
        client: EngineClient,
        tokens: TextTokenizer,
        metrics: ServerMetrics,
        settings: ServerSettings = ServerSettings(),
        limits: AdmissionLimits = AdmissionLimits(),
    ) -> None:
        self.client = client
        self.settings = settings
        self.admission = Admission(limits)
        self.tokens = tokens
        self.metrics = metrics
        self.info = client.info
        self.started = int(time.time())

    def check_model(self, name: str | None) -> None:
        """Raise ``UnknownModel`` if ``name`` is given and differs from the served model."""
        if name is not None and name != self.info.model_name:
            raise UnknownModel(name, self.info.model_name)

    def call(self, prefix: str, body: Sampled, prompts: Sequence[Prompt], params: SamplingParams) -> Call:
        """Build the requests of a call: every prompt, ``params.n`` times.

        Raises:
            InvalidInput: a token id is outside the vocabulary.
        """
        self.tokens.known(params.stop_token_ids, "stop_token_ids")
        self.tokens.known(tuple(params.logit_bias or ()), "logit_bias")
        self.tokens.known(params.allowed_token_ids or (), "allowed_token_ids")
        self.tokens.known([token for each in params.bad_words_token_ids for token in each], "bad_words_token_ids")
        id = f"{prefix}-{uuid.uuid4().hex}"
        now = time.monotonic()
        requests: list[Request] = []
        for number, (_, ids) in enumerate(prompts):
            made = make_requests(f"{id}-{number}", ids, params, body.choice(), now)
            # Without streaming no client reads partial output, so one event per output is enough. Log-probabilities
            # still come in parts, because the event loop reads each event at once. A sampled output does too: if the
            # engine is lost, outputs that were finished stay, so others must not be drawn again from their beginning.
            streams = bool(body.stream) or params.logprobs is not None or not params.greedy
            requests.extend(
                dataclasses.replace(request, priority=body.priority, ensemble=body.ensemble, streams=streams)
                for request in made
            )
        texts = tuple(text for text, _ in prompts for _ in range(params.n))
        return Call(id, tuple(requests), texts, self.info.model_name, body)

    async def events(self, http: HttpRequest, call: Call) -> AsyncGenerator[tuple[int, Event], None]:
        """Yield the events of a call with the index of their choice. A disconnect aborts the call and frees its memory.

        Raises:
            RequestTimeout: the deadline passed; open requests are aborted.
        """
        seconds = self.settings.request_timeout
        left = seconds - (time.monotonic() - ticket(http).began)
        if left <= 0:  # the body and the tokenization took the time
            raise RequestTimeout(seconds)
        index = {request.id: number for number, request in enumerate(call.requests)}
        watcher = asyncio.create_task(self._abort_on_disconnect(http, tuple(index)))
        deadline = _Deadline(seconds, left, lambda: self.client.abort(tuple(index)))
        clocks = {request.id: self.metrics.clock(request.arrival) for request in call.requests}
        try:
            async with contextlib.aclosing(self.client.submit(call.requests)) as events:
                async for event in events:
                    if watcher.done():  # no client reads the rest of the queue
                        return
                    deadline.check(event)
                    clocks[event.id].observe(event, time.monotonic())
                    yield index[event.id], _muted(event) if call.muted else event
        finally:
            watcher.cancel()
            deadline.cancel()

    async def _abort_on_disconnect(self, http: HttpRequest, ids: tuple[str, ...]) -> None:
        with contextlib.suppress(CospecError):
            while (await http.receive())["type"] != "http.disconnect":
                pass
            self.client.abort(ids)


class _Deadline:
    """Aborts a call that took too long. The abort ends the stream of events, even if the engine is silent.

    Args:
        seconds: the limit of the whole call.
        left: seconds that are left of the limit.
    """

    def __init__(self, seconds: float, left: float, abort: Callable[[], None]) -> None:
        self._seconds = seconds
        self._abort = abort
        self._passed = False
        self._timer = asyncio.get_running_loop().call_later(left, self._pass)

    def check(self, event: Event) -> None:
        """Raise ``RequestTimeout`` if ``event`` ends the call because of the deadline."""
        if self._passed and event.finish is FinishReason.ABORT:
            raise RequestTimeout(self._seconds)

    def cancel(self) -> None:
        """Stop the timer: the call has ended."""
        self._timer.cancel()

    def _pass(self) -> None:
        self._passed = True
        self._abort()


def _muted(event: Event) -> Event:
    finish = FinishReason.LENGTH if event.finish in (FinishReason.STOP, FinishReason.LENGTH) else event.finish
    return dataclasses.replace(event, text="", tokens=(), sources=(), logprobs=(), finish=finish, stop_reason=None)
