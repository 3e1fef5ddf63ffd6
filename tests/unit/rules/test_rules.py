"""Verdicts of single drafts, where they are certain; the laws are in tests/exactness."""

from __future__ import annotations

import numpy as np
import pytest

from cospec.draws import Draws, Purpose
from cospec.registry import RULES
from cospec.rules.match import Match
from cospec.rules.recursive import Recursive
from cospec.rules.residual import residual, surplus
from cospec.rules.typical import Typical
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


def test_a_surplus_of_mere_rounding_is_no_error() -> None:
    law = np.array([[0.5, 0.5], [0.5, 0.5 + 2.0**-53], [1.0, 0.0]])
    q = np.array([[0.5, 0.5], [0.5, 0.5]])
    verdict = RULES.load("block")().judge(draft((0, 1), q=q), Scores(law=law), Draws(1, 6))
    assert verdict == Verdict((0, 1), 0, bonus=True)


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


def test_recursive_takes_the_children_in_their_order() -> None:
    """The first is always kept by a law that is its q; the second gets what the first left, the third the rest."""
    q = np.array([[0.5, 0.5, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    tree = draft((0, 1), (-1, -1), q)
    for seed in range(50):
        same = Scores(law=np.tile(q[0], (3, 1)))
        assert Recursive().judge(tree, same, Draws(seed, 6)).path == (0,)
        other = Recursive().judge(tree, Scores(law=np.tile([0.0, 0.9, 0.1, 0.0], (3, 1))), Draws(seed, 6))
        assert other.path in ((1,), ())
        assert other.token == 2 or other.path == (1,)
        certain_ = Recursive().judge(tree, certain(1, 2, 3), Draws(seed, 6))
        assert certain_ == Verdict((1,), 3, bonus=True)


def test_recursive_gives_every_child_a_number_of_its_own() -> None:
    """Two children that each stand an even chance are both rejected a quarter of the time, not never or half of it."""
    tree = draft((0, 0), (-1, -1), np.array([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]))
    law = np.tile([0.5, 0.5, 0.0], (3, 1))
    kept = [Recursive().judge(tree, Scores(law=law), Draws(seed, 6)).path for seed in range(2000)]
    assert kept.count((0,)) == pytest.approx(1000, abs=120)
    assert kept.count((1,)) == 0, "a rejection leaves nothing of that token"
    chosen = draft((0, 1), (-1, -1))
    kept = [
        Recursive().judge(chosen, Scores(law=np.tile([0.25, 0.375, 0.375], (3, 1))), Draws(seed, 6)).path
        for seed in range(2000)
    ]
    assert kept.count((0,)) == pytest.approx(500, abs=90)
    assert kept.count((1,)) == pytest.approx(750, abs=100)


def test_typical_keeps_what_is_likely_enough_and_the_deepest_path() -> None:
    sure, unsure = [0.05, 0.95, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]
    tree = draft((0, 1, 2, 3), (-1, -1, 1, 2))
    law = np.array([sure, unsure, unsure, unsure, sure])
    verdict = Typical().judge(tree, Scores(law=law), Draws(0, 6))
    assert verdict.path == (1, 2, 3), "0.25 is typical of a law that is at a loss"
    assert verdict.bonus
    low = np.array([[0.97, 0.01, 0.01, 0.01]] * 5)
    assert Typical().judge(draft((1, 0), (-1, -1)), Scores(law=low[:3]), Draws(0, 6)).path == (1,)
    assert Typical().judge(draft((1, 2), (-1, -1)), Scores(law=low[:3]), Draws(0, 6)).path == ()
