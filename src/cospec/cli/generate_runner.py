"""Runs the requests of ``cospec generate`` through an engine: many together, the turns of each in order."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cospec.cli.batch_io import BatchRequest
from cospec.core.stats import RequestStats
from cospec.core.types import Event
from cospec.errors import CospecError
from cospec.outputs import total

if TYPE_CHECKING:
    from cospec.core.engine import Engine
    from cospec.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Result:
    """A finished request as an output line, or the reason why the request failed."""

    batch_request: BatchRequest
    row: Mapping[str, Any] | None = None
    error: str | None = None
    tokens: int = 0


@dataclass(slots=True)
class _Conversation:
    """A batch request in progress. Only ``Batch`` changes the fields."""

    batch_request: BatchRequest
    answers: list[str] = field(default_factory=list)
    stats: list[RequestStats] = field(default_factory=list)


class Batch:
    """Keeps an engine busy with batch requests.

    Args:
        chat: whether single-turn prompts also use the chat template. Prompts of several turns use the template if the
            tokenizer has one, else line breaks join the turns.
        window: requests in the engine at a time.
    """

    def __init__(self, engine: Engine, params: SamplingParams, chat: bool, window: int) -> None:
        from cospec.text.tokenizer import TextTokenizer

        self._engine = engine
        self._params = params
        self._chat = chat
        self._window = window
        self._has_template = bool(getattr(engine.tokenizer, "chat_template", None))
        self._tokens = TextTokenizer(engine.tokenizer, engine.max_model_len, engine.vocab_size)
        self._conversations: dict[str, _Conversation] = {}

    def run(self, batch_requests: Iterable[BatchRequest]) -> Iterator[Result]:
        """Yield results in the order in which requests finish; stopping the iteration aborts the rest."""
        waiting = deque(batch_requests)
        try:
            while waiting or self._conversations:
                while waiting and len(self._conversations) < self._window:
                    failed = self._begin(_Conversation(waiting.popleft()))
                    if failed is not None:
                        yield failed
                for event in self._engine.step() if self._engine.has_work else []:
                    result = self._take(event)
                    if result is not None:
                        yield result
        finally:
            self._engine.abort(list(self._conversations))

    def _begin(self, conversation: _Conversation) -> Result | None:
        """Send the next turn to the engine; return a result if the engine refuses the turn."""
        from cospec.text.input_processor import make_requests

        id = f"job-{conversation.batch_request.line}-{len(conversation.answers)}"
        try:
            ids = self._tokens.check(self._prompt(conversation))
            (request,) = make_requests(id, ids, self._params, arrival=time.monotonic())
            self._engine.add(dataclasses.replace(request, streams=False))
        except CospecError as error:
            return Result(conversation.batch_request, error=str(error))
        self._conversations[request.id] = conversation
        return None

    def _prompt(self, conversation: _Conversation) -> tuple[int, ...]:
        turns, answers = conversation.batch_request.turns, conversation.answers
        if self._chat or (len(turns) > 1 and self._has_template):
            messages = [{"role": "user", "content": turns[0]}]
            for answer, turn in zip(answers, turns[1:], strict=False):
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
            return self._tokens.chat(messages)
        turns_and_answers = [text for pair in zip(turns, answers, strict=False) for text in pair]
        return self._tokens.encode("\n".join([*turns_and_answers, turns[len(answers)]]))

    def _take(self, event: Event) -> Result | None:
        conversation = self._conversations.pop(event.id, None)  # one event holds the whole output
        if conversation is None:
            return None
        if event.error is not None:
            return Result(conversation.batch_request, error=event.error)
        conversation.answers.append(event.text)
        conversation.stats.append(event.stats or RequestStats())
        if len(conversation.answers) < len(conversation.batch_request.turns):
            return self._begin(conversation)
        return Result(conversation.batch_request, row=_row(conversation, event), tokens=len(event.tokens))


def _row(conversation: _Conversation, last: Event) -> dict[str, Any]:
    """Return an output line. With several turns ``text`` is the last answer and ``answers`` holds all answers."""
    row: dict[str, Any] = {
        "id": conversation.batch_request.id,
        "text": last.text,
        "token_ids": list(last.tokens),
        "finish_reason": last.finish.value if last.finish else None,
        "stats": _stats(conversation.stats),
        "distribution": last.distribution,
        "exact": last.exact,
        "divergence": total(conversation.stats).mean_divergence,
    }
    if len(conversation.batch_request.turns) > 1:
        row["answers"] = conversation.answers
    if last.logprobs:
        row["logprobs"] = [dataclasses.asdict(entry) for entry in last.logprobs]
    if last.prompt_logprobs is not None:
        row["prompt_logprobs"] = [entry and dataclasses.asdict(entry) for entry in last.prompt_logprobs]
    return row


def _stats(parts: list[RequestStats]) -> dict[str, Any]:
    """Sum the counters of all turns; ``ttft`` is the first turn's, ``e2e`` the sum, both in seconds."""
    found = total(parts)
    found.ttft, found.e2e = parts[0].ttft, sum(part.e2e or 0.0 for part in parts)
    return {**dataclasses.asdict(found), "mean_acceptance_length": found.mean_acceptance_length}
