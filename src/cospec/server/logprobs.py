"""Log-probabilities in the shapes of OpenAI's and vLLM's clients. All functions are pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cospec.core.stats import TokenLogprobs
from cospec.text.tokenizer import TextTokenizer

LOWEST = -9999.0  # OpenAI's replacement for minus infinity, which JSON lacks


def finite(logprob: float) -> float:
    """Return ``logprob``, or ``LOWEST`` if JSON cannot hold the value."""
    return max(logprob, LOWEST)


def characters(id: int, tokens: TextTokenizer) -> int:
    """Return the number of whole characters of a token."""
    return len(tokens.to_bytes(id).decode(errors="ignore"))


def completion(
    entries: Sequence[TokenLogprobs | None], ids: Sequence[int], offset: int, tokens: TextTokenizer
) -> dict[str, Any]:
    """Return the ``logprobs`` of a completion's choice.

    Args:
        entries: ``[n]``; None for the first prompt token, which has no prefix.
        ids: ``[n]``, the token ids.
        offset: characters of the choice's earlier tokens.
    """
    texts = [tokens.to_text(id) for id in ids]
    offsets = []
    for id in ids:
        offsets.append(offset)
        offset += characters(id, tokens)
    return {
        "tokens": texts,
        "token_logprobs": [entry and finite(entry.logprob) for entry in entries],
        "top_logprobs": [entry and _by_text(entry, tokens) for entry in entries],
        "text_offset": offsets,
    }


def _by_text(entry: TokenLogprobs, tokens: TextTokenizer) -> dict[str, float]:
    """Map texts to log-probabilities: the likeliest tokens and the sampled token. Of equal texts the likelier stays."""
    found: dict[str, float] = {}
    for id, logprob in (*entry.top, (entry.token, entry.logprob)):
        found.setdefault(tokens.to_text(id), finite(logprob))
    return found


def chat(entries: Sequence[TokenLogprobs], top: int, tokens: TextTokenizer) -> dict[str, Any]:
    """Return the ``logprobs`` of a chat completion's choice, with ``top`` alternatives per token."""

    def one(id: int, logprob: float) -> dict[str, Any]:
        data = tokens.to_bytes(id)
        return {"token": tokens.to_text(id), "logprob": finite(logprob), "bytes": list(data)}

    content = [
        one(entry.token, entry.logprob) | {"top_logprobs": [one(id, logprob) for id, logprob in entry.top[:top]]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def prompt(entries: Sequence[TokenLogprobs | None], tokens: TextTokenizer) -> list[dict[str, Any] | None]:
    """Return vLLM's ``prompt_logprobs``: per position, token id to log-probability, rank and text."""
    found: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry is None:
            found.append(None)
            continue
        ranked = {id: (logprob, rank) for rank, (id, logprob) in enumerate(entry.top, start=1)}
        ranked[entry.token] = (entry.logprob, entry.rank)
        found.append(
            {
                str(id): {"logprob": finite(logprob), "rank": rank, "decoded_token": tokens.to_text(id)}
                for id, (logprob, rank) in ranked.items()
            }
        )
    return found
