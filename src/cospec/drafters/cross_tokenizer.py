"""Draft with another tokenizer than the target's, over the tokens that both spell alike.

A drafter's logits become rows over the target's ids: shared tokens keep their logits, others get minus infinity.
Penalties, temperature, truncation and sampling follow in the target's ids, so q is exact by construction. Committed
tokens are read as text, which the drafter's tokenizer splits differently. New text may merge the last tokens into a
longer token. So the last words are tokenized again with new text, and the drafter feeds again from the first change.

Token healing: the end of a text may lie inside a token of the drafter. After ``un`` the drafter expects less of
``able`` than it gave ``unable`` before. So the last token is dropped and predicted again. Every drafter token that
starts with the dropped token's text contributes its probability to the target token that spells the remainder. The
dropped token itself contributes its next-token distribution.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer
from torch import Tensor

from cospec.core.types import DraftContext
from cospec.errors import InvalidInput, words

WINDOW = 8  # tokens at the end of a text that are tokenized again, extended to the next space
FURTHEST = 64  # upper bound of these tokens, in text without spaces


class SharedVocab:
    """The drafter's tokens are the target's. Implements ``interfaces.VocabMapping``, as ``MappedVocab`` does."""

    same = True
    rows = 1

    def tokens(self, context: DraftContext) -> tuple[Sequence[int], int] | None:
        """Return the tokens unchanged."""
        return context.tokens, len(context.tokens)

    def stable_len(self, context: DraftContext) -> int:
        """Return the number of all tokens."""
        return len(context.tokens)

    def map_logits(self, texts: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
        """Return the logits unchanged."""
        return logits

    def to_own(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens unchanged."""
        return tuple(tokens)

    def to_target(self, logits: Tensor) -> Tensor:
        """Return the logits unchanged."""
        return logits

    def free(self, ids: Sequence[str]) -> None:
        """Do nothing: the mapping has no state."""


@dataclass(slots=True)
class _TranslatedSequence:
    """One sequence in the drafter's tokens.

    Attributes:
        own: the drafter's tokens; tokens before ``floor`` are final.
        count: number of target tokens that were read.
        pending: bytes of incomplete characters.
        reported: ``count`` and ``len(own)`` at the last ``read``.
        stable: leading tokens of ``own`` unchanged since.
    """

    own: list[int]
    floor: int
    count: int = 0
    pending: bytes = b""
    reported: tuple[int, int] = (0, 0)
    stable: int = field(default=0)


