"""Several models that speak as one: the blend that each request is written by, and what they decide by it together."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from cospec.acceptance.reference import NO_NUMBERS, VerifyTask
from cospec.core.interfaces import Blend, DraftToVerify, Model
from cospec.core.plugins import AcceptanceMethod
from cospec.core.types import Request, RequestState, StepOutput
from cospec.core.verifier import TargetVerifier
from cospec.ensemble.blends.build import blend_class, build_blend
from cospec.ensemble.blends.single import Single
from cospec.ensemble.proposal_queue import ProposalQueue, ProposalQueues
from cospec.ensemble.proposer_policy import GoodputProposerPolicy
from cospec.errors import InvalidInput, words


class BlendRegistry:
    """The blends of an ensemble: its own, and those that requests ask for.

    A request keeps the blend that it began with, requests that ask for the same one share it, and none outlives them: a
    function that is registered anew writes the requests that begin after that.
    """

    def __init__(self, ensemble: Mapping[str, Any], count: int) -> None:
        self._own, self._count = ensemble, count
        self._shared: WeakValueDictionary[tuple[str, Any], Blend] = WeakValueDictionary()
        self._running: dict[str, Blend] = {}  # by request

    def build(self, ensemble: Mapping[str, Any] | None = None) -> Blend:
        """The blend that a law describes now; without one the ensemble's own.

        Raises:
            InvalidInput: it cannot be built for these models.
        """
        asked = self._own if ensemble is None else ensemble
        key = json.dumps(asked, sort_keys=True, default=str), blend_class(asked)
        blend = self._shared.get(key)
        if blend is None:
            blend = self._shared[key] = build_blend(asked, self._count)
        return blend

    def of(self, request: Request) -> Blend:
        """The blend that a request is written by, from its first round to its last."""
        blend = self._running.get(request.id)
        if blend is None:
            blend = self._running[request.id] = self.build(request.ensemble)
        return blend

    def reads(self, id: str, model: int) -> bool:
        """Whether a model has a part in the request."""
        return id in self._running and model in self._running[id].members

    def free(self, ids: Sequence[str]) -> None:
        """Forget requests. Unknown ids are ignored."""
        for id in ids:
            self._running.pop(id, None)


@dataclass(frozen=True, slots=True)
class LoadedModels:
    """The models of an ensemble with their names, each name once."""

    models: tuple[Model, ...]
    names: tuple[str, ...]


class EnsembleDecoder:
    """What several models decide together, by the law and the rule of each request."""

    def __init__(
        self,
        cast: LoadedModels,
        blends: BlendRegistry,
        acceptance_methods: Mapping[str, AcceptanceMethod],
        native: bool = True,
    ) -> None:
        self.models, self.names, self.blends = cast.models, cast.names, blends
        self.verifier = TargetVerifier(cast.models[0], Single(), acceptance_methods, native)
        self._native = all(model.direct is not None for model in cast.models)

    def verify(self, blend: Blend, tasks: Sequence[VerifyTask], queues: Sequence[Tensor]) -> list[StepOutput]:
        """One outcome per task, by ``queues [R, V]`` of every member of the blend."""
        if blend.recipe is not None and self.verifier.supports_blend(tasks, queues):
            outcomes = self.verifier.decide_by_blend(tasks, blend.recipe, queues)
        else:
            try:
                with torch.no_grad():
                    logits = blend.combine(queues)
            except InvalidInput as error:
                return [StepOutput(task.entry, None, None, error=str(error)) for task in tasks]
            outcomes = self.verifier.decide(tasks, logits)
        return [_named(outcome, blend) if outcome.error == NO_NUMBERS else outcome for outcome in outcomes]

    @contextmanager
    def working(self) -> Iterator[None]:
        """Keep torch to one thread where all forwards are native.

        All that is left to it are a few rows of logits. Its workers spin for milliseconds behind each operation that is
        large enough to be shared, on the processors that the kernels' threads wait for: forwards took twice as long.
        """
        if not self._native:
            yield
            return
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def free(self, ids: Sequence[str]) -> None:
        """Forget sequences. Unknown ids are ignored."""
        self.blends.free(ids)
        self.verifier.free(ids)
        for model in self.models[1:]:
            model.free(ids)


class ProposingEnsemble:
    """Models that propose to each other. Implements ``protocols.Members``.

    Args:
        threads: models score at the same time where nobody proposes (parallel collaborative decoding).
    """

    def __init__(self, panel: EnsembleDecoder, policy: GoodputProposerPolicy, threads: bool) -> None:
        self.models, self.names, self.policy = panel.models, panel.names, policy
        self.lines = ProposalQueues(len(panel.models))
        self.working = panel.working
        self._panel = panel
        self._threads = ThreadPoolExecutor(len(panel.models)) if threads else None

    def line(self, sequence: RequestState) -> ProposalQueue:
        """What the models have computed of a sequence; fresh after it was admitted."""
        line = self.lines.open(sequence.id, len(sequence.tokens), sequence.computed)
        assert line.frontier == len(sequence.tokens), "a sequence was written by somebody else"
        return line

    def blend(self, sequence: RequestState) -> Blend:
        """The blend of the sequence's request."""
        return self._panel.blends.of(sequence.request)

    def acceptance_method(self, sequence: RequestState) -> AcceptanceMethod:
        """The rule of the sequence's request."""
        return self._panel.verifier.acceptance_method(sequence)

    def decide(
        self, blend: Blend, cases: Sequence[DraftToVerify], counts: Sequence[int], queues: Sequence[Tensor]
    ) -> list[StepOutput]:
        """See ``protocols.Members``."""
        tasks, first = [], 0
        for (entry, draft), count in zip(cases, counts, strict=True):
            last = len(queues[0]) if len(cases) == 1 else first + count
            tasks.append(VerifyTask(entry, draft, first, last, count))
            first = last
        return self._panel.verify(blend, tasks, queues)

    def at_once(self, score: Callable[[int], None]) -> None:
        """One thread per model, where nobody proposes."""
        if self._threads is not None:
            list(self._threads.map(score, range(len(self.models))))

    def free(self, ids: Sequence[str]) -> None:
        """Forget sequences. Unknown ids are ignored."""
        self.lines.drop(ids)
        self._panel.free(ids)

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.shutdown()


def _named(outcome: StepOutput, blend: Blend) -> StepOutput:
    """The outcome of a sequence whose law is no distribution, saying which law that is."""
    allowed = "finite logits, or minus infinity for a token that is ruled out"
    return replace(outcome, error=str(InvalidInput(f"law {blend.name}", words("not numbers at this prompt"), allowed)))


def check_vocabularies(cast: LoadedModels) -> None:
    """Raise ``InvalidInput`` unless all models have one vocabulary size."""
    first = cast.models[0]
    for name, model in zip(cast.names, cast.models, strict=True):
        if model.vocab_size != first.vocab_size:
            allowed = f"a model with the {first.vocab_size} tokens of {cast.names[0]}"
            raise InvalidInput("models", f"{name} with {model.vocab_size} tokens", allowed)


def distinct(names: Sequence[str]) -> tuple[str, ...]:
    """The names, later ones of the same name numbered."""
    return tuple(f"{name}#{names[:i].count(name) + 1}" if name in names[:i] else name for i, name in enumerate(names))
