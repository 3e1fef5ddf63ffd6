"""Results for single drafts, where they are certain; tests/exactness checks distributions."""

from __future__ import annotations

import numpy as np
import pytest

from cospec.acceptance.match import Match
from cospec.acceptance.recursive import Recursive
from cospec.acceptance.residual import residual, surplus
from cospec.acceptance.typical import Typical
from cospec.core.types import Draft, TargetProbs, VerifyResult
from cospec.registry import ACCEPTANCE_METHODS
from cospec.rng.random_streams import RandomStreams, StreamKind


def draft(tokens: tuple[int, ...], parents: tuple[int, ...] | None = None, q: np.ndarray | None = None) -> Draft:
    shape = parents if parents is not None else tuple(range(-1, len(tokens) - 1))
    return Draft("s", 6, tokens, shape, ("d",) * len(tokens), q)


def certain(*tokens: int, vocab: int = 4) -> TargetProbs:
    probs = np.zeros((len(tokens), vocab))
    probs[np.arange(len(tokens)), tokens] = 1.0
    return TargetProbs(chosen=tuple(tokens), probs=probs)


@pytest.mark.parametrize("name", ACCEPTANCE_METHODS)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kept", range(4))
def test_a_certain_distribution_keeps_equal_tokens(name: str, seed: int, kept: int) -> None:
    tokens = (1, 2, 3)
    wanted = [*tokens[:kept], 0, 0, 0, 0][:4]
    result = ACCEPTANCE_METHODS.load(name)().verify(draft(tokens), certain(*wanted), RandomStreams(seed, 6))
    assert result == VerifyResult(tuple(range(kept)), 0, bonus=kept == 3)


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_drafts_drawn_from_the_target_are_always_kept(name: str) -> None:
    generator = np.random.default_rng(0)
    for seed in range(200):
        probs = generator.random((4, 5)) + 1e-3
        probs /= probs.sum(-1, keepdims=True)
        tokens = tuple(int(generator.choice(5, p=row)) for row in probs[:3])
        result = ACCEPTANCE_METHODS.load(name)().verify(
            draft(tokens, q=probs[:3].copy()), TargetProbs(probs=probs), RandomStreams(seed, 6)
        )
        assert result.path == (0, 1, 2)
        assert result.bonus
        assert result.token == RandomStreams(seed, 6).token(probs[3], 9, StreamKind.TARGET)


def test_a_surplus_of_mere_rounding_is_no_error() -> None:
    probs = np.array([[0.5, 0.5], [0.5, 0.5 + 2.0**-53], [1.0, 0.0]])
    q = np.array([[0.5, 0.5], [0.5, 0.5]])
    result = ACCEPTANCE_METHODS.load("block")().verify(
        draft((0, 1), q=q), TargetProbs(probs=probs), RandomStreams(1, 6)
    )
    assert result == VerifyResult((0, 1), 0, bonus=True)


@pytest.mark.parametrize("name", ACCEPTANCE_METHODS)
def test_rules_are_pure(name: str) -> None:
    generator = np.random.default_rng(1)
    probs, q = (generator.dirichlet(np.ones(5), n) for n in (4, 3))
    before, drafted = probs.copy(), q.copy()
    for given in (q, None):
        judged = draft((0, 3, 2), q=given)
        results = [
            ACCEPTANCE_METHODS.load(name)().verify(judged, TargetProbs(probs=probs), RandomStreams(8, 6))
            for _ in range(2)
        ]
        assert results[0] == results[1]
    assert np.array_equal(probs, before)
    assert np.array_equal(q, drafted)


def test_match_walks_down_the_tree() -> None:
    tree = draft((1, 2, 3, 1, 2), (-1, -1, 1, 1, 3))
    assert Match().verify(tree, certain(2, 0, 1, 0, 2, 3), RandomStreams(0, 6)) == VerifyResult(
        (1, 3, 4), 3, bonus=True
    )
    assert Match().verify(tree, certain(2, 0, 1, 0, 0, 3), RandomStreams(0, 6)) == VerifyResult((1, 3), 0, bonus=False)
    assert Match().verify(tree, certain(1, 3, 1, 0, 0, 3), RandomStreams(0, 6)) == VerifyResult((0,), 3, bonus=True)
    assert Match().verify(tree, certain(0, 3, 1, 0, 0, 3), RandomStreams(0, 6)) == VerifyResult((), 0, bonus=False)


