"""The JSON of answers: completions and chat completions, whole and in chunks, and their usage.

Besides OpenAI's keys every answer has ``distribution``, the name of the tokens' distribution, and ``exact``. With
``include_speculation_stats``, ``usage.speculation`` holds the statistics of ``SPECULATION``, summed over all choices.
``return_sources`` adds the source of each token to every choice and chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from cospec.core.stats import RequestStats
from cospec.core.types import Event
from cospec.outputs import total
from cospec.server import logprobs
from cospec.server.schemas import ChatBody, CompletionBody, Sampled
from cospec.server.service import Call, Output
from cospec.text.tokenizer import TextTokenizer

SPECULATION = (
    "target_calls",
    "drafts",
    "drafted",
    "accepted",
    "rejections",
    "mean_acceptance_length",
    "accepted_by_drafter",
    "model_calls",
    "tokens_by_source",
    "ttft",
    "e2e",
)


class ResponseForm(Protocol):
    """The JSON form of one kind of answer."""

    name: str  # ``object`` of a whole answer
    chunk_name: str  # ``object`` of a chunk

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        """Return a finished output as a choice of a whole answer."""

    def chunks(self, index: int, output: Output, event: Event) -> list[dict[str, Any]]:
        """Return an event as choices of chunks; ``output`` holds the earlier events."""


class CompletionShape:
    """``text_completion``; with ``echo`` the prompt precedes the text."""

    name = chunk_name = "text_completion"

    def __init__(self, body: CompletionBody, tokens: TextTokenizer) -> None:
        self._body = body
        self._tokens = tokens
        # Characters of each choice's tokens so far. The text may lag, because a possible stop string is held back.
        self._characters: Counter[int] = Counter()

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        """See ``ResponseForm``."""
        text = (output.prompt if self._body.echo else "") + output.text
        found = self._logprobs(index, output, output, bool(self._body.echo))
        choice = {"index": index, "text": text, "logprobs": found}
        return choice | _ending(output) | _extensions(self._body, output, output, self._tokens)

    def chunks(self, index: int, output: Output, event: Event) -> list[dict[str, Any]]:
        """See ``ResponseForm``."""
        echo = bool(self._body.echo) and not output.started
        text = (output.prompt if echo else "") + event.text
        wants_tokens = self._body.logprobs is not None or self._body.return_token_ids or self._body.return_sources
        if not text and event.finish is None and not (wants_tokens and event.tokens):
            return []
        choice = {"index": index, "text": text, "logprobs": self._logprobs(index, event, output, echo)}
        return [choice | _ending(event) | _extensions(self._body, event, output, self._tokens)]

    def _logprobs(self, index: int, piece: Event | Output, output: Output, echo: bool) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        prompt = piece.prompt_logprobs or () if echo else ()
        ids = [*(output.request.prompt if prompt else ()), *piece.tokens]
        found = logprobs.completion([*prompt, *piece.logprobs], ids, self._characters[index], self._tokens)
        self._characters[index] += sum(self._tokens.token_text(id).characters for id in ids)
        return found


class ChatShape:
    """``chat.completion``; the first chunk of a choice names the role."""

    name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, body: ChatBody, tokens: TextTokenizer) -> None:
        self._body = body
        self._tokens = tokens

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        """See ``ResponseForm``."""
        message = {"role": "assistant", "content": output.text, "refusal": None}
        choice = {"index": index, "message": message, "logprobs": self._logprobs(output)}
        return choice | _ending(output) | _extensions(self._body, output, output, self._tokens)

    def chunks(self, index: int, output: Output, event: Event) -> list[dict[str, Any]]:
        """See ``ResponseForm``."""
        found: list[dict[str, Any]] = []
        if not output.started:
            delta = {"role": "assistant", "content": ""}
            found.append({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
        wants_tokens = self._body.logprobs or self._body.return_token_ids or self._body.return_sources
        if event.text or event.finish is not None or (wants_tokens and event.tokens):
            delta = {"content": event.text} if event.text or event.tokens else {}
            choice = {"index": index, "delta": delta, "logprobs": self._logprobs(event)}
            found.append(choice | _ending(event) | _extensions(self._body, event, output, self._tokens))
        return found

    def _logprobs(self, piece: Event | Output) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return logprobs.chat(piece.logprobs, self._body.top_logprobs or 0, self._tokens)


def whole(call: Call, shape: ResponseForm, outputs: Sequence[Output]) -> dict[str, Any]:
    """Return the answer of a call that does not stream."""
    return {
        "id": call.id,
        "object": shape.name,
        "created": call.created,
        "model": call.model,
        "choices": [shape.choice(index, output) for index, output in enumerate(outputs)],
        "usage": usage(call, outputs),
        "distribution": outputs[-1].distribution,
        "exact": outputs[-1].exact,
        "divergence": divergence(outputs),
    }


def count_listed(body: Sampled, piece: Event | Output, output: Output) -> int:
    """Return the most tokens and log-probabilities that the JSON of a piece lists."""
    params = output.request.sampling
    found = len(piece.tokens) + len(piece.logprobs) * (1 + (params.logprobs or 0))
    if piece.prompt_logprobs is not None:
        found += len(piece.prompt_logprobs) * (1 + (params.prompt_logprobs or 0))
    lists_prompt = body.return_token_ids and (piece is output or not output.started)
    return found + (len(output.request.prompt) if lists_prompt else 0)


def chunk(call: Call, shape: ResponseForm, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a chunk of a stream; ``usage`` is null if a later chunk has the usage."""
    found: dict[str, Any] = {
        "id": call.id,
        "object": shape.chunk_name,
        "created": call.created,
        "model": call.model,
        "choices": choices,
    }
    return found | {"usage": None} if call.body.usage_wanted else found


def usage(call: Call, outputs: Sequence[Output]) -> dict[str, Any]:
    """Return token counts; a prompt counts once for all its outputs."""
    prompt = sum(len(request.prompt) for request in call.requests if request.index == 0)
    completion = sum(len(output.tokens) for output in outputs)
    stats = [output.stats for output in outputs if output.stats is not None]
    cached = sum(o.stats.cached_prompt_tokens for o in outputs if o.stats is not None and o.request.index == 0)
    found: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if call.body.include_speculation_stats:
        found["speculation"] = speculation(stats)
    return found


def divergence(outputs: Sequence[Output]) -> float | None:
    """Return the mean total variation per token from the target; null unless the blend relaxes the target."""
    return total([output.stats for output in outputs if output.stats is not None]).mean_divergence


def speculation(stats: Sequence[RequestStats]) -> dict[str, Any]:
    """Return the speculation statistics of several outputs, summed."""
    found = total(stats)
    return {name: getattr(found, name) for name in SPECULATION}


def _ending(piece: Event | Output) -> dict[str, Any]:
    return {"finish_reason": piece.finish and piece.finish.value, "stop_reason": piece.stop_reason}


def _extensions(body: Sampled, piece: Event | Output, output: Output, tokens: TextTokenizer) -> dict[str, Any]:
    """Return the keys of a choice that appear on request only."""
    found: dict[str, Any] = {}
    if body.prompt_logprobs is not None and piece.prompt_logprobs is not None:
        found["prompt_logprobs"] = logprobs.prompt(piece.prompt_logprobs, tokens)
    if body.return_token_ids:
        found["token_ids"] = list(piece.tokens)
        if piece is output or not output.started:
            found["prompt_token_ids"] = list(output.request.prompt)
    if body.return_sources:
        found["sources"] = list(piece.sources)
    return found
