"""The bytes that tokens stand for, to compare different tokenizers."""

from __future__ import annotations

import json

from tokenizers import Tokenizer

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
