"""The parameters and the record of one benchmark request; all other values derive from these records.

Times are seconds on the run's clock, which starts at 0 with the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a dataset.

    Attributes:
        category: the domain for breakdowns, such as ``code``.
        reference: the dataset's answer; empty without an answer.
    """

    id: str
    text: str
    category: str = ""
    reference: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """The parameters of every system. ``ignore_eos`` makes every system generate exactly ``max_tokens`` tokens."""

    max_tokens: int = 128
    temperature: float = 0.0
    seed: int | None = None
    ignore_eos: bool = True


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of output.

    Attributes:
        at: arrival time in seconds on the run's clock.
        tokens: number of tokens that begin in ``text``; 0 until ``TokenCounter`` has counted.
    """

    at: float
    text: str
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One request as a client sees it.

    Attributes:
        arrival: when the request was due; ``sent`` is later if a limit on concurrency delayed the request.
        end: when the stream closed, complete or broken.
        chunks: in order of arrival. A system without streaming has one chunk at the end.
        streamed: whether ``chunks`` have token times; False leaves TTFT, TPOT and ITL unknown.
        prompt_tokens: 0 before counting.
        reported_tokens: output tokens as the system reports; None if not reported.
        stats: the system's speculation counters of this request, under ``RequestStats``' names; may be empty.
        error: why the request failed, in words; None for success. ``error_kind`` groups the reasons.
    """

    id: str
    arrival: float
    sent: float
    end: float
    chunks: tuple[Chunk, ...] = ()
    streamed: bool = True
    category: str = ""
    prompt_tokens: int = 0
    reported_tokens: int | None = None
    stats: Mapping[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    error: str | None = None
    error_kind: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the answer is complete."""
        return self.error is None

    @property
    def text(self) -> str:
        """The output text so far."""
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def output_tokens(self) -> int:
        """Number of output tokens, by the common counter of all systems."""
        return sum(chunk.tokens for chunk in self.chunks)
