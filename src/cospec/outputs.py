"""What a call returns, in vLLM's shape."""

from __future__ import annotations

from dataclasses import dataclass

from cospec.core.stats import RequestStats, TokenLogprobs, total
from cospec.core.types import Event


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One output of a request.

    Attributes:
        sources: ``[len(token_ids)]``, who produced each token: a drafter's name, ``target`` or ``bonus``.
        logprobs: per token where the request asked for them.
        error: why the output ended without being finished, in one sentence; None for all other outputs.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprobs, ...] | None
    sources: tuple[str, ...]
    stats: RequestStats
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All outputs of one prompt, and the law that their tokens follow."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    outputs: tuple[CompletionOutput, ...]
    distribution: str

    @property
    def stats(self) -> RequestStats:
        """Counters of all outputs together; times are those of the first token and of the last end."""
        return total([output.stats for output in self.outputs])


class OutputBuilder:
    """Gathers the events of one output."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def add(self, event: Event) -> bool:
        """Returns whether that was the last one."""
        self._events.append(event)
        return event.finish is not None

    @property
    def distribution(self) -> str:
        """What the tokens follow."""
        return self._events[-1].distribution

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        return next((event.prompt_logprobs for event in self._events if event.prompt_logprobs is not None), None)

    def build(self, wants_logprobs: bool) -> CompletionOutput:
        """The output so far."""
        last = self._events[-1]
        return CompletionOutput(
            index=last.index,
            text="".join(event.text for event in self._events),
            token_ids=tuple(token for event in self._events for token in event.tokens),
            finish_reason=last.finish.value if last.finish else None,
            stop_reason=last.stop_reason,
            logprobs=tuple(row for event in self._events for row in event.logprobs) if wants_logprobs else None,
            sources=tuple(source for event in self._events for source in event.sources),
            stats=last.stats or RequestStats(),
            error=last.error,
        )
