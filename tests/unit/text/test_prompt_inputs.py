"""What a program may give as prompts and messages, and the error for everything else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cospec.errors import InvalidInput
from cospec.text.prompt_inputs import conversations, each, read, text
from cospec.text.tokenizer import TextTokenizer

TOKENS = TextTokenizer(None, 16, 10)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ([1, 2], [[1, 2]]),
        ((1, 2), [[1, 2]]),
        ([[1, 2], (3,)], [[1, 2], [3]]),
        (np.array([1, 2]), [[1, 2]]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([np.int64(1), np.int64(2)], [[1, 2]]),
        (torch.tensor([1, 2]), [[1, 2]]),
        ([torch.tensor([1]), torch.tensor([2])], [[1], [2]]),
        ({"prompt_token_ids": [1]}, [[1]]),
        ([{"prompt_token_ids": [1]}, [2]], [[1], [2]]),
        (iter(([1], [2])), [[1], [2]]),
        ([], []),
        ([[]], [[]]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_token_ids_of_every_kind(given: Any, prompts: list[list[int]]) -> None:
    found = [read(prompt, TOKENS) for prompt in each(given)]
    assert found == prompts
    assert all(type(id) is int for prompt in found for id in prompt)


@pytest.mark.parametrize(
    "given", [5, None, True, [None], [1.5], [[1.5]], [True], [[True]], [["a"]], [1, "a"], b"ab", {}]
)
def test_wrong_prompts_are_reported(given: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^prompts? is .*"):
        [read(prompt, TOKENS) for prompt in each(given)]


def test_texts_need_a_tokenizer() -> None:
    assert each("ab") == ["ab"]
    assert [text(prompt) for prompt in ("ab", {"prompt": "ab"}, [1])] == ["ab", "ab", None]
    for prompt in ("ab", {"prompt": "ab"}):
        with pytest.raises(InvalidInput, match="prompt is text"):
            read(prompt, TOKENS)
    with pytest.raises(InvalidInput, match="no chat template"):
        TOKENS.chat([{"role": "user", "content": "a"}])


def test_conversations() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    one = [{"role": "developer", "content": "be"}, {"role": "user", "content": parts}]
    plain = [{"role": "system", "content": "be"}, {"role": "user", "content": "ab"}]
    assert conversations(one) == [plain]
    assert conversations([one, one[1:]]) == [plain, plain[1:]]


@pytest.mark.parametrize(
    "given",
    [
        [],
        [[]],
        "hi",
        5,
        {"role": "user", "content": "a"},
        [5],
        [{"content": "a"}],
        [{"role": "wizard", "content": "a"}],
        [{"role": ["user"], "content": "a"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": "user", "content": "a"}, "b"],
    ],
    ids=str,
)
def test_wrong_conversations_are_reported(given: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^messages? is .*"):
        conversations(given)
