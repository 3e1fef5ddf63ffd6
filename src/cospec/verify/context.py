"""What is verified: the user's engine, the same weights in transformers, prompts, and how much is tried."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cospec.config import EngineConfig, SpeculativeConfig
from cospec.core.assembly import TextInfo, assemble
from cospec.core.engine import Engine
from cospec.core.interfaces import Model
from cospec.core.plugins import Drafter
from cospec.core.types import Request
from cospec.core.verifier import TargetVerifier
from cospec.llm import LLM
from cospec.verify.reference import Reference

Words = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is tried.

    Attributes:
        prompts: texts for the rungs that compare tokens.
        tokens: written per prompt there.
        samples: outputs in the first sample of each chi-square.
        length: tokens whose joint law the enumeration covers.
    """

    prompts: int
    tokens: int
    samples: int
    length: int


QUICK = Effort(prompts=4, tokens=24, samples=600, length=3)
FULL = Effort(prompts=12, tokens=96, samples=2000, length=4)


@dataclass(frozen=True, slots=True)
class CheckContext:
    """Everything that a rung may use.

    Attributes:
        rules: what judges this engine's requests: greedy and seeded ones, then the others.
        tolerance: two scores closer than this are a near-tie; in logits, or logits over temperature with their noise.
    """

    llm: LLM
    reference: Reference
    prompts: tuple[Words, ...]
    acceptance_methods: tuple[str, ...]
    tolerance: float
    effort: Effort

    @property
    def model(self) -> Model:
        return self.llm.engine.parts.model


def bare_engine(
    model: Model, drafter: Drafter, length: int, acceptance_methods: Mapping[str, Any] | None = None
) -> Engine:
    """An engine without text around a loaded model; ``acceptance_methods`` take the place of the table's."""
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=length, policy="fixed")
    parts = assemble(model, drafter, speculative, EngineConfig(), TextInfo())
    if acceptance_methods is not None:
        made: Any = parts.execution_mode
        verifier = TargetVerifier(model, made.components.verifier.blend, acceptance_methods)
        # A burst would judge by the table's rules.
        parts = replace(parts, execution_mode=type(made)(replace(made.components, verifier=verifier, burst=None)))
    return Engine(parts)


def run(engine: Engine, requests: Iterable[Request]) -> dict[str, Words]:
    """Run to the end; the tokens of each request.

    Raises:
        RuntimeError: a request ended with an error.
    """
    found: dict[str, Words] = {}
    for request in requests:
        engine.add(request)
        found[request.id] = ()
    while engine.has_work:
        for event in engine.step():
            if event.error is not None:
                raise RuntimeError(f"request {event.id} ended with: {event.error}")
            found[event.id] += event.tokens
    engine.check_integrity()
    return found


def draft_tokens(engine: Engine) -> tuple[int, int]:
    """Accepted and drafted tokens since the engine began: a rung that drafted nothing has shown nothing."""
    metrics = engine.metrics()
    return sum(metrics.accepted_tokens.values()), sum(metrics.draft_tokens.values())


def in_groups(engine: Engine, requests: Sequence[Request], size: int) -> dict[str, Words]:
    """The same with ``size`` of them at once."""
    found: dict[str, Words] = {}
    for start in range(0, len(requests), size):
        found |= run(engine, requests[start : start + size])
    return found
