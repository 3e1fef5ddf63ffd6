"""The context of the checks: the user's engine, the same weights in transformers, prompts, and the effort;
and the result of a check.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cospec.assembly.build import assemble
from cospec.assembly.components import TextInfo
from cospec.assembly.ensembles import assemble_ensemble
from cospec.config import EngineConfig, SpeculativeConfig
from cospec.core.engine import Engine
from cospec.core.interfaces import Model, Verifier
from cospec.core.plugin_base import AcceptanceMethod, Drafter
from cospec.core.types import Request
from cospec.core.verifier import TargetVerifier
from cospec.ensemble.blends.registry import BlendRegistry
from cospec.ensemble.blends.weighted import Single
from cospec.ensemble.ensemble import EnsembleDecoder, LoadedModels
from cospec.ensemble.verifier import EnsembleVerifier
from cospec.llm import LLM
from cospec.verify.reference import Reference

TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Effort:
    """The number of samples of the checks.

    Attributes:
        prompts: texts for the checks that compare tokens.
        tokens: generated per prompt.
        samples: outputs in the first sample of each chi-square test.
        length: tokens of the enumerated joint distribution.
    """

    prompts: int
    tokens: int
    samples: int
    length: int


QUICK = Effort(prompts=4, tokens=24, samples=600, length=3)
FULL = Effort(prompts=12, tokens=96, samples=2000, length=4)


@dataclass(frozen=True, slots=True)
class CheckContext:
    """The data that every check may use.

    Attributes:
        models: of the distribution, loaded.
        ensemble: how several models form one distribution; None for one model.
        acceptance_methods: of this engine: for greedy and seeded requests, then for the others.
        tolerance: two closer scores are a near-tie; in logits, or logits over temperature with Gumbel noise.
        processors: logits processors to check, by name, with their options.
    """

    llm: LLM
    models: tuple[Model, ...]
    ensemble: Mapping[str, Any] | None
    reference: Reference
    prompts: tuple[TokenIds, ...]
    acceptance_methods: tuple[str, ...]
    tolerance: float
    effort: Effort
    processors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def target(self) -> Target:
        """What drafters of the checks draft for."""
        return Target(self.models, self.ensemble)


@dataclass(frozen=True, slots=True)
class Target:
    """Loaded models without an engine, and how several of them form one distribution."""

    models: tuple[Model, ...]
    ensemble: Mapping[str, Any] | None = None

    @property
    def vocab_size(self) -> int:
        return self.models[0].vocab_size


def bare_engine(
    target: Target,
    drafter: Drafter,
    length: int,
    acceptance_methods: Mapping[str, AcceptanceMethod] | None = None,
    max_nodes: int | None = None,
) -> Engine:
    """Build an engine without text for loaded models; ``acceptance_methods`` replace the table's."""
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=length, max_nodes=max_nodes, policy="fixed")
    config = EngineConfig(speculative_config=speculative, ensemble=target.ensemble)
    if target.ensemble is None:
        parts = assemble(target.models[0], drafter, speculative, config, TextInfo())
    else:
        parts = assemble_ensemble(_named(target.models), drafter, config, TextInfo())
    if acceptance_methods is not None:
        made: Any = parts.execution_mode
        verifier = _verifier(target, acceptance_methods)
        # A native multi-step call would use the table's methods.
        parts = replace(parts, execution_mode=type(made)(replace(made.components, verifier=verifier, multi_step=None)))
    return Engine(parts)


def _verifier(target: Target, acceptance_methods: Mapping[str, AcceptanceMethod]) -> Verifier:
    if target.ensemble is None:
        return TargetVerifier(target.models[0], Single(), acceptance_methods)
    blends = BlendRegistry(target.ensemble, len(target.models))
    return EnsembleVerifier(EnsembleDecoder(_named(target.models), blends, acceptance_methods))


def _named(models: Sequence[Model]) -> LoadedModels:
    return LoadedModels(tuple(models), tuple(f"model {place}" for place in range(len(models))))


class RequestFailed(RuntimeError):
    """A request of a check ended with an error, for example because the user's plug-in raised."""


def run(engine: Engine, requests: Iterable[Request]) -> dict[str, TokenIds]:
    """Run all requests to the end; return the tokens of each request.

    Raises:
        RequestFailed: a request ended with an error. The others are aborted, since later checks use the same engine.
    """
    found: dict[str, TokenIds] = {}
    for request in requests:
        engine.add(request)
        found[request.id] = ()
    while engine.has_work:
        for event in engine.step():
            if event.error is not None:
                engine.abort(found)
                raise RequestFailed(f"request {event.id} ended with: {event.error}")
            found[event.id] += event.tokens
    engine.check_integrity()
    return found


def draft_tokens(engine: Engine) -> tuple[int, int]:
    """Return accepted and drafted tokens since the start: a check without drafts shows nothing."""
    metrics = engine.metrics()
    return sum(metrics.accepted_tokens.values()), sum(metrics.draft_tokens.values())


def in_groups(engine: Engine, requests: Sequence[Request], size: int) -> dict[str, TokenIds]:
    """Run the requests like ``run``, with ``size`` requests at a time."""
    found: dict[str, TokenIds] = {}
    for start in range(0, len(requests), size):
        found |= run(engine, requests[start : start + size])
    return found


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        check_group: of the suite, such as ``enumeration``.
        name: the subject of the check.
        found: the measured value, in words.
        wanted: the required value, in words.
        notes: remarks for the reader, such as excused near-ties.
        false_alarm: the probability that an exact engine fails this check.
    """

    check_group: str
    name: str
    found: str
    wanted: str
    passed: bool
    notes: tuple[str, ...] = ()
    false_alarm: float = 0.0
