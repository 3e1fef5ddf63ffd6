"""Several models behind one engine: their caches kept in step, their logits joined by the law of each request."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cospec.blends.build import build_blend
from cospec.blends.single import Single
from cospec.engine.judging import Task
from cospec.engine.verifier import Verifier
from cospec.errors import InvalidInput
from cospec.policies.collaboration import Collaboration
from cospec.protocols import Blend, Case, Model, Pages, Rule
from cospec.rounds.lines import Line, Lines
from cospec.types import Outcome, Sequence


class JointPages:
    """The caches of several models as one: a sequence has room in all of them or in none. Implements ``Pages``."""

    def __init__(self, pools: Seq[Pages], lines: Lines) -> None:
        self._pools, self._lines = tuple(pools), lines

    @property
    def usage(self) -> float:
        """Of the fullest cache."""
        return max(pool.usage for pool in self._pools)

    @property
    def capacity(self) -> int:
        """Tokens that fit in every cache."""
        return min(pool.capacity for pool in self._pools)

    def attach(self, id: str, tokens: Seq[int]) -> int:
        """Open a sequence everywhere with the longest prefix that is in every cache."""
        while True:
            found = [pool.attach(id, tokens) for pool in self._pools]
            if min(found) == max(found):
                return found[0]
            for pool in self._pools:
                pool.free(id)
            tokens = tokens[: min(found) + 1]

    def reserve(self, id: str, length: int) -> bool:
        """Make room everywhere; where one cache has none, the room in the others stays with the sequence."""
        return all([pool.reserve(id, length) for pool in self._pools])

    def keep(self, id: str, tokens: Seq[int], computed: int) -> None:
        """Offer what each model has computed of ``tokens[:computed]``."""
        for model, pool in enumerate(self._pools):
            pool.keep(id, tokens, min(computed, self._lines.fed(id, model)))

    def free(self, id: str) -> None:
        """Give back a sequence's pages, and forget what stood ahead of it."""
        self._lines.drop([id])
        for pool in self._pools:
            pool.free(id)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when one of the caches is not in order."""
        for pool in self._pools:
            pool.check_integrity()


class Laws:
    """The blends of an ensemble: its own, and those that requests ask for."""

    def __init__(self, law: Mapping[str, Any], count: int) -> None:
        self._count = count
        self._blends: dict[str, Blend] = {}
        self.default = build_blend(law, count)

    def of(self, law: Mapping[str, Any] | None) -> Blend:
        """The blend that a request asks for.

        Raises:
            InvalidInput: it cannot be built for these models.
        """
        if law is None:
            return self.default
        key = json.dumps(law, sort_keys=True, default=str)
        blend = self._blends.get(key)
        if blend is None:
            blend = self._blends[key] = build_blend(law, self._count)
        return blend


@dataclass(frozen=True, slots=True)
class Cast:
    """The models of an ensemble with their names, each name once."""

    models: tuple[Model, ...]
    names: tuple[str, ...]


class Ensemble:
    """Implements ``protocols.Members``.

    Args:
        threads: models score at the same time where nobody proposes (parallel collaborative decoding).
    """

    def __init__(self, cast: Cast, laws: Laws, rules: Mapping[str, Rule], policy: Collaboration, threads: bool) -> None:
        self.models, self.names, self.policy = cast.models, cast.names, policy
        self._laws = laws
        self._lines = Lines(len(cast.models))
        self.verifier = Verifier(cast.models[0], Single(), rules)
        self._threads = ThreadPoolExecutor(len(cast.models)) if threads else None
        self._native = all(getattr(model, "native", False) for model in cast.models)
        self.pages = JointPages([model.pages for model in cast.models], self._lines)

    def line(self, sequence: Sequence) -> Line:
        """What the models have computed of a sequence; fresh after it was admitted."""
        line = self._lines.open(sequence.id, len(sequence.tokens), sequence.computed)
        assert line.frontier == len(sequence.tokens), "a sequence was written by somebody else"
        return line

    def blend(self, sequence: Sequence) -> Blend:
        """The blend of the sequence's request."""
        return self._laws.of(sequence.request.law)

    def rule(self, sequence: Sequence) -> Rule:
        """The rule of the sequence's request."""
        return self.verifier.rule(sequence)

    def decide(self, blend: Blend, cases: Seq[Case], counts: Seq[int], queues: Seq[Tensor]) -> list[Outcome]:
        """See ``protocols.Members``."""
        tasks, first = [], 0
        for (entry, draft), count in zip(cases, counts, strict=True):
            last = len(queues[0]) if len(cases) == 1 else first + count
            tasks.append(Task(entry, draft, first, last, count))
            first = last
        outcomes = None if blend.recipe is None else self.verifier.decide_by(tasks, blend.recipe, queues)
        if outcomes is not None:
            return outcomes
        try:
            with torch.no_grad():
                logits = blend.combine(queues)
        except InvalidInput as error:
            return [Outcome(entry, None, None, error=str(error)) for entry, _ in cases]
        return self.verifier.decide(tasks, logits)

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

    def at_once(self, score: Callable[[int], None]) -> None:
        """One thread per model, where nobody proposes."""
        if self._threads is not None:
            list(self._threads.map(score, range(len(self.models))))

    def free(self, ids: Seq[str]) -> None:
        """Forget sequences. Unknown ids are ignored."""
        self._lines.drop(ids)
        self.verifier.free(ids)
        for model in self.models[1:]:
            model.free(ids)

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.shutdown()


def check_vocabularies(cast: Cast) -> None:
    """Raise ``InvalidInput`` unless all models have one vocabulary size."""
    first = cast.models[0]
    for name, model in zip(cast.names, cast.models, strict=True):
        if model.vocab_size != first.vocab_size:
            allowed = f"a model with the {first.vocab_size} tokens of {cast.names[0]}"
            raise InvalidInput("models", f"{name} with {model.vocab_size} tokens", allowed)


def distinct(names: Seq[str]) -> tuple[str, ...]:
    """The names, later ones of the same name numbered."""
    return tuple(f"{name}#{names[:i].count(name) + 1}" if name in names[:i] else name for i, name in enumerate(names))
