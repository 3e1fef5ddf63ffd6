"""Connects given parts to the components of an engine: one function for single, ensemble and simulated engines.

``Verification`` is what the output follows, ``Drafting`` is what proposes tokens. The builders of the three kinds of
engine differ in these parts alone.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from cospec.assembly.drafting import Drafting
from cospec.config import LONGEST_DRAFT, EngineConfig, SpeculativeConfig
from cospec.core.drafter_capabilities import DrafterCapabilities
from cospec.core.engine import EngineComponents
from cospec.core.interfaces import (
    BlockManager,
    Clock,
    ModeComponents,
    Model,
    Verifier,
)
from cospec.core.output_processor import OutputProcessor
from cospec.core.plugin_base import AcceptanceMethod
from cospec.core.scheduler import Scheduler, SchedulerLimits
from cospec.core.types import DeclaredDistribution
from cospec.registry import ACCEPTANCE_METHODS
from cospec.text.input_processor import InputProcessor


class AcceptanceMethods(Mapping[str, AcceptanceMethod]):
    """Maps names to acceptance methods of cospec and of plug-ins. A plug-in is loaded for its first request.

    Attributes:
        chains_only: names of methods that verify chains only.
        inexact_methods: names of methods that do not follow the target distribution exactly.
    """

    def __init__(self) -> None:
        self._made: dict[str, AcceptanceMethod] = {}
        self.chains_only: Container[str] = _MethodNames(self, lambda acceptance_method: not acceptance_method.trees)
        self.inexact_methods: Container[str] = _MethodNames(self, lambda acceptance_method: not acceptance_method.exact)

    def __getitem__(self, name: str) -> AcceptanceMethod:
        found = self._made.get(name)
        if found is None:
            if not ACCEPTANCE_METHODS.knows(name):
                raise KeyError(name)
            found = self._made[name] = ACCEPTANCE_METHODS.load(name)()
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(ACCEPTANCE_METHODS.names)

    def __len__(self) -> int:
        return len(ACCEPTANCE_METHODS.names)


@dataclass(frozen=True, slots=True)
class _MethodNames(Container[str]):
    """The names of the methods with a property."""

    methods: AcceptanceMethods
    holds: Callable[[AcceptanceMethod], bool]

    def __contains__(self, name: object) -> bool:
        return ACCEPTANCE_METHODS.knows(name) and self.holds(self.methods[str(name)])


@dataclass(frozen=True, slots=True)
class TextInfo:
    """The text side of a model.

    Attributes:
        tokenizer: a Hugging Face fast tokenizer; None for models without text.
        path: the folder of the model.
        eos: end-of-sequence ids.
    """

    tokenizer: Any = None
    path: Path | None = None
    eos: frozenset[int] = frozenset()

    @property
    def backend(self) -> Tokenizer | None:
        """The tokenizer that decodes."""
        return None if self.tokenizer is None else self.tokenizer.backend_tokenizer


@dataclass(frozen=True, slots=True)
class Verification:
    """What the output follows.

    Attributes:
        model: the target, or the first model of an ensemble.
        models: all models of an ensemble.
        pages: the accounting of all caches that verification needs.
        max_len: tokens of one sequence that every model can read.
        distribution: what responses declare.
        check_ensemble: checks the ensemble of a request and returns its distribution; None: requests may not choose.
    """

    model: Model
    verifier: Verifier
    pages: BlockManager
    max_len: int
    distribution: DeclaredDistribution
    acceptance_methods: AcceptanceMethods
    text: TextInfo = TextInfo()
    check_ensemble: Callable[[Mapping[str, Any]], DeclaredDistribution] | None = None
    models: tuple[Model, ...] = ()

    def limits(self, config: EngineConfig) -> SchedulerLimits:
        """The bounds of a step as configured, within what the models and caches can hold."""
        longest = min(self.max_len, self.pages.capacity)
        max_len = min(config.max_model_len or longest, longest)
        chains = self.acceptance_methods.chains_only
        return SchedulerLimits(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            max_len,
            chains,
            max_in_flight=self.verifier.max_in_flight,
        )


def connect(
    verification: Verification,
    drafting: Drafting,
    speculative: SpeculativeConfig,
    limits: SchedulerLimits,
    clock: Clock,
) -> EngineComponents:
    """Connect the parts of an engine.

    Raises:
        InvalidInput: the configured acceptance method cannot verify the drafter's drafts.
    """
    drafter, executor, text = drafting.drafter, drafting.executor, verification.text
    context = ModeComponents(
        drafter,
        verification.verifier,
        drafting.policy,
        clock,
        executor,
        multi_step=drafting.multi_step,
        why_no_multi_step=drafting.why_no_multi_step,
    )
    mode = drafting.execution_mode(context)
    # By what was accepted: which mode runs, and how many windows a request has in flight.
    mode_learns = (mode.learns and executor is not None and executor.parallel) or mode.windows_ahead is not None
    trees = drafting.policy.trees or speculative.branches(drafter.capabilities if drafter else DrafterCapabilities())
    return EngineComponents(
        model=verification.model,
        scheduler=Scheduler(verification.pages, drafting.policy, limits),
        execution_mode=mode,
        output_processor=OutputProcessor(
            text.backend, verification.distribution, text.eos, clock, verification.acceptance_methods.inexact_methods
        ),
        input_processor=InputProcessor(
            verification.model.vocab_size,
            limits.max_len,
            text.eos,
            speculative.acceptance_method,
            LONGEST_DRAFT,
            drafting.proposes,
            frozenset(speculative.request_may_choose) - drafting.fixed_choices,
            verification.check_ensemble,
            stream_kinds=drafter.stream_kinds if drafter else None,
            drafters=drafter.member_names if drafter else None,
            sampled_method="recursive" if trees else "block",
            learns=drafting.learns or mode_learns,
            trusted_drafter=drafter is None or drafter.trusted,
        ),
        distribution=verification.distribution,
        models=verification.models,
        tokenizer=text.tokenizer,
        model_path=text.path,
        clock=clock,
        drafter_weights=drafter.weights if drafter else dict,
        closers=drafting.closers,
        multi_step=drafting.multi_step,
    )
