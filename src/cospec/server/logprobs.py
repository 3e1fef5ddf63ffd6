"""Log-probabilities in the shapes of OpenAI's and vLLM's clients. All functions are pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from cospec.core.stats import TokenLogprobs
from cospec.text.tokenizer import TextTokenizer

LOWEST = -9999.0  # OpenAI's replacement for minus infinity, which JSON lacks


def finite(logprob: float) -> float:
    """Return ``logprob``, or ``LOWEST`` if JSON cannot hold the value."""
    return max(logprob, LOWEST)


def _encoded(value: dict[str, Any]) -> msgspec.Raw:
    """Return a token's part of the JSON. One encoding of all tokens would keep other threads waiting."""
    return msgspec.Raw(msgspec.json.encode(value))


def completion(
    entries: Sequence[TokenLogprobs | None], ids: Sequence[int], offset: int, tokens: TextTokenizer
) -> dict[str, Any]:
    """Return the ``logprobs`` of a completion's choice.

    Args:
        entries: ``[n]``; None for the first prompt token, which has no prefix.
        ids: ``[n]``, the token ids.
        offset: characters of the choice's earlier tokens.
    """
    texts = [tokens.token_text(id) for id in ids]
    offsets = []
    for each in texts:
        offsets.append(offset)
        offset += each.characters
    return {
        "tokens": [each.text for each in texts],
        "token_logprobs": [entry and finite(entry.logprob) for entry in entries],
        "top_logprobs": [entry and _encoded(_by_text(entry, tokens)) for entry in entries],
        "text_offset": offsets,
    }


def _by_text(entry: TokenLogprobs, tokens: TextTokenizer) -> dict[str, float]:
    """Map texts to log-probabilities: the likeliest tokens and the sampled token. Of equal texts the likelier stays."""
    found: dict[str, float] = {}
    for id, logprob in (*entry.top, (entry.token, entry.logprob)):
        found.setdefault(tokens.token_text(id).text, finite(logprob))
    return found


def chat(entries: Sequence[TokenLogprobs], top: int, tokens: TextTokenizer) -> dict[str, Any]:
    """Return the ``logprobs`` of a chat completion's choice, with ``top`` alternatives per token."""

    def one(id: int, logprob: float) -> dict[str, Any]:
        token = tokens.token_text(id)
        return {"token": token.text, "logprob": finite(logprob), "bytes": list(token.data)}

    def row(entry: TokenLogprobs) -> msgspec.Raw:
        others = [one(id, logprob) for id, logprob in entry.top[:top]]
        return _encoded(one(entry.token, entry.logprob) | {"top_logprobs": others})

    return {"content": [row(entry) for entry in entries], "refusal": None}


def prompt(entries: Sequence[TokenLogprobs | None], tokens: TextTokenizer) -> list[msgspec.Raw | None]:
    """Return vLLM's ``prompt_logprobs``: per position, token id to log-probability, rank and text."""
    found: list[msgspec.Raw | None] = []
    for entry in entries:
        if entry is None:
            found.append(None)
            continue
        ranked = {id: (logprob, rank) for rank, (id, logprob) in enumerate(entry.top, start=1)}
        ranked[entry.token] = (entry.logprob, entry.rank)
        row = {
            str(id): {"logprob": finite(logprob), "rank": rank, "decoded_token": tokens.token_text(id).text}
            for id, (logprob, rank) in ranked.items()
        }
        found.append(_encoded(row))
    return found
