"""The processors of cospec equal plain functions of prompt and output, and take few operations for each token."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cospec.logits_processors.bitmask import unpack
from cospec.logits_processors.edits import FieldOptions, LogitBias, Penalties
from cospec.logits_processors.masks import BadWords
from cospec.sampling_params import SamplingParams

V = 150
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
PENALTIES = SamplingParams(repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.2)


def logits_of(rows: int, vocab: int = V, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows), dtype=torch.float64).to(dtype)


@given(
    sequences=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5).map(tuple), max_size=12).map(tuple),
    output=st.lists(st.integers(0, 3), max_size=12),
)
def test_bad_words_are_sequences_at_the_end(sequences: tuple[tuple[int, ...], ...], output: list[int]) -> None:
    bad_words = BadWords.build(FieldOptions(), SamplingParams(bad_words_token_ids=sequences))
    state = bad_words.start([0, 1, 2])
    for length in range(len(output) + 1):
        text = tuple(output[:length])
        banned = {last for *before, last in sequences if text[len(text) - len(before) :] == tuple(before)}
        mask = bad_words.mask(state, V)
        found = set[int]() if mask is None else {token for token, allowed in enumerate(unpack(mask, V)) if not allowed}
        assert found == banned
        if length < len(output):
            state = bad_words.advance(state, output[length])


class Token(int):
    """A token that counts its comparisons."""

    compared: ClassVar[int] = 0

    def __eq__(self, other: object) -> bool:
        Token.compared += 1
        return int.__eq__(self, other)

    __hash__ = int.__hash__


def test_a_mask_compares_no_more_tokens_than_a_sequence_has() -> None:
    sequences = tuple(tuple(map(Token, [*range(63), 63 + n])) for n in range(1000))
    bad_words = BadWords.build(FieldOptions(), SamplingParams(bad_words_token_ids=sequences))
    state = bad_words.start(())
    for token in (*range(1, 63), 5, *range(63)):
        state = bad_words.advance(state, Token(token))
    Token.compared = 0
    assert bad_words.mask(state, 2000) is not None
    assert 0 < Token.compared <= 2 * 64  # each look-up compares a prefix with an equal one


def penalised(row: Tensor, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    row, counts, params = row.clone(), Counter(output), PENALTIES
    for token in {*prompt, *output}:
        value = row[token]
        value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value = value - params.frequency_penalty * torch.tensor(counts[token], dtype=row.dtype)
        row[token] = value - params.presence_penalty * torch.tensor(float(token in counts), dtype=row.dtype)
    return row


@settings(max_examples=40, deadline=None)
@given(
    prompt=st.lists(st.integers(0, V - 1), max_size=20),
    output=st.lists(st.integers(0, V - 1), max_size=250),
    dtype=st.sampled_from(DTYPES),
)
def test_penalties_count_each_token_on_every_path(prompt: list[int], output: list[int], dtype: torch.dtype) -> None:
    penalties = Penalties.build(FieldOptions(), PENALTIES)
    state, texts, states = penalties.start(prompt), list[list[int]](), list[Any]()
    for length, token in enumerate(output):
        if length % 20 == 0:  # a row for the text so far, and a row for a draft after the text
            texts += [output[:length], [*output[:length], 7, 7]]
            states += [state, penalties.advance(penalties.advance(state, 7), 7)]
        state = penalties.advance(state, token)
    texts, states = [*texts, output], [*states, state]
    logits = logits_of(len(texts), dtype=dtype)
    expected = torch.stack([penalised(row, prompt, text) for row, text in zip(logits, texts, strict=True)])
    assert torch.equal(penalties.edit(logits.clone(), states), expected)


def test_states_of_drafts_share_the_counts_of_a_long_prompt() -> None:
    prompt = range(50_000)
    penalties = Penalties.build(FieldOptions(), PENALTIES)
    tracemalloc.start()
    try:
        states: list[Any] = [penalties.start(prompt)]
        own, _ = tracemalloc.get_traced_memory()
        states += [penalties.advance(states[0], token) for token in range(500)]
        together, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert together < 2 * own


class Operations(TorchDispatchMode):
    """Counts the operations of torch."""

    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_is_added_to_each_row(dtype: torch.dtype) -> None:
    bias = {token: (token - 40) / 7 for token in range(1, 90, 2)}
    logits = logits_of(4, dtype=dtype)
    expected = logits.clone()
    for token, value in bias.items():
        expected[:, token] = (expected[:, token].to(torch.promote_types(dtype, torch.float32)) + value).to(dtype)
    found = LogitBias.build(FieldOptions(), SamplingParams(logit_bias=bias)).edit(logits.clone(), [None] * 4)
    assert found.dtype == dtype and torch.equal(found, expected)


def test_a_bias_of_many_tokens_takes_as_many_operations_as_a_bias_of_few() -> None:
    counts = []
    for size in (2, 1000):
        biased = LogitBias.build(FieldOptions(), SamplingParams(logit_bias=dict.fromkeys(range(size), 1.0)))
        with Operations() as operations:
            biased.edit(logits_of(3, 1000), [None] * 3)
        counts.append(operations.count)
    assert counts[0] == counts[1]
