"""Runs the jobs of ``cospec generate`` through an engine: many at once, each turn after the one before it."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cospec.cli.batch_io import BatchRequest
from cospec.core.stats import RequestStats, total
from cospec.core.types import Event
from cospec.errors import CospecError

if TYPE_CHECKING:
    from cospec.core.engine import Engine
    from cospec.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Result:
    """A finished job as a line of the output, or the reason why it has none."""

    job: BatchRequest
    row: Mapping[str, Any] | None = None
    error: str | None = None
    tokens: int = 0


@dataclass(slots=True)
class _Talk:
    """A job in progress. Written by ``Batch`` alone."""

    job: BatchRequest
    answers: list[str] = field(default_factory=list)
    stats: list[RequestStats] = field(default_factory=list)


class Batch:
    """Keeps an engine busy with jobs.

    Args:
        chat: whether prompts of one turn go through the chat template as well; those of several turns always do when
            the tokenizer has one, and are otherwise joined by line breaks.
        window: jobs that are in the engine at a time.
    """

    def __init__(self, engine: Engine, params: SamplingParams, chat: bool, window: int) -> None:
        from cospec.text.tokenizer import TextTokenizer

        self._engine = engine
        self._params = params
        self._chat = chat
        self._window = window
        self._has_template = bool(getattr(engine.tokenizer, "chat_template", None))
        self._tokens = TextTokenizer(engine.tokenizer, engine.max_model_len, engine.vocab_size)
        self._talks: dict[str, _Talk] = {}

    def run(self, jobs: Iterable[BatchRequest]) -> Iterator[Result]:
        """Results in the order in which they finish; stopping the iteration ends what is under way."""
        waiting = deque(jobs)
        try:
            while waiting or self._talks:
                while waiting and len(self._talks) < self._window:
                    failed = self._begin(_Talk(waiting.popleft()))
                    if failed is not None:
                        yield failed
                for event in self._engine.step() if self._engine.has_work else []:
                    result = self._take(event)
                    if result is not None:
                        yield result
        finally:
            self._engine.abort(list(self._talks))

    def _begin(self, talk: _Talk) -> Result | None:
        """Send the next turn to the engine; a result when it is refused."""
        from cospec.text.input_processor import make_requests

        id = f"job-{talk.job.line}-{len(talk.answers)}"
        try:
            ids = self._tokens.check(self._prompt(talk))
            (request,) = make_requests(id, ids, self._params, arrival=time.monotonic())
            self._engine.add(dataclasses.replace(request, streams=False))
        except CospecError as error:
            return Result(talk.job, error=str(error))
        self._talks[request.id] = talk
        return None

    def _prompt(self, talk: _Talk) -> tuple[int, ...]:
        turns, answers = talk.job.turns, talk.answers
        if self._chat or (len(turns) > 1 and self._has_template):
            messages = [{"role": "user", "content": turns[0]}]
            for answer, turn in zip(answers, turns[1:], strict=False):
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
            return self._tokens.chat(messages)
        said = [text for pair in zip(turns, answers, strict=False) for text in pair]
        return self._tokens.encode("\n".join([*said, turns[len(answers)]]))

    def _take(self, event: Event) -> Result | None:
        talk = self._talks.pop(event.id, None)  # all of an output comes in one event
        if talk is None:
            return None
        if event.error is not None:
            return Result(talk.job, error=event.error)
        talk.answers.append(event.text)
        talk.stats.append(event.stats or RequestStats())
        if len(talk.answers) < len(talk.job.turns):
            return self._begin(talk)
        return Result(talk.job, row=_row(talk, event), tokens=len(event.tokens))


def _row(talk: _Talk, last: Event) -> dict[str, Any]:
    """A line of the output. Of several turns ``text`` is the last answer and ``answers`` holds all of them."""
    row: dict[str, Any] = {
        "id": talk.job.id,
        "text": last.text,
        "token_ids": list(last.tokens),
        "finish_reason": last.finish.value if last.finish else None,
        "stats": _stats(talk.stats),
        "distribution": last.distribution,
    }
    if len(talk.job.turns) > 1:
        row["answers"] = talk.answers
    if last.logprobs:
        row["logprobs"] = [dataclasses.asdict(entry) for entry in last.logprobs]
    if last.prompt_logprobs is not None:
        row["prompt_logprobs"] = [entry and dataclasses.asdict(entry) for entry in last.prompt_logprobs]
    return row


def _stats(parts: list[RequestStats]) -> dict[str, Any]:
    """The counters of all turns; ``ttft`` is the first turn's, ``e2e`` the sum, in seconds."""
    found = total(parts)
    found.ttft, found.e2e = parts[0].ttft, sum(part.e2e or 0.0 for part in parts)
    return {**dataclasses.asdict(found), "mean_acceptance_length": found.mean_acceptance_length}