class MappedVocab:
    """Two tokenizers joined by the tokens that they spell alike.

    Args:
        target, own: the target's tokenizer and the drafter's.
        target_size, own_size: columns of their models' logits.

    Raises:
        InvalidInput: they share no token.
    """

    same = False
    rows = 2

    def __init__(self, target: Tokenizer, own: Tokenizer, target_size: int, own_size: int) -> None:
        self._tokenizer, self._target_size = own, target_size
        self._spelled, self._theirs = token_bytes(own), token_bytes(target)
        ids: dict[TokenBytes, int] = {}
        for id, word in sorted(self._spelled.items(), reverse=True):
            if id < own_size and word:
                ids[word] = id
        self._own_of: dict[int, int] = {}
        for id, word in sorted(self._theirs.items()):
            if id < target_size and word in ids:
                self._own_of[id] = ids.pop(word)  # only once: two ids of one spelling would use its probability twice
        if not self._own_of:
            given = words("a drafter none of whose tokens is one of the target's")
            raise InvalidInput("speculative_config.model", given, "a drafter that shares some tokens with the target")
        self._columns = (torch.tensor(list(self._own_of)), torch.tensor(list(self._own_of.values())))
        begun = own.encode("").ids
        self._begin = begun if len(begun) == 1 else []
        self._readings: dict[str, _TranslatedSequence] = {}
        texts = ((word, id) for id, word in self._spelled.items() if isinstance(word, bytes) and word and id < own_size)
        self._sorted = sorted(texts)
        self._by_word = {self._theirs[id]: id for id in self._own_of}
        self._longer: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def shared(self) -> dict[int, int]:
        """Return the drafter's id by target id."""
        return self._own_of

    def tokens(self, context: DraftContext) -> tuple[Sequence[int], int] | None:
        """Read new committed tokens; see ``VocabMapping``. Assumed tokens are not read, because they may be
        rejected."""
        if context.assumed:
            return None
        sequence = self._readings.get(context.id)
        if sequence is None:
            sequence = self._readings[context.id] = _TranslatedSequence(list(self._begin), len(self._begin))
        for token in context.tokens[sequence.count :]:
            word = self._theirs.get(token, b"")
            if isinstance(word, bytes):
                sequence.pending += word
            else:
                self._retokenize(sequence, whole=True)
                self._replace_tail(sequence, len(sequence.own), [self._own_of[token]] if token in self._own_of else [])
                sequence.floor = len(sequence.own)
        sequence.count = len(context.tokens)
        self._retokenize(sequence)
        if sequence.pending or not sequence.own:
            return None
        return sequence.own, self._matching_prefix(sequence, context.tokens)

    def stable_len(self, context: DraftContext) -> int:
        """Return the tokens up to the last special token: later text may still be tokenized differently."""
        return self._readings[context.id].floor

    def map_logits(self, texts: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
        """Heal the end of each text: two rows of ``logits`` become one, where there are two."""
        healed, first = [], 0
        for text in texts:
            rows = logits[first : first + min(self.rows, len(text))]
            first += len(rows)
            healed.append(self._healed(text[-1], *rows) if len(rows) == self.rows else self.to_target(rows)[0])
        return torch.stack(healed)

    def _healed(self, last: int, before: Tensor, after: Tensor) -> Tensor:
        """Return the logits after ``last``, ``[V]``, from the rows before ``last`` and after it."""
        longer, rests = self._extensions(last)
        if not len(longer):
            return self.to_target(after[None])[0]
        p = torch.softmax(before.double(), -1)
        found = p[last] * torch.softmax(self.to_target(after.double()[None])[0], -1)
        found.index_add_(0, rests.to(found.device), p[longer.to(p.device)])
        return found.log().to(after.dtype)

    def _extensions(self, last: int) -> tuple[Tensor, Tensor]:
        """Return the drafter's tokens that start with ``last``'s text, and the target's tokens of the remainders."""
        if last not in self._longer:
            start, pairs = self._bytes(last), []
            at = bisect_right(self._sorted, (start, self._target_size + len(self._spelled)))
            while start and at < len(self._sorted) and self._sorted[at][0].startswith(start):
                word, id = self._sorted[at]
                rest = self._by_word.get(word[len(start) :])
                if rest is not None and word != start:
                    pairs.append((id, rest))
                at += 1
            self._longer[last] = torch.tensor([p[0] for p in pairs]), torch.tensor([p[1] for p in pairs])
        return self._longer[last]

    def to_own(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """See ``VocabMapping``."""
        return tuple(self._own_of[token] for token in tokens)

    def to_target(self, logits: Tensor) -> Tensor:
        """See ``VocabMapping``."""
        theirs, own = (column.to(logits.device) for column in self._columns)
        result = logits.new_full((len(logits), self._target_size), -torch.inf)
        result[:, theirs] = logits[:, own]
        return result

    def free(self, ids: Sequence[str]) -> None:
        """See ``VocabMapping``."""
        for id in ids:
            self._readings.pop(id, None)

    def _matching_prefix(self, sequence: _TranslatedSequence, tokens: Sequence[int]) -> int:
        count, known = sequence.reported
        agreed = min(sequence.stable, known)
        if agreed == known:
            for token in tokens[count:]:
                if agreed == len(sequence.own) or self._own_of.get(token) != sequence.own[agreed]:
                    break
                agreed += 1
        sequence.reported, sequence.stable = (len(tokens), len(sequence.own)), len(sequence.own)
        return agreed

    def _retokenize(self, sequence: _TranslatedSequence, whole: bool = False) -> None:
        """Tokenize the pending text with the last words before it; an incomplete character waits."""
        if not sequence.pending:
            return
        start = self._boundary(sequence)
        text = _decoded(self._text(sequence, start) + sequence.pending, whole)
        if text is None:
            return
        ids = self._encoded(text)
        if ids is None:  # a tokenizer that treats the start of a text differently
            start = sequence.floor
            text = _decoded(self._text(sequence, start) + sequence.pending, whole=True) or ""
            ids = self._encoded(text) or self._tokenizer.encode(text, add_special_tokens=False).ids
        self._replace_tail(sequence, start, ids)
        sequence.pending = b""

    def _replace_tail(self, sequence: _TranslatedSequence, start: int, ids: Sequence[int]) -> None:
        """Replace ``own[start:]`` by ``ids``."""
        before = sequence.own[start:]
        same = next(
            (n for n, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b), min(len(before), len(ids))
        )
        if same < len(before):
            sequence.stable = min(sequence.stable, start + same)
        sequence.own[start:] = ids

    def _boundary(self, sequence: _TranslatedSequence) -> int:
        """Return the start of the text to tokenize again: a space, so that tokens before it stay."""
        least = max(sequence.floor, len(sequence.own) - FURTHEST)
        start = max(sequence.floor, len(sequence.own) - WINDOW)
        while start > least and not self._bytes(sequence.own[start]).startswith((b" ", b"\n")):
            start -= 1
        return start

    def _encoded(self, text: str) -> list[int] | None:
        """Return the drafter's tokens of ``text``; None if they do not spell the text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        spelled = b"".join(map(self._bytes, ids))
        if spelled == b" " + text.encode() and self._bytes(ids[0]) == b" ":
            return ids[1:]  # a space that the tokenizer puts before every text
        return ids if spelled == text.encode() else None

    def _text(self, sequence: _TranslatedSequence, start: int) -> bytes:
        return b"".join(map(self._bytes, sequence.own[start:]))

    def _bytes(self, id: int) -> bytes:
        word = self._spelled.get(id, b"")
        return word if isinstance(word, bytes) else b""


def _decoded(data: bytes, whole: bool) -> str | None:
    """Decode UTF-8; None while the last character is incomplete, unless ``whole``."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        unfinished = error.reason == "unexpected end of data"
        return None if unfinished and not whole else data.decode(errors="replace")


TokenBytes = bytes | str
"""The spelling of a token: bytes for text, a string for a special token."""


def token_bytes(tokenizer: Tokenizer) -> dict[int, TokenBytes]:
    """Return the spelling of each id; special tokens keep their names."""
    added = tokenizer.get_added_tokens_decoder()
    described = json.loads(tokenizer.to_str())
    byte_level = '"ByteLevel"' in json.dumps([described["decoder"], described["pre_tokenizer"]])
    read = _byte_level if byte_level else _plain
    result: dict[int, TokenBytes] = {}
    for text, id in tokenizer.get_vocab().items():
        if id in added:
            result[id] = text if added[id].special else text.encode()
        else:
            result[id] = read(text)
    return result


def _byte_level(text: str) -> bytes:
    """Decode GPT-2's alphabet: a printable character for every byte."""
    return bytes(_BYTES[char] for char in text) if all(char in _BYTES for char in text) else text.encode()


def _plain(text: str) -> bytes:
    """Decode SentencePiece's spelling: a mark for spaces, and bytes by number."""
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes([int(text[3:5], 16)])
    return text.replace("\u2581", " ").encode()


def _alphabet() -> dict[str, int]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _alphabet()
