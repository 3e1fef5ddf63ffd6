from __future__ import annotations

import json
import lzma
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from cospec.errors import InvalidInput, ModelError
from cospec.training.corpus import Corpus, encode, end_token, read_domain, split


def test_the_parts_of_a_split_share_nothing_and_hold_everything() -> None:
    documents = [f"document {n}" for n in range(203)]
    train, heldout = split(documents, 0.02)
    assert set(train).isdisjoint(heldout)
    assert sorted(train + heldout) == sorted(documents)
    assert len(heldout) == 4


def test_windows_depend_on_their_seed_alone(corpus: Corpus) -> None:
    weights = {"prose": 0.5, "math": 0.5}
    first = corpus.windows(weights, 6, 24, (1, 0, 7))
    assert first.shape == (6, 25)
    assert np.array_equal(first, corpus.windows(weights, 6, 24, (1, 0, 7)))
    assert not np.array_equal(first, corpus.windows(weights, 6, 24, (1, 0, 8)))


def test_a_domain_without_weight_is_never_drawn(corpus: Corpus, tokenizer: Tokenizer) -> None:
    windows = corpus.windows({"math": 1.0, "prose": 0.0}, 40, 16, (0,))
    text = tokenizer.decode(windows.flatten().tolist())
    assert "Question" in text and "fox" not in text and "def" not in text


def test_documents_end_with_the_end_token(tokenizer: Tokenizer) -> None:
    stream = encode(tokenizer, ["one", "two three"])
    assert stream.dtype == np.uint16
    assert (stream == end_token(tokenizer)).sum() == 2 and stream[-1] == end_token(tokenizer)


def test_domains_are_read_from_their_files(tmp_path: Path) -> None:
    with lzma.open(tmp_path / "prose.txt.xz", "wt", encoding="utf-8") as file:
        file.write("A book.\n\nIts end.<|endoftext|>Another.")
    with lzma.open(tmp_path / "math.jsonl.xz", "wt", encoding="utf-8") as file:
        # A line separator inside a string is text: only line feeds end a row.
        file.write(json.dumps({"question": "1\u2028+ 1?", "answer": "2"}, ensure_ascii=False) + "\n")
    assert read_domain("prose", tmp_path) == ["A book.\n\nIts end.", "Another."]
    assert read_domain("math", tmp_path) == ["Question: 1\u2028+ 1?\nAnswer: 2"]


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"prose\.txt\.xz"):
        read_domain("prose", tmp_path)
    (tmp_path / "math.jsonl.xz").write_bytes(b"not compressed")
    with pytest.raises(InvalidInput, match=r"math\.jsonl\.xz"):
        read_domain("math", tmp_path)
    with pytest.raises(ModelError, match="tokenised corpus"):
        Corpus.load(tmp_path)
