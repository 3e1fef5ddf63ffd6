"""The steps of a system in parts, which say why one system has more throughput than another."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.papers.sources import Found


@dataclass(frozen=True, slots=True)
class StepParts:
    """Means over all steps of a run.

    Attributes:
        steps: of the target.
        batch: requests of a step.
        tokens: committed tokens of a request and step.
        verification: seconds of a step in which the engine waits for the target.
        waiting: seconds of a step in which the engine waits for drafts.
        rest: other seconds of a step, which are overhead.
    """

    steps: float
    batch: float
    tokens: float
    verification: float
    waiting: float
    rest: float

    @classmethod
    def stored(cls, found: Found, variant: str) -> StepParts:
        """The parts of a variant.

        Raises:
            KeyError: the variant was not run, or before runs stored their parts.
        """
        return cls(**found["variants"][variant]["parts"])

    @property
    def overlapped(self) -> float:
        """Requests of a second in which the engine waits: more where drafts and verification overlap."""
        return self.batch / (self.verification + self.waiting)

    @property
    def spent(self) -> float:
        """Share of a step that is no overhead."""
        return (self.verification + self.waiting) / (self.verification + self.waiting + self.rest)

    @property
    def throughput(self) -> float:
        """Tokens per second."""
        return self.tokens * self.overlapped * self.spent

    def over(self, other: StepParts) -> tuple[float, float, float]:
        """Acceptance, overlap and overhead against those of another system; their product is that of throughput."""
        return self.tokens / other.tokens, self.overlapped / other.overlapped, self.spent / other.spent

    def possible(self, in_turn: StepParts) -> tuple[float, float]:
        """What the same system would gain with all drafts hidden and whole batches, and what without overhead.

        Args:
            in_turn: the same system, whose steps have whole batches.
        """
        return in_turn.batch / in_turn.verification / self.overlapped, 1.0 / self.spent
