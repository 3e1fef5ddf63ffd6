"""The outputs of a call, in vLLM's shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from cospec.core.stats import RequestStats, TokenLogprobs
from cospec.core.types import Event


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One output of a request.

    Attributes:
        sources: ``[len(token_ids)]``, the origin of each token: a drafter's name, ``target`` or ``bonus``.
        logprobs: per token, if the request asked for log-probabilities.
        error: one sentence why the output failed; None for all other outputs.
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
    """All outputs of one prompt, and the distribution of their tokens.

    Attributes:
        distribution: the name of the distribution.
        exact: see ``core.types.DeclaredDistribution``.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    outputs: tuple[CompletionOutput, ...]
    distribution: str
    exact: bool = True

    @property
    def divergence(self) -> float | None:
        """Mean total variation per token from the target, before temperature; None unless the blend relaxes it."""
        return self.stats.mean_divergence

    @property
    def stats(self) -> RequestStats:
        """Counters of all outputs together. Times are those of the first token and of the last end, in seconds."""
        return total([output.stats for output in self.outputs])


class OutputBuilder:
    """Collects the events of one output."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def add(self, event: Event) -> bool:
        """Add an event; return whether the event was the last."""
        self._events.append(event)
        return event.finish is not None

    @property
    def distribution(self) -> str:
        """The name of the distribution of the tokens."""
        return self._events[-1].distribution

    @property
    def exact(self) -> bool:
        """Whether the tokens follow the distribution exactly, see ``core.types.DeclaredDistribution``."""
        return self._events[-1].exact

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        return next((event.prompt_logprobs for event in self._events if event.prompt_logprobs is not None), None)

    def build(self, wants_logprobs: bool) -> CompletionOutput:
        """Build the output from the events so far."""
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


def total(parts: Sequence[RequestStats]) -> RequestStats:
    """The counts of several requests together; their earliest first token and their latest end."""
    found = RequestStats()
    for name in (each.name for each in fields(RequestStats)):
        values = [getattr(part, name) for part in parts]
        if isinstance(getattr(found, name), int | float):
            setattr(found, name, sum(values))
        elif isinstance(sums := getattr(found, name), dict):
            for key, count in (item for counts in values for item in counts.items()):
                sums[key] = sums.get(key, 0) + count
    found.ttft = min((part.ttft for part in parts if part.ttft is not None), default=None)
    found.e2e = max((part.e2e for part in parts if part.e2e is not None), default=None)
    return found
