"""Each blend against its formula, what it refuses, and that a row does not depend on its neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch

from cospec import register_blend
from cospec.ensemble.blends.registry import build_blend
from cospec.errors import InvalidInput
from cospec.native import library
from cospec.native.library import Source

register_blend("first-plus-half", lambda logits: logits[0] + 0.5 * logits[1])
register_blend("wrong-shape", lambda logits: logits[0][:, :-1])
register_blend("not-a-tensor", cast(Any, lambda logits: 3.0))
register_blend("raises", lambda logits: logits[7])


def asserting(logits: Sequence[torch.Tensor]) -> torch.Tensor:
    raise AssertionError("no such\nthing")


register_blend("asserts", asserting)

LAWS: list[tuple[dict[str, Any], int, str, tuple[int, ...]]] = [
    ({"method": "single"}, 3, "target", (0,)),
    ({"method": "weighted"}, 4, "weighted(0.25, 0.25, 0.25, 0.25)", (0, 1, 2, 3)),
    ({"method": "weighted", "weights": [0.6, 0.4]}, 2, "weighted(0.6, 0.4)", (0, 1)),
    ({"method": "weighted", "lambda": 0.3}, 2, "weighted(0.7, 0.3)", (0, 1)),
    ({"method": "weighted", "weights": [0.5, 0, 0.5]}, 3, "weighted(0.5, 0, 0.5)", (0, 2)),
    ({"method": "weighted", "lambda": 0}, 2, "weighted(1, 0)", (0,)),
    ({"method": "contrastive", "mu": 0.5, "plausibility": 0.1}, 2, "contrastive(mu=0.5, plausibility=0.1)", (0, 1)),
    ({"method": "contrastive", "mu": 0.0}, 2, "contrastive(mu=0)", (0,)),
    ({"method": "realign", "lambda": 1.5}, 2, "realign(-0.5, 1.5)", (0, 1)),
    ({"method": "adaptive", "max_divergence": 0.3}, 2, "adaptive(max_divergence=0.3)", (0, 1)),
    ({"method": "first-plus-half"}, 2, "first-plus-half", (0, 1)),
]


def rows(count: int, seed: int = 0, vocab: int = 50) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(7, vocab, generator=generator) * 3 for _ in range(count)]


@pytest.mark.parametrize(("ensemble", "count", "name", "members"), LAWS, ids=lambda value: str(value))
def test_names_and_members(ensemble: dict[str, Any], count: int, name: str, members: tuple[int, ...]) -> None:
    blend = build_blend(ensemble, count)
    assert blend.name == name
    assert blend.members == members


@pytest.mark.parametrize(
    ("ensemble", "count"), [(ensemble, count) for ensemble, count, _, _ in LAWS], ids=lambda value: str(value)
)
def test_a_row_does_not_depend_on_its_neighbours(ensemble: dict[str, Any], count: int) -> None:
    blend = build_blend(ensemble, count)
    given = [rows(count)[member] for member in blend.members]
    before = [each.clone() for each in given]
    whole = blend.combine(given)
    assert whole.shape == given[0].shape
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
    for row in range(7):
        assert torch.equal(blend.combine([each[row : row + 1] for each in given])[0], whole[row])


def distribution_of(ensemble: dict[str, Any], logits: list[torch.Tensor]) -> torch.Tensor:
    return torch.softmax(build_blend(ensemble, len(logits)).combine(logits).double(), -1)


def test_the_formulas() -> None:
    first, second = (each.double() for each in rows(2))
    p, q = torch.softmax(first, -1), torch.softmax(second, -1)
    close: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(
        distribution_of({"method": "weighted", "weights": [0.6, 0.4]}, [first, second]), 0.6 * p + 0.4 * q, **close
    )
    torch.testing.assert_close(
        distribution_of({"method": "contrastive", "mu": 0.5}, [first, second]),
        torch.softmax(first - 0.5 * second, -1),
        **close,
    )
    masked = torch.softmax((first - 0.5 * second).masked_fill(p < 0.1 * p.amax(-1, keepdim=True), -torch.inf), -1)
    found = distribution_of({"method": "contrastive", "mu": 0.5, "plausibility": 0.1}, [first, second])
    torch.testing.assert_close(found, masked, **close)
    assert (found == 0).any()
    torch.testing.assert_close(
        distribution_of({"method": "realign", "lambda": 1.5}, [first, second]),
        torch.softmax(1.5 * second - 0.5 * first, -1),
        **close,
    )


FREE = {"method": "adaptive", "lambda1": 100.0, "lambda2": 1.0, "lambda3": 0.0}  # no token is key


def alike() -> list[torch.Tensor]:
    """Rows of two models that are alike, so that not every token is key."""
    first, second = rows(2)
    return [second + 0.1 * first, second]


def distances(found: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return (found - p).abs().sum(-1) / 2


@pytest.mark.parametrize("precision", [torch.float32, torch.float64], ids=str)
def test_adaptive_moves_as_far_as_its_bound(precision: torch.dtype) -> None:
    """Without a bound the blend is the drafter; with one, most rows come near the bound and none exceeds the bound."""
    given = [each.to(precision) for each in rows(2)]
    p, q = (torch.softmax(each.double(), -1) for each in given)
    torch.testing.assert_close(distribution_of(FREE | {"max_divergence": 1.0}, given), q, rtol=1e-9, atol=1e-12)
    for bound in (0.01, 0.1, 0.3):
        found = distribution_of(FREE | {"max_divergence": bound}, given)
        far = distances(found, p)
        assert bool((far <= bound + 1e-9).all())
        assert bool((far > 0.8 * bound).float().mean() > 0.7)
        slope = torch.log(found / p)[:, 1:] - torch.log(found / p)[:, :1]
        full = torch.log(q / p)[:, 1:] - torch.log(q / p)[:, :1]
        tau = (slope * full).sum(-1, keepdim=True) / (full * full).sum(-1, keepdim=True)
        torch.testing.assert_close(slope, tau * full, rtol=1e-6, atol=1e-6)  # one exponent for all tokens of a row


@pytest.mark.parametrize("precision", [torch.float32, torch.float64], ids=str)
def test_key_tokens_keep_their_odds(precision: torch.dtype) -> None:
    given = [each.to(precision) for each in alike()]
    p, q = (torch.softmax(each.double(), -1) for each in given)
    for key in ({"lambda1": 0.0}, {"lambda2": 0.0}, {"lambda3": 1.0}):
        torch.testing.assert_close(distribution_of(FREE | key, given), p)
    some = distribution_of(FREE | {"lambda2": 0.01, "max_divergence": 0.02}, given)
    key_tokens = (p - q).abs() > 0.01
    assert 0 < int(key_tokens.sum()) < key_tokens.numel()
    for row in range(7):
        odds = (some / p)[row][key_tokens[row]]
        torch.testing.assert_close(odds, odds[:1].expand_as(odds))
    assert not torch.allclose(some, p)
    torch.testing.assert_close(some.sum(-1), torch.ones(7, dtype=torch.float64))


def test_the_library_reports_the_divergence_of_each_row() -> None:
    blend = build_blend({"method": "adaptive", "max_divergence": 0.05}, 2)
    given = alike()
    source = Source(given, cast(Any, blend.recipe))
    found = torch.softmax(torch.from_numpy(library.blend_rows(source)), -1)
    assert source.divergences is not None
    wanted = distances(found, torch.softmax(given[0].double(), -1))
    torch.testing.assert_close(torch.tensor(source.divergences.tolist(), dtype=torch.float64), wanted)
    assert 0 < float(wanted.max()) <= 0.05


def test_broken_rows_stay_broken() -> None:
    """A row that is no numbers must not turn into numbers."""
    for ensemble, count, _, _ in LAWS:
        blend = build_blend(ensemble, count)
        given = [rows(count)[member].clone() for member in blend.members]
        given[-1][2] = torch.nan
        values = blend.combine(given).amax(-1)
        assert not bool(torch.isfinite(values[2])), ensemble
        assert bool(torch.isfinite(values[[0, 1, 3, 4, 5, 6]]).all()), ensemble


def test_extremes_are_numbers() -> None:
    """Logits far apart, where probabilities vanish."""
    given = [torch.tensor([[0.0, -3000.0, 5.0]]), torch.tensor([[0.0, -2000.0, 5.0]])]
    for ensemble in ({"method": "weighted"}, {"method": "realign"}, {"method": "adaptive"}, {"method": "contrastive"}):
        found = distribution_of(ensemble, given)
        assert bool(torch.isfinite(found).all())
        assert float(found.sum()) == pytest.approx(1)
        assert int(found.argmax()) == 2 or ensemble["method"] == "contrastive"


@pytest.mark.parametrize(
    ("ensemble", "count", "says"),
    [
        ({}, 2, "ensemble.method is missing"),
        ({"method": "mean"}, 2, "ensemble.method is 'mean'"),
        ({"method": "weighted", "lambda": 1.3}, 2, "ensemble.lambda is 1.3"),
        ({"method": "weighted", "lambda": -0.1}, 2, "ensemble.lambda is -0.1"),
        ({"method": "weighted", "lambda": 0.5}, 3, "give ensemble.weights"),
        ({"method": ["weighted"]}, 2, "ensemble.method is ['weighted']"),
        ({"method": "single", "mu": 1}, 2, "key ensemble.mu is 1"),
        ({"method": "realign", "lambda": 1e9}, 2, "ensemble.lambda is 1000000000.0"),
        (
            {"method": "realign", "weights": [float("inf"), -float("inf")]},
            2,
            "ensemble.weights[0] is inf",
        ),
        ({"method": "weighted", "weights": [0.6, 0.6]}, 2, "whose sum is 1.2"),
        (
            {"method": "weighted", "weights": [1e308, 1e308]},
            2,
            "ensemble.weights is [1e+308, 1e+308]",
        ),
        ({"method": "realign", "weights": [1e308, 1e308, 1.0]}, 3, "ensemble.weights"),
        ({"method": "weighted", "weights": [1.5, -0.5]}, 2, "ensemble.weights is [1.5, -0.5]"),
        ({"method": "weighted", "weights": [1.0]}, 2, "ensemble.weights is [1.0]"),
        ({"method": "weighted", "weights": [float("nan"), 0.5]}, 2, "ensemble.weights"),
        ({"method": "weighted", "weights": [0.5, 0.5], "lambda": 0.5}, 2, "ensemble.lambda"),
        ({"method": "weighted", "mu": 0.5}, 2, "one of weights, lambda"),
        ({"method": "contrastive", "mu": -1}, 2, "ensemble.mu"),
        ({"method": "contrastive"}, 3, "contrastive"),
        ({"method": "adaptive"}, 3, "adaptive"),
        ({"method": "first-plus-half", "mu": 1}, 2, "ensemble.mu"),
    ],
)
def test_one_sentence(ensemble: dict[str, Any], count: int, says: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        build_blend(ensemble, count)
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [("wrong-shape", "[7, 49]"), ("not-a-tensor", "a float"), ("raises", "IndexError"), ("asserts", "no such thing;")],
)
def test_functions_that_misbehave(name: str, says: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        build_blend({"method": name}, 2).combine(rows(2))
    assert says in str(raised.value)


def test_names_that_cannot_be_registered() -> None:
    with pytest.raises(InvalidInput, match="'weighted'"):
        register_blend("weighted", lambda logits: logits[0])
    with pytest.raises(InvalidInput, match="a function"):
        register_blend("constant", cast(Any, 3))


def test_the_bound_of_the_acceptance_rate() -> None:
    """CoS theorem 3.2: a mixture accepts a member's token at least with the member's weight."""
    for weights in ([0.6, 0.4], [0.1, 0.9], [0.98, 0.02]):
        logits = rows(2, seed=3)
        mixed = distribution_of({"method": "weighted", "weights": weights}, logits).numpy()
        for weight, own in zip(weights, logits, strict=True):
            alpha = np.minimum(mixed, torch.softmax(own.double(), -1).numpy()).sum(-1)
            assert (alpha >= weight - 1e-12).all()
