"""The stream of random numbers: pinned, keyed, the same with and without the native kernels."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest

from cospec.native import library
from cospec.rng.random_streams import (
    RandomStreams,
    StreamKind,
    derive_seed,
    exponential_sample,
    to_unit_interval,
)

WEIGHTS = np.array([0.1, 0.2, 0.0, 0.3, 0.4])


def test_uniforms_are_pinned() -> None:
    """A change of these numbers changes every seeded output; it needs a line in the changelog."""
    found = [RandomStreams(seed, base).uniforms(position, 2, kind).tolist() for seed, base, position, kind in KEYS]
    assert found == UNIFORMS


def test_tokens_are_pinned() -> None:
    found = [
        [RandomStreams(s, 3).token(WEIGHTS, position, p) for position in range(1, 9)]
        for s in (0, 7, -1)
        for p in StreamKind
    ]
    assert found == TOKENS


def test_derived_seeds_are_pinned() -> None:
    assert [derive_seed(7, index) for index in range(3)] == DERIVED
    assert derive_seed(-1, 0) == 2**64 - 1


def test_every_output_has_a_seed_of_its_own() -> None:
    """``n`` is at most 128; other indices number requests and rounds."""
    indices = [*range(1000), *(2**power for power in range(10, 64))]
    assert len({derive_seed(7, index) for index in indices}) == len(indices)


def test_purposes_are_streams() -> None:
    for kind in StreamKind:
        first, later = RandomStreams(5, 3).uniforms(9, 4, kind), RandomStreams(5, 8).uniforms(9, 4, kind)
        assert np.array_equal(first, later) == (kind is StreamKind.TARGET)
        assert (RandomStreams(5, 3).stream(9, kind) == RandomStreams(5, 8).stream(9, kind)) == (
            kind is StreamKind.TARGET
        )
    every = {tuple(RandomStreams(5, 3).uniforms(9, 4, kind)) for kind in StreamKind}
    assert len(every) == len(StreamKind)


def test_a_branch_is_a_stream_and_the_target_knows_of_none() -> None:
    for kind in StreamKind:
        streams = {RandomStreams(5, 3).stream(9, kind, branch) for branch in range(4)}
        numbers = {float(RandomStreams(5, 3).uniforms(9, 1, kind, branch)[0]) for branch in range(4)}
        assert len(streams) == len(numbers) == (1 if kind is StreamKind.TARGET else 4)
        assert RandomStreams(5, 3).stream(9, kind, 0) == RandomStreams(5, 3).stream(9, kind)
    weights = np.full(50, 1.0)
    drawn = [RandomStreams(5, 3).token(weights, 9, StreamKind.DRAFT, branch) for branch in range(40)]
    assert len(set(drawn)) > 10


def test_uniforms_belong_to_positions() -> None:
    whole = RandomStreams(1, 4).uniforms(4, 6, StreamKind.ACCEPT)
    assert np.array_equal(whole[2:5], RandomStreams(1, 4).uniforms(6, 3, StreamKind.ACCEPT))


def test_numbers_never_touch_their_bounds() -> None:
    ends = to_unit_interval(np.array([0, 2**64 - 1, 2**11 - 1, 2**12], dtype=np.uint64))
    assert (ends > 0).all()
    assert (ends < 1).all()
    assert ends[0] == 1 - ends[1] == 2.0**-53


def test_no_positive_weight() -> None:
    for weights in (np.zeros(4), np.full(4, np.nan)):
        with pytest.raises(ValueError, match="positive weight"):
            RandomStreams(0, 1).token(weights, 2, StreamKind.TARGET)


def test_weights_need_no_norm_and_zeros_are_never_drawn() -> None:
    for position in range(1, 200):
        drawn = RandomStreams(3, 1).token(WEIGHTS, position, StreamKind.TARGET)
        assert drawn == RandomStreams(3, 1).token(WEIGHTS * 1e-3, position, StreamKind.TARGET)
        assert drawn != 2
    tiny = np.array([0.0, 5e-324, 0.0])
    assert RandomStreams(3, 1).token(tiny, 1, StreamKind.TARGET) == 1


@pytest.mark.skipif(not library.available(), reason="the native kernels were not built")
@pytest.mark.parametrize("size", [1, 2, 5, 63, 4096])
def test_the_native_race_has_the_same_winners(size: int) -> None:
    generator = np.random.default_rng(size)
    count = 300 if size > 1000 else 2000
    weights = generator.random((count, size)) ** 6
    weights[generator.random(weights.shape) < 0.3] = 0.0
    streams = [RandomStreams(row * 77 - 5, row).stream(row % 91, StreamKind(row % 4), row % 7) for row in range(count)]
    fast = exponential_sample(weights, streams)
    with patch("cospec.rng.random_streams.library.available", lambda: False):
        slow = exponential_sample(weights, streams)
    assert fast == slow
    assert all((winner < 0) == (not weights[row].any()) for row, winner in enumerate(fast))


def test_a_race_is_row_by_row() -> None:
    weights = np.random.default_rng(0).random((20, 7))
    streams = [RandomStreams(row, 2).stream(5, StreamKind.DRAFT) for row in range(20)]
    alone = [RandomStreams(row, 2).token(weights[row], 5, StreamKind.DRAFT) for row in range(20)]
    assert exponential_sample(weights, streams) == alone


KEYS = [
    (0, 1, 1, StreamKind.TARGET),
    (7, 3, 4, StreamKind.ACCEPT),
    (-1, 9, 2**40, StreamKind.RECOVER),
    (2**64 - 1, 9, 2**40, StreamKind.RECOVER),
]
UNIFORMS = [
    [0.5023796042735055, 0.253822740392485],
    [0.8854160456402577, 0.41329253742628],
    [0.6292374866819007, 0.08340608949843642],
    [0.6292374866819007, 0.08340608949843642],
]
TOKENS = [
    [4, 0, 4, 1, 0, 1, 1, 3],
    [4, 4, 1, 3, 4, 4, 4, 3],
    [3, 4, 4, 4, 0, 3, 3, 4],
    [0, 3, 4, 4, 4, 1, 0, 3],
    [3, 1, 4, 1, 4, 4, 4, 3],
    [4, 1, 3, 3, 1, 4, 3, 3],
    [3, 0, 1, 3, 3, 0, 4, 1],
    [1, 3, 4, 0, 1, 0, 3, 4],
    [0, 4, 3, 3, 4, 0, 0, 4],
    [4, 3, 4, 3, 4, 3, 3, 1],
    [4, 4, 4, 4, 3, 0, 4, 4],
    [1, 3, 4, 0, 3, 1, 4, 4],
    [1, 1, 1, 3, 1, 1, 0, 4],
    [1, 4, 4, 4, 3, 3, 3, 0],
    [4, 0, 4, 0, 3, 4, 4, 3],
]
DERIVED = [7, 3624858970450714162, 15296270562797086149]
