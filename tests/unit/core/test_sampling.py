"""The target distribution against a slow reference, each parameter alone and all together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cospec.core.sampling import (
    History,
    RowBlock,
    edit,
    likeliest,
    target_probs,
)
from cospec.sampling_params import SamplingParams
from harness.reference import next_distribution
from harness.target_probs import target_probs_of

V = 9


@st.composite
def params(draw: st.DrawFn) -> SamplingParams:
    maybe: Callable[[st.SearchStrategy[float], float], float] = lambda s, off: draw(st.one_of(st.just(off), s))  # noqa: E731
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-3, 0.3, 1.0, 2.5])),
        top_k=draw(st.sampled_from([-1, 0, 1, 2, 5, V, 99])),
        top_p=maybe(st.floats(0.01, 0.999), 1.0),
        min_p=maybe(st.floats(0.0, 1.0), 0.0),
        repetition_penalty=maybe(st.floats(0.3, 3.0), 1.0),
        presence_penalty=maybe(st.floats(-2, 2), 0.0),
        frequency_penalty=maybe(st.floats(-2, 2), 0.0),
        logit_bias=draw(st.one_of(st.none(), st.dictionaries(st.integers(0, V - 1), st.floats(-100, 100), max_size=3))),
        min_tokens=draw(st.integers(0, 6)),
        max_tokens=16,
        stop_token_ids=tuple(draw(st.sets(st.integers(0, V - 2), max_size=3))),
        allowed_token_ids=draw(st.one_of(st.none(), st.sets(st.integers(0, V - 1)).map(lambda ids: (*ids, V - 1)))),
        bad_words_token_ids=tuple(
            draw(st.lists(st.lists(st.integers(0, V - 2), min_size=1, max_size=3).map(tuple), max_size=3))
        ),
    )


@pytest.fixture(params=["float64", "native", "torch"])
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Double logits, and float ones with and without the native kernels."""
    if request.param == "torch":
        with patch("cospec.native.library.available", lambda: False):
            yield torch.float32
    else:
        yield torch.float64 if request.param == "float64" else torch.float32


@settings(max_examples=120, derandomize=True)
@given(
    given_params=params(),
    seed=st.integers(0, 10**6),
    tokens=st.lists(st.integers(0, V - 1), min_size=1, max_size=8),
    prompt_len=st.integers(1, 8),
    path=st.lists(st.integers(0, V - 1), max_size=4),
)
def test_every_row_follows_the_reference(
    given_params: SamplingParams, seed: int, tokens: list[int], prompt_len: int, path: list[int]
) -> None:
    prompt_len = min(prompt_len, len(tokens))
    paths = [path[:n] for n in range(len(path) + 1)]
    logits = torch.randn(len(paths), V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2
    before = logits.clone()
    found = target_probs_of(logits, given_params, History(tokens, prompt_len, paths))
    assert torch.equal(logits, before), "the model's logits were written"
    for row, drafted in enumerate(paths):
        output = [*tokens[prompt_len:], *drafted]
        wanted = next_distribution(logits[row].tolist(), given_params, tokens[:prompt_len], output)
        assert found[row] == pytest.approx(wanted, abs=1e-12)
    if given_params.greedy:
        history = History(tokens, prompt_len, paths)
        assert likeliest(edit(logits, given_params, history)) == found.argmax(-1).tolist()


def test_blocks_do_not_mix(dtype: torch.dtype) -> None:
    """Many sequences of different parameters at once give what each gives alone."""
    generator = torch.Generator().manual_seed(0)
    chosen = [
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.5, top_k=3),
        SamplingParams(top_p=0.7, frequency_penalty=1.0),
        SamplingParams(temperature=0, repetition_penalty=2.0),
        SamplingParams(min_p=0.3, logit_bias={2: 4.0}),
    ]
    blocks = [RowBlock(each, History([1, 2, 3, 3], 2, [[], [4], [4, 5]][: 1 + n % 3])) for n, each in enumerate(chosen)]
    logits = torch.randn(sum(block.rows for block in blocks), V, generator=generator).to(dtype)
    found, row = target_probs(logits, blocks), 0
    for block in blocks:
        rows = slice(row, row + block.rows)
        alone = target_probs_of(logits[rows], block.params, block.history)
        assert np.array_equal(found[rows], alone)
        for place, path in enumerate(block.history.paths):
            wanted = next_distribution(logits[row + place].tolist(), block.params, [1, 2], [3, 3, *path])
            assert alone[place] == pytest.approx(wanted, abs=1e-6)
        row += block.rows
    assert found.sum(-1) == pytest.approx(np.ones(len(found)))


