"""A rule by itself on tables of random distributions: its exact law and its expected accepted length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np

from cospec.draws import Draws, Floats
from cospec.plugins import Rule
from cospec.types import Draft, Scores
from harness.oracle import BranchingDraws, Law, Trace, enumerate_runs

Words = tuple[int, ...]


@dataclass(frozen=True)
class Tables:
    """The target's law ``p`` and the drafter's ``q`` behind every prefix of up to ``depth`` tokens."""

    depth: int
    p: Mapping[Words, Floats]
    q: Mapping[Words, Floats]

    def wanted(self) -> Law:
        """The law of ``depth + 1`` tokens."""
        law: dict[Words, float] = {(): 1.0}
        for _ in range(self.depth + 1):
            law = {
                (*words, token): mass * float(p)
                for words, mass in law.items()
                for token, p in enumerate(self.p[words])
                if p > 0
            }
        return dict(law.items())

    def round(self, rule: Rule, trace: Trace, point: Words | None = None) -> tuple[Words, int]:
        """One draft drawn from q (or ``point``, without q), judged; the tokens it gave, continued by p to the end."""
        words: Words = ()
        for node in range(self.depth):
            words += (point[node] if point else trace.choose(self.q[words]),)
        prefixes = [words[:n] for n in range(self.depth + 1)]
        q = None if point else np.stack([self.q[prefix] for prefix in prefixes[:-1]])
        n = self.depth
        draft = Draft("s", 5, words, tuple(range(-1, n - 1)), ("d",) * n, q)
        law = np.stack([self.p[prefix] for prefix in prefixes])
        draws = cast(Draws, BranchingDraws(trace, 5))  # as far as a rule knows
        verdict = rule.judge(draft, Scores(law=law), draws)
        assert verdict.path == tuple(range(len(verdict.path)))
        assert verdict.token is not None
        output: Words = (*words[: len(verdict.path)], verdict.token)
        while len(output) <= self.depth:
            output += (trace.choose(self.p[output]),)
        return output, len(verdict.path)

    def law(self, rule: Rule, point: Words | None = None) -> Law:
        """Of the ``depth + 1`` tokens that begin with what the rule kept."""
        return enumerate_runs(lambda trace: self.round(rule, trace, point)[0])

    def accepted(self, rule: Rule) -> float:
        """The expected accepted length."""
        lengths = enumerate_runs(lambda trace: self.round(rule, trace)[1])
        return sum(length * mass for length, mass in lengths.items())
