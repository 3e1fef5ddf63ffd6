"""What a benchmark asks for and what it records of one request; everything else is computed from these records.

Times are seconds on the run's own clock, which starts at 0 when the run does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a dataset.

    Attributes:
        category: the domain that results are broken down by, such as ``code``.
        reference: what the dataset gives as the answer; empty where it gives none.
    """

    id: str
    text: str
    category: str = ""
    reference: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """What every system is asked for, alike. ``ignore_eos`` makes all of them write exactly ``max_tokens`` tokens."""

    max_tokens: int = 128
    temperature: float = 0.0
    seed: int | None = None
    ignore_eos: bool = True


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of output as it arrived.

    Attributes:
        at: when, in seconds on the run's clock.
        tokens: how many tokens begin in ``text``; 0 until ``tokens.TokenCounter`` has counted them.
    """

    at: float
    text: str
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One request as it was seen from outside.

    Attributes:
        arrival: when it was due; ``sent`` is later where a limit on concurrency held it back.
        end: when the stream closed, whole or broken.
        chunks: in order of arrival. A system that does not stream has one, at the end.
        streamed: whether ``chunks`` tell when tokens came; False leaves TTFT, TPOT and ITL unknown.
        prompt_tokens: 0 until they are counted.
        reported_tokens: output tokens as the system itself counts them; None where it does not say.
        stats: the system's own speculation counters of this request, under ``RequestStats``' names; empty for none.
        error: why it failed, in words; None when it ended well. ``error_kind`` groups such reasons.
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
        """Whether the answer came whole."""
        return self.error is None

    @property
    def text(self) -> str:
        """The output so far as it came."""
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def output_tokens(self) -> int:
        """Tokens of the output, by the one counter that counts for all systems."""
        return sum(chunk.tokens for chunk in self.chunks)
