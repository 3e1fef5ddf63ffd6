"""An acceptance method alone on tables of random distributions: output distribution and expected accepted length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np

from cospec.core.plugin_base import AcceptanceMethod
from cospec.core.types import Draft, TargetProbs
from cospec.rng.random_streams import Floats, RandomStreams
from harness.enumerated_draws import BranchingRandom, BranchTrace, OutputDistribution, enumerate_runs

Words = tuple[int, ...]


@dataclass(frozen=True)
class Tables:
    """The target's distribution ``p`` and the drafter's ``q`` after every prefix of up to ``depth`` tokens."""

    depth: int
    p: Mapping[Words, Floats]
    q: Mapping[Words, Floats]

    def wanted(self) -> OutputDistribution:
        """The distribution of ``depth + 1`` tokens."""
        probs: dict[Words, float] = {(): 1.0}
        for _ in range(self.depth + 1):
            probs = {
                (*words, token): mass * float(p)
                for words, mass in probs.items()
                for token, p in enumerate(self.p[words])
                if p > 0
            }
        return dict(probs.items())

    def round(
        self, acceptance_method: AcceptanceMethod, trace: BranchTrace, point: Words | None = None
    ) -> tuple[Words, int]:
        """One draft drawn from q (or ``point``, without q), judged; the tokens it gave, continued by p to the end."""
        words: Words = ()
        for node in range(self.depth):
            words += (point[node] if point else trace.choose(self.q[words]),)
        prefixes = [words[:n] for n in range(self.depth + 1)]
        q = None if point else np.stack([self.q[prefix] for prefix in prefixes[:-1]])
        n = self.depth
        draft = Draft("s", 5, words, tuple(range(-1, n - 1)), ("d",) * n, q)
        probs = np.stack([self.p[prefix] for prefix in prefixes])
        draws = cast(RandomStreams, BranchingRandom(trace, 5))  # as far as a rule knows
        result = acceptance_method.verify(draft, TargetProbs(probs=probs), draws)
        assert result.path == tuple(range(len(result.path)))
        assert result.token is not None
        output: Words = (*words[: len(result.path)], result.token)
        while len(output) <= self.depth:
            output += (trace.choose(self.p[output]),)
        return output, len(result.path)

    def probs(self, acceptance_method: AcceptanceMethod, point: Words | None = None) -> OutputDistribution:
        """Of the ``depth + 1`` tokens that begin with what the rule kept."""
        return enumerate_runs(lambda trace: self.round(acceptance_method, trace, point)[0])

    def accepted(self, acceptance_method: AcceptanceMethod) -> float:
        """The expected accepted length."""
        lengths = enumerate_runs(lambda trace: self.round(acceptance_method, trace)[1])
        return sum(length * mass for length, mass in lengths.items())