@pytest.mark.parametrize("size", [2, 9, 130, 4096])
def test_rows_do_not_depend_on_their_neighbours(size: int, dtype: torch.dtype) -> None:
    """To the last bit, or the same seed would not give the same text in another batch."""
    logits = torch.randn(17, size, generator=torch.Generator().manual_seed(1)).to(dtype) * 3
    for each in (SamplingParams(temperature=0.7), SamplingParams(top_p=0.9, top_k=50), SamplingParams(min_p=0.1)):
        together = target_probs(logits, [RowBlock(each, History([0], 1, [[]])) for _ in range(17)])
        for row in range(17):
            assert np.array_equal(
                target_probs_of(logits[row : row + 1].clone(), each, History([0], 1, [[]]))[0], together[row]
            )


@pytest.mark.parametrize("size", [2, 7, 33, 4096])
def test_the_first_of_equal_logits_is_the_likeliest(size: int, dtype: torch.dtype) -> None:
    logits = torch.randint(0, 3, (50, size), generator=torch.Generator().manual_seed(2)).to(dtype)
    first = [row.index(max(row)) for row in logits.tolist()]
    assert likeliest(logits) == first
    greedy = SamplingParams(temperature=0)
    assert target_probs_of(logits, greedy, History([0], 1, [[]] * 50)).argmax(-1).tolist() == first
    assert likeliest(edit(logits, greedy, History([0], 1, [[]] * 50))) == first


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 5, 32])
def test_rows_that_are_not_made_of_numbers(bad: float, place: int, dtype: torch.dtype) -> None:
    logits = torch.randn(3, 33).to(dtype)
    logits[1, place] = bad
    assert [token is None for token in likeliest(logits)] == [False, True, False]
    logits[1] = -torch.inf
    assert likeliest(logits)[1] is None
    logits[1, 7] = 0.0
    assert likeliest(logits)[1] == 7
    assert likeliest(logits[:0]) == []


@pytest.mark.parametrize(
    ("truncation", "kept"),
    [({"top_k": 2}, 4), ({"top_k": 4}, 4), ({"top_k": 5}, 6), ({"top_p": 0.5}, 4), ({"top_p": 0.98}, 6)],
    ids=str,
)
def test_ties_at_the_border_of_a_truncation_are_all_kept(
    truncation: dict[str, Any], kept: int, dtype: torch.dtype
) -> None:
    """So no order of equal tokens matters; transformers keeps some of them only."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 1.0, -9.0, -9.5]], dtype=dtype)
    found = target_probs_of(logits, SamplingParams(**truncation), History([0], 1, [[]]))[0]
    assert set(np.flatnonzero(found)) == set(np.argsort(-logits[0].numpy(), kind="stable")[:kept])
    assert found.sum() == pytest.approx(1.0)


def test_top_p_compares_sums_as_the_native_library_does() -> None:
    """A ``top_p`` that equals the sum of the first tokens keeps these tokens; a sum minus its last term would round."""
    for seed in range(20):
        logits = torch.randn(1, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        ordered = np.sort(target_probs_of(logits, SamplingParams(), History([0], 1, [[]]))[0])[::-1]
        for kept, top_p in enumerate(np.cumsum(ordered)[:-1].tolist(), 1):
            found = target_probs_of(logits, SamplingParams(top_p=top_p), History([0], 1, [[]]))[0]
            assert np.count_nonzero(found) == kept
