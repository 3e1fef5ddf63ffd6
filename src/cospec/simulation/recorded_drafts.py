"""Recorded drafts: what each drafter proposes after every token of some greedy outputs. Needs no torch.

A greedy output is the same with and without drafts, so a drafter meets the recorded prefixes and no others. The
simulator replays the drafts without a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cospec.errors import InvalidInput, reason, words

VERSION = 1  # of the file; a change to any array changes the number
Floats = npt.NDArray[np.floating]
Ints = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request.

    Attributes:
        first: the position of the first output token in ``Recording.tokens``.
        start: the place of the first prompt token in ``Recording.known``.
    """

    domain: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    first: int
    start: int


@dataclass(frozen=True, slots=True)
class Recording:
    """Requests, and what each of ``M`` drafters proposes at each of ``P`` positions, one per output token.

    Attributes:
        names: ``[M]``, of the drafters.
        vocab_size: of the target.
        tokens, confidence: ``[M, P, K]``, the greedy chain of ``K`` tokens from the committed tokens before a position.
            ``confidence`` is the probability of each token after the tokens before, at temperature 1.
        second, second_confidence: ``[M, P]``, the drafter's second choice at the position, and its probability.
        known: ``[M, T]``, the drafter's probability of each prompt and output token; 0 for first tokens.
    """

    names: tuple[str, ...]
    vocab_size: int
    requests: tuple[RecordedRequest, ...]
    tokens: Ints
    confidence: Floats
    second: Ints
    second_confidence: Floats
    known: Floats

    @property
    def depth(self) -> int:
        """Tokens of a recorded chain."""
        return int(self.tokens.shape[2])

    @property
    def domains(self) -> tuple[str, ...]:
        """The names of the domains."""
        return tuple(dict.fromkeys(request.domain for request in self.requests))

    def member(self, name: str) -> int:
        """Return the number of a drafter.

        Raises:
            InvalidInput: the recording has no such drafter.
        """
        if name not in self.names:
            raise InvalidInput("members.name", name, f"one of {', '.join(self.names)}, or ngram")
        return self.names.index(name)

    def of_domain(self, name: str) -> tuple[int, ...]:
        """Return the numbers of a domain's requests; of all requests for ``all``.

        Raises:
            InvalidInput: the recording has no such domain.
        """
        found = tuple(n for n, request in enumerate(self.requests) if name in (request.domain, "all"))
        if not found:
            raise InvalidInput("domains.name", name, f"one of {', '.join(self.domains)}, or all")
        return found

    def save(self, path: Path) -> None:
        """Write a compressed file; probabilities keep 11 bits."""
        small = np.uint16 if self.vocab_size <= 1 << 16 else np.int32
        arrays: dict[str, Any] = {
            "version": np.array(VERSION),
            "names": np.array(self.names),
            "vocab_size": np.array(self.vocab_size),
            "domains": np.array([request.domain for request in self.requests]),
            "lengths": np.array([(len(each.prompt), len(each.output)) for each in self.requests], np.int32),
            "text": np.array([token for each in self.requests for token in each.prompt + each.output], small),
            "tokens": self.tokens.astype(small),
            "confidence": self.confidence.astype(np.float16),
            "second": self.second.astype(small),
            "second_confidence": self.second_confidence.astype(np.float16),
            "known": self.known.astype(np.float16),
        }
        with path.open("wb") as file:  # ``savez`` appends a suffix to a name
            np.savez_compressed(file, **arrays)


@lru_cache(4)
def read_recording(path: Path) -> Recording:
    """Read a file of ``Recording.save``.

    Raises:
        InvalidInput: the file is unreadable, or has another version.
    """
    try:
        with np.load(path, allow_pickle=False) as found:
            if int(found["version"]) != VERSION:
                raise ValueError(f"version {int(found['version'])}")
            requests = requests_of(found["domains"].tolist(), found["lengths"].tolist(), found["text"].tolist())
            names, vocab_size = tuple(found["names"].tolist()), int(found["vocab_size"])
            tokens, second = (found[name].astype(np.int64) for name in ("tokens", "second"))
            floats = (found[name].astype(np.float64) for name in ("confidence", "second_confidence", "known"))
            confidence, second_confidence, known = floats
    except (OSError, ValueError, KeyError, TypeError) as error:
        allowed = f"a file of cospec bench record, version {VERSION}"
        raise InvalidInput("recording", words(f"{path} ({reason(error)})"), allowed) from None
    return Recording(names, vocab_size, requests, tokens, confidence, second, second_confidence, known)


def requests_of(
    domains: Sequence[str], lengths: Sequence[Sequence[int]], text: Sequence[int]
) -> tuple[RecordedRequest, ...]:
    """Return the requests of ``text``, which holds the prompt and the output of each request in order.

    Args:
        lengths: ``[R][2]``, tokens of prompt and output.
    """
    found, first, start = list[RecordedRequest](), 0, 0
    for domain, (prompt, output) in zip(domains, lengths, strict=True):
        middle, end = start + prompt, start + prompt + output
        found.append(RecordedRequest(domain, tuple(text[start:middle]), tuple(text[middle:end]), first, start))
        first, start = first + output, end
    return tuple(found)
