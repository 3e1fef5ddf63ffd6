"""Several models with one target distribution: joint verification, and members that propose to each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cospec.acceptance.python_verification import NOT_FINITE, VerifyTask
from cospec.core.interfaces import Blend, Model
from cospec.core.plugin_base import AcceptanceMethod
from cospec.core.types import RequestState, StepOutput
from cospec.core.verifier import TargetVerifier, with_divergences
from cospec.ensemble.blends.registry import BlendRegistry
from cospec.ensemble.blends.weighted import Single
from cospec.ensemble.proposed_tokens import ProposalChain, ProposalChains
from cospec.ensemble.proposer_policy import GoodputProposerPolicy
from cospec.ensemble.state import DraftToVerify
from cospec.errors import InvalidInput, words
from cospec.native.operators import one_torch_thread


@dataclass(frozen=True, slots=True)
class LoadedModels:
    """The models of an ensemble with their distinct names."""

    models: tuple[Model, ...]
    names: tuple[str, ...]


class EnsembleDecoder:
    """Verifies with several models, by the blend and the acceptance method of each request."""

    def __init__(
        self,
        loaded: LoadedModels,
        blends: BlendRegistry,
        acceptance_methods: Mapping[str, AcceptanceMethod],
        native: bool = True,
    ) -> None:
        self.models, self.names, self.blends = loaded.models, loaded.names, blends
        self.verifier = TargetVerifier(loaded.models[0], Single(), acceptance_methods, native)
        self._native = all(model.native_forward is not None for model in loaded.models)

    def verify(self, blend: Blend, tasks: Sequence[VerifyTask], member_logits: Sequence[Tensor]) -> list[StepOutput]:
        """Return one output per task, from the logits ``[R, V]`` of every member of the blend."""
        if blend.recipe is not None and self.verifier.supports_blend(tasks, member_logits):
            outputs = self.verifier.decide_by_blend(tasks, blend.recipe, member_logits)
        else:
            try:
                with torch.no_grad():
                    logits = blend.combine(member_logits)
            except InvalidInput as error:
                return [StepOutput(task.entry, None, None, error=str(error)) for task in tasks]
            outputs = self.verifier.decide(tasks, logits)
            if not blend.exact:
                outputs = with_divergences(tasks, outputs, divergences_of(logits, member_logits[0]))
        return [_named(output, blend) if output.error == NOT_FINITE else output for output in outputs]

    def limit_torch_threads(self) -> AbstractContextManager[None]:
        """Limit torch to one thread while all forwards are native."""
        return one_torch_thread(self._native)

    def free(self, ids: Sequence[str]) -> None:
        """Forget sequences. Unknown ids are ignored."""
        self.blends.free(ids)
        self.verifier.free(ids)
        for model in self.models[1:]:
            model.free(ids)


class Threads(Protocol):
    """One thread per model, such as a ``ThreadPoolExecutor``."""

    def map(self, work: Callable[[int], None], models: Iterable[int], /) -> Iterable[None]:
        """Run ``work`` for all models at the same time."""

    def shutdown(self) -> None:
        """End the threads."""


class ProposingEnsemble:
    """Models that propose to each other.

    Args:
        threads: models score at the same time while none proposes (parallel collaborative decoding).
        rollouts: whether models may draft by ``Model.rollout``.
    """

    def __init__(
        self, decoder: EnsembleDecoder, policy: GoodputProposerPolicy, threads: Threads | None, rollouts: bool = True
    ) -> None:
        self.models, self.names, self.policy, self.rollouts = decoder.models, decoder.names, policy, rollouts
        self.chains = ProposalChains(len(decoder.models))
        self.limit_torch_threads = decoder.limit_torch_threads
        self._decoder = decoder
        self._threads = threads

    def proposal_chain(self, sequence: RequestState) -> ProposalChain:
        """Return the proposal chain of a sequence; a new chain after each admission."""
        chain = self.chains.open(sequence.id, len(sequence.tokens), sequence.computed)
        assert chain.frontier == len(sequence.tokens), "the chain does not end at the last committed token"
        return chain

    def blend(self, sequence: RequestState) -> Blend:
        """Return the blend of the sequence's request."""
        return self._decoder.blends.of(sequence.request)

    def acceptance_method(self, sequence: RequestState) -> AcceptanceMethod:
        """Return the acceptance method of the sequence's request."""
        return self._decoder.verifier.acceptance_method(sequence)

    def decide(
        self, blend: Blend, cases: Sequence[DraftToVerify], counts: Sequence[int], member_logits: Sequence[Tensor]
    ) -> list[StepOutput]:
        """Return one output per case, by ``member_logits [R, V]`` of every member of the blend.

        The last ``counts[i]`` rows of a case verify its draft; only a single case has other rows. A blend that cannot
        be computed gives outputs with an error.
        """
        tasks, first = [], 0
        for (entry, draft), count in zip(cases, counts, strict=True):
            last = len(member_logits[0]) if len(cases) == 1 else first + count
            tasks.append(VerifyTask(entry, draft, first, last, count))
            first = last
        return self._decoder.verify(blend, tasks, member_logits)

    def score_in_parallel(self, score: Callable[[int], None]) -> None:
        """Run ``score(model)`` in one thread per model, if threads are enabled; otherwise do nothing."""
        if self._threads is not None:
            list(self._threads.map(score, range(len(self.models))))

    def free(self, ids: Sequence[str]) -> None:
        """Forget sequences. Unknown ids are ignored."""
        self.chains.drop(ids)
        self._decoder.free(ids)

    def close(self) -> None:
        """Shut the threads down."""
        if self._threads is not None:
            self._threads.shutdown()


def _named(output: StepOutput, blend: Blend) -> StepOutput:
    """Return the output of a sequence whose blend gives no distribution; the error names the blend."""
    allowed = "finite logits, or minus infinity for an excluded token"
    return output._replace(
        error=str(InvalidInput(f"ensemble {blend.name}", words("not numbers at this prompt"), allowed))
    )


def divergences_of(relaxed: Tensor, target: Tensor) -> list[float]:
    """Return the total variation between the distributions of each row ``[R]``, of logits ``[R, V]``."""
    p, q = (torch.softmax(rows.double(), -1) for rows in (relaxed, target))
    found: list[float] = (0.5 * (p - q).abs().sum(-1)).tolist()
    return found


def check_vocabularies(loaded: LoadedModels) -> None:
    """Check that all models have one vocabulary size.

    Raises:
        InvalidInput: a model's size differs from the first model's.
    """
    first = loaded.models[0]
    for name, model in zip(loaded.names, loaded.models, strict=True):
        if model.vocab_size != first.vocab_size:
            allowed = f"a model with the {first.vocab_size} tokens of {loaded.names[0]}"
            raise InvalidInput("models", f"{name} with {model.vocab_size} tokens", allowed)


def distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names; repeated names get a number."""
    return tuple(f"{name}#{names[:i].count(name) + 1}" if name in names[:i] else name for i, name in enumerate(names))
