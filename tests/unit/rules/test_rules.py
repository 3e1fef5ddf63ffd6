"""Verdicts of single drafts, where they are certain; the laws are in tests/exactness."""

from __future__ import annotations

import numpy as np
import pytest

from cospec.draws import Draws, Purpose
from cospec.registry import RULES
from cospec.rules.match import Match
from cospec.rules.residual import residual, surplus
from cospec.types import Draft, Scores, Verdict


def draft(tokens: tuple[int, ...], parents: tuple[int, ...] | None = None, q: np.ndarray | None = None) -> Draft:
    shape = parents if parents is not None else tuple(range(-1, len(tokens) - 1))
    return Draft("s", 6, tokens, shape, ("d",) * len(tokens), q)


def certain(*tokens: int, vocab: int = 4) -> Scores:
    law = np.zeros((len(tokens), vocab))
    law[np.arange(len(tokens)), tokens] = 1.0
    return Scores(chosen=tuple(tokens), law=law)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kept", range(4))
def test_a_certain_law_keeps_what_agrees(name: str, seed: int, kept: int) -> None:
    tokens = (1, 2, 3)
    wanted = [*tokens[:kept], 0, 0, 0, 0][:4]
    verdict = RULES.load(name)().judge(draft(tokens), certain(*wanted), Draws(seed, 6))
    assert verdict == Verdict(tuple(range(kept)), 0, bonus=kept == 3)


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_a_drafter_that_draws_from_the_law_is_always_kept(name: str) -> None:
    generator = np.random.default_rng(0)
    for seed in range(200):
        law = generator.random((4, 5)) + 1e-3
        law /= law.sum(-1, keepdims=True)
        tokens = tuple(int(generator.choice(5, p=row)) for row in law[:3])
        verdict = RULES.load(name)().judge(draft(tokens, q=law[:3].copy()), Scores(law=law), Draws(seed, 6))
        assert verdict.path == (0, 1, 2)
        assert verdict.bonus
        assert verdict.token == Draws(seed, 6).token(law[3], 9, Purpose.TARGET)


@pytest.mark.parametrize("name", RULES)
def test_rules_are_pure(name: str) -> None:
    generator = np.random.default_rng(1)
    law, q = (generator.dirichlet(np.ones(5), n) for n in (4, 3))
    before, drafted = law.copy(), q.copy()
    for given in (q, None):
        judged = draft((0, 3, 2), q=given)
        verdicts = [RULES.load(name)().judge(judged, Scores(law=law), Draws(8, 6)) for _ in range(2)]
        assert verdicts[0] == verdicts[1]
    assert np.array_equal(law, before)
    assert np.array_equal(q, drafted)


def test_match_walks_down_the_tree() -> None:
    tree = draft((1, 2, 3, 1, 2), (-1, -1, 1, 1, 3))
    assert Match().judge(tree, certain(2, 0, 1, 0, 2, 3), Draws(0, 6)) == Verdict((1, 3, 4), 3, bonus=True)
    assert Match().judge(tree, certain(2, 0, 1, 0, 0, 3), Draws(0, 6)) == Verdict((1, 3), 0, bonus=False)
    assert Match().judge(tree, certain(1, 3, 1, 0, 0, 3), Draws(0, 6)) == Verdict((0,), 3, bonus=True)
    assert Match().judge(tree, certain(0, 3, 1, 0, 0, 3), Draws(0, 6)) == Verdict((), 0, bonus=False)


def test_match_takes_the_first_of_equal_children() -> None:
    assert Match().judge(draft((2, 2), (-1, -1)), certain(2, 1, 3), Draws(0, 6)) == Verdict((0,), 1, bonus=True)


def test_the_residual() -> None:
    law, q = np.array([0.5, 0.3, 0.2]), np.array([[0.2, 0.6, 0.2]])
    assert residual(law, draft((1,), q=q), 0) == pytest.approx([0.3, 0, 0])
    assert surplus(law, draft((1,), q=q), 0, 0.5) == pytest.approx([0.05, 0, 0])
    assert residual(law, draft((1,)), 0) == pytest.approx([0.5, 0, 0.2])
    assert residual(law, draft((1,), q=law[None]), 0) == pytest.approx(law)