def test_match_takes_the_first_of_equal_children() -> None:
    assert Match().verify(draft((2, 2), (-1, -1)), certain(2, 1, 3), RandomStreams(0, 6)) == VerifyResult(
        (0,), 1, bonus=True
    )


def test_the_residual() -> None:
    probs, q = np.array([0.5, 0.3, 0.2]), np.array([[0.2, 0.6, 0.2]])
    assert residual(probs, draft((1,), q=q), 0) == pytest.approx([0.3, 0, 0])
    assert surplus(probs, draft((1,), q=q), 0, 0.5) == pytest.approx([0.05, 0, 0])
    assert residual(probs, draft((1,)), 0) == pytest.approx([0.5, 0, 0.2])
    assert residual(probs, draft((1,), q=probs[None]), 0) == pytest.approx(probs)


def test_recursive_takes_the_children_in_their_order() -> None:
    """The first is kept where the distribution is its q; the second gets the first's residual, the third the rest."""
    q = np.array([[0.5, 0.5, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    tree = draft((0, 1), (-1, -1), q)
    for seed in range(50):
        same = TargetProbs(probs=np.tile(q[0], (3, 1)))
        assert Recursive().verify(tree, same, RandomStreams(seed, 6)).path == (0,)
        other = Recursive().verify(
            tree, TargetProbs(probs=np.tile([0.0, 0.9, 0.1, 0.0], (3, 1))), RandomStreams(seed, 6)
        )
        assert other.path in ((1,), ())
        assert other.token == 2 or other.path == (1,)
        certain_ = Recursive().verify(tree, certain(1, 2, 3), RandomStreams(seed, 6))
        assert certain_ == VerifyResult((1,), 3, bonus=True)


def test_recursive_gives_every_child_a_number_of_its_own() -> None:
    """Two children that each stand an even chance are both rejected a quarter of the time, not never or half of it."""
    tree = draft((0, 0), (-1, -1), np.array([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]))
    probs = np.tile([0.5, 0.5, 0.0], (3, 1))
    kept = [Recursive().verify(tree, TargetProbs(probs=probs), RandomStreams(seed, 6)).path for seed in range(2000)]
    assert kept.count((0,)) == pytest.approx(1000, abs=120)
    assert kept.count((1,)) == 0, "a rejection leaves nothing of that token"
    chosen = draft((0, 1), (-1, -1))
    kept = [
        Recursive()
        .verify(chosen, TargetProbs(probs=np.tile([0.25, 0.375, 0.375], (3, 1))), RandomStreams(seed, 6))
        .path
        for seed in range(2000)
    ]
    assert kept.count((0,)) == pytest.approx(500, abs=90)
    assert kept.count((1,)) == pytest.approx(750, abs=100)


def test_typical_keeps_what_is_likely_enough_and_the_deepest_path() -> None:
    sure, unsure = [0.05, 0.95, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]
    tree = draft((0, 1, 2, 3), (-1, -1, 1, 2))
    probs = np.array([sure, unsure, unsure, unsure, sure])
    result = Typical().verify(tree, TargetProbs(probs=probs), RandomStreams(0, 6))
    assert result.path == (1, 2, 3), "0.25 is typical of a flat distribution"
    assert result.bonus
    low = np.array([[0.97, 0.01, 0.01, 0.01]] * 5)
    assert Typical().verify(draft((1, 0), (-1, -1)), TargetProbs(probs=low[:3]), RandomStreams(0, 6)).path == (1,)
    assert Typical().verify(draft((1, 2), (-1, -1)), TargetProbs(probs=low[:3]), RandomStreams(0, 6)).path == ()
