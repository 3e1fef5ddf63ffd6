"""Tokens are counted by one tokenizer, wherever the network cut the text."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cospec.bench.request_record import Chunk, Prompt, Timing
from cospec.bench.token_counter import TokenCounter, pieces, spread

TEXT = "one two  three, fünf — six"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, with a merge for ``on``, ``one`` and a space before ``t``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: id for id, char in enumerate([*alphabet, "on", "one", "Ġt"])}
    made = Tokenizer(models.BPE(vocab, [("o", "n"), ("on", "e"), ("Ġ", "t")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def timing(texts: list[str], reported: int | None = None) -> Timing:
    chunks = tuple(Chunk(0.1 * number, text) for number, text in enumerate(texts))
    return Timing(id="r", arrival=0, sent=0, end=1, chunks=chunks, reported_tokens=reported)


def test_the_count_does_not_depend_on_the_cuts(tokenizer: PreTrainedTokenizerFast) -> None:
    counter, shuffler = TokenCounter(tokenizer), random.Random(0)
    whole = len(tokenizer(TEXT, add_special_tokens=False).input_ids)
    for _ in range(50):
        cuts = sorted(shuffler.sample(range(1, len(TEXT)), shuffler.randint(0, 8)))
        texts = [TEXT[a:b] for a, b in zip([0, *cuts], [*cuts, len(TEXT)], strict=True)]
        (counted,) = counter.count([Prompt("r", "one")], [timing(texts)])
        assert counted.output_tokens == whole
        assert counted.text == TEXT and counted.prompt_tokens == 1


def test_a_token_belongs_to_the_chunk_in_which_it_begins(tokenizer: PreTrainedTokenizerFast) -> None:
    (counted,) = TokenCounter(tokenizer).count([Prompt("r", "x")], [timing(["o", "n", "ex"])])
    assert [chunk.tokens for chunk in counted.chunks] == [1, 0, 1]


def test_without_a_tokenizer_the_reported_number_is_spread() -> None:
    counter = TokenCounter(None)
    (counted,) = counter.count([Prompt("r", "x")], [timing(["abcd", "ef", "gh"], reported=6)])
    assert [chunk.tokens for chunk in counted.chunks] == [3, 1, 2]
    assert "reported" in counter.method


def test_pieces_and_spread() -> None:
    assert pieces([0, 1, 4, 5, 9], [5, 0, 4]) == [3, 0, 2]
    assert spread(7, [0, 0]) == [0, 7] and spread(3, []) == []
    assert sum(spread(10, [3, 3, 3])) == 10
