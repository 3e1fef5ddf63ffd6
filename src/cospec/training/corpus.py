"""Text by domain, tokenised once into flat arrays, from which training loops sample windows.

Domains and their sources (all under one data folder, except code):

* ``prose``: ``prose.txt.xz``, books separated by ``<|endoftext|>``;
* ``math``: ``math.jsonl.xz``, lines of ``{"question", "answer"}``;
* ``code``: the sources of the Python standard library that runs this program, without its tests.

The last ``holdout`` share of each domain's documents is excluded from training and serves for the card's losses.
"""

from __future__ import annotations

import json
import lzma
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from cospec.errors import InvalidInput, ModelError

END = "<|endoftext|>"
DOMAINS = ("prose", "math", "code")
_PARTS = ("train", "heldout")
_SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__", "idle_test", "pydoc_data"}


def read_domain(domain: str, data: Path) -> list[str]:
    """Return the documents of one domain in a fixed order.

    Raises:
        InvalidInput: the domain's file is missing from ``data``.
    """
    if domain == "prose":
        books = _unpack(data, "prose.txt.xz").split(END)
        return [chapter for book in books for chapter in _chapters(book.strip())]
    if domain == "math":
        rows = [json.loads(line) for line in _unpack(data, "math.jsonl.xz").split("\n") if line.strip()]
        return [f"Question: {row['question']}\nAnswer: {row['answer']}" for row in rows]
    if domain == "code":
        return list(_standard_library())
    raise ValueError(f"domain {domain!r} is unknown; allowed are {', '.join(DOMAINS)}")


def _unpack(data: Path, name: str) -> str:
    try:
        with lzma.open(data / name, "rt", encoding="utf-8") as file:
            return file.read()
    except (OSError, lzma.LZMAError):
        raise InvalidInput("data", str(data), f"a folder with a readable {name}") from None


def _chapters(book: str, size: int = 40_000) -> Iterator[str]:
    """Split a book at paragraph ends into pieces of about ``size`` characters, for a fair held-out part."""
    start = 0
    while start < len(book):
        end = book.find("\n\n", start + size)
        end = len(book) if end < 0 else end
        yield book[start:end].strip()
        start = end


def _standard_library() -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts[:-1]):
            text = path.read_text(encoding="utf-8", errors="ignore").strip()
            if text:
                yield text


def split(documents: Sequence[str], holdout: float) -> tuple[list[str], list[str]]:
    """Hold out every n-th document, so that both parts contain every book, author and package."""
    every = max(2, round(1 / holdout))
    kept = [text for i, text in enumerate(documents) if i % every != every - 1]
    return kept, [text for i, text in enumerate(documents) if i % every == every - 1]


@dataclass(frozen=True)
class Corpus:
    """Token streams per domain, ``uint16 [tokens]``, documents separated by the end token."""

    train: dict[str, np.ndarray]
    heldout: dict[str, np.ndarray]

    @classmethod
    def build(cls, tokenizer: Tokenizer, data: Path, cache: Path, holdout: float = 0.02) -> Corpus:
        """Tokenise every domain, or load the files of an earlier call from ``cache``."""
        cache.mkdir(parents=True, exist_ok=True)
        for domain in DOMAINS:
            if not (cache / f"{domain}.heldout.npy").exists():
                for part, texts in zip(_PARTS, split(read_domain(domain, data), holdout), strict=True):
                    save_array(cache / f"{domain}.{part}.npy", encode(tokenizer, texts))
        return cls.load(cache)

    @classmethod
    def load(cls, cache: Path) -> Corpus:
        """Load the files that ``build`` wrote into ``cache``.

        Raises:
            ModelError: ``cache`` has no tokenised corpus.
        """
        try:
            parts = ({d: np.load(cache / f"{d}.{part}.npy", mmap_mode="r") for d in DOMAINS} for part in _PARTS)
            return cls(*parts)
        except FileNotFoundError:
            raise ModelError(
                f"{cache} holds no tokenised corpus; allowed is a folder of `cospec train tokenizer`."
            ) from None

    def windows(self, weights: dict[str, float], rows: int, length: int, seed: tuple[int, ...]) -> np.ndarray:
        """Draw ``int64 [rows, length + 1]`` windows by domain weight; the ``seed`` determines the windows."""
        generator = np.random.default_rng(seed)
        names = [name for name in self.train if weights.get(name, 0) > 0]
        share = np.array([weights[name] for name in names])
        chosen = generator.choice(len(names), size=rows, p=share / share.sum())
        return np.stack([_window(self.train[names[i]], length, generator) for i in chosen])


def _window(stream: np.ndarray, length: int, generator: np.random.Generator) -> np.ndarray:
    start = int(generator.integers(0, len(stream) - length - 1))
    return stream[start : start + length + 1].astype(np.int64)


def save_array(path: Path, array: np.ndarray) -> None:
    """Write an ``.npy`` file atomically: an interruption leaves the old or the new file."""
    with path.with_suffix(".new").open("wb") as file:
        np.save(file, array)
    path.with_suffix(".new").replace(path)


def end_token(tokenizer: Tokenizer) -> int:
    """Return the token between documents.

    Raises:
        ModelError: the tokenizer has no such token, so ``cospec train`` did not make the tokenizer.
    """
    end = tokenizer.token_to_id(END)
    if end is None:
        raise ModelError(f"the tokenizer has no token {END}; allowed is a tokenizer of `cospec train tokenizer`.")
    return int(end)


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> np.ndarray:
    """Encode documents into one flat ``uint16`` stream, with the end token after each."""
    end = end_token(tokenizer)
    pieces = [[*encoded.ids, end] for encoded in tokenizer.encode_batch(list(texts))]
    return np.concatenate([np.asarray(piece, dtype=np.uint16) for piece in pieces])
