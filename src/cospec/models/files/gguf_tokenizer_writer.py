"""Writes a tokenizer of transformers as the metadata of a GGUF file: the inverse of ``gguf_tokenizer``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gguf import GGUFWriter
from tokenizers import Tokenizer

from cospec.errors import ModelError
from cospec.models.files.gguf_file import GgufFile
from cospec.models.files.gguf_tokenizer import PRE_TOKENIZERS, SPACE, TokenKind, pre_tokenizer, read_tokenizer
from cospec.models.model_folder import read_object

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_PROBES = (
    "It's  1234 naïve\n\n x\tDON'T  _a(b)",
    "don't 12345 ÀÉ 日本 \r\n  foo//bar",
    " cafe\u0301 — 🙂 \u00a0" + "a" * 20 + "\n" * 5,
    "def f(x):\n\n\treturn {'a': 1234567890}  # " + SPACE,
)


def write_tokenizer(writer: GGUFWriter, folder: Path, vocab_size: int) -> None:
    """Write the tokenizer in ``folder``: BPE over bytes, or over characters with single bytes for unknown ones.

    Args:
        vocab_size: rows of the embedding; llama.cpp wants a token for each row.

    Raises:
        ModelError: the tokenizer is of another kind, or has an unknown pre-tokenizer.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = _read(folder / "tokenizer.json")["model"]
    if model.get("type") != "BPE":
        raise ModelError(f"The tokenizer of {folder} is of type {model.get('type')}; allowed in a GGUF file is BPE.")
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    names = {id: token for token, id in vocab.items()}
    merges = [tuple(each.split(" ")) if isinstance(each, str) else tuple(each) for each in model["merges"]]
    tokens = [names.get(id, f"[PAD{id}]") for id in range(max(vocab_size, max(names) + 1))]
    if model.get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(_scores(tokens, merges))
        first = tokenizer.encode("a", add_special_tokens=False).ids[0]
        writer.add_add_space_prefix(names[first].startswith(SPACE))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_pre_of(tokenizer, folder, bool(model.get("ignore_merges"))))
        writer.add_token_merges([" ".join(each) for each in merges])
    writer.add_token_list(tokens)
    writer.add_token_types(_kinds(len(tokens), tokenizer, model))
    _write_special(writer, folder, tokenizer, vocab)


def check_tokenizer(file: GgufFile, folder: Path) -> None:
    """Compare the tokenizer of ``file``, as it is read, with the tokenizer in ``folder`` on a few texts.

    Raises:
        ModelError: the tokens of a text differ.
    """
    wanted, found = Tokenizer.from_file(str(folder / "tokenizer.json")), read_tokenizer(file).tokenizer
    for text in _PROBES:
        ids, read = wanted.encode(text).ids, found.encode(text).ids
        if ids != read or wanted.decode(ids) != found.decode(ids):
            raise ModelError(
                f"The tokenizer of {folder} gives {len(ids)} tokens for {text!r}, and {len(read)} or another text when "
                "read from a GGUF file; allowed are tokenizers that a file holds whole."
            )


def _kinds(count: int, tokenizer: Tokenizer, model: Mapping[str, Any]) -> list[int]:
    """Return the kind of each token; ids without a token are unused."""
    names = {id: token for token, id in tokenizer.get_vocab(with_added_tokens=True).items()}
    found = dict.fromkeys(names, TokenKind.NORMAL)
    for id, token in tokenizer.get_added_tokens_decoder().items():
        found[id] = TokenKind.CONTROL if token.special else TokenKind.USER_DEFINED
    if model.get("byte_fallback"):
        found |= {id: TokenKind.BYTE for id, name in names.items() if _BYTE.fullmatch(name)}
        found |= {id: TokenKind.UNKNOWN for id, name in names.items() if name == model.get("unk_token")}
    return [found.get(id, TokenKind.UNUSED) for id in range(count)]


def _scores(tokens: Sequence[str], merges: Sequence[tuple[str, ...]]) -> list[float]:
    """Return a score per token: tokens of earlier merges score higher, as sentencepiece scores them."""
    ranks = {"".join(merge): -float(rank) for rank, merge in reversed(list(enumerate(merges)))}
    return [ranks.get(token, -float(len(merges))) for token in tokens]


def _write_special(writer: GGUFWriter, folder: Path, tokenizer: Tokenizer, vocab: Mapping[str, int]) -> None:
    """Write the tokens that begin and end texts, and the chat template."""
    settings = _read(folder / "tokenizer_config.json")
    ids = {}
    for name, add in (
        ("bos", writer.add_bos_token_id),
        ("eos", writer.add_eos_token_id),
        ("pad", writer.add_pad_token_id),
        ("unk", writer.add_unk_token_id),
    ):
        token = settings.get(f"{name}_token")
        text = token.get("content") if isinstance(token, dict) else token
        if text in vocab:
            ids[name] = vocab[text]
            add(vocab[text])
    ends = _read(folder / "generation_config.json").get("eos_token_id")
    others = [id for id in (ends if isinstance(ends, list) else [ends]) if id is not None and id != ids.get("eos")]
    for add, id in zip((writer.add_eot_token_id, writer.add_eom_token_id), others, strict=False):
        add(id)
    encoded = tokenizer.encode("a").ids
    writer.add_add_bos_token("bos" in ids and encoded[0] == ids["bos"])
    writer.add_add_eos_token("eos" in ids and encoded[-1] == ids["eos"])
    template = folder / "chat_template.jinja"
    text = template.read_text(encoding="utf-8") if template.exists() else settings.get("chat_template")
    if isinstance(text, str):
        writer.add_chat_template(text)


def _read(path: Path) -> dict[str, Any]:
    """Return a file of the folder, empty where there is none."""
    return read_object(path) if path.exists() else {}


def _pre_of(tokenizer: Tokenizer, folder: Path, whole: bool) -> str:
    """Return the name of the pre-tokenizer that cuts texts as the given one."""
    given = tokenizer.pre_tokenizer
    for name, cut in PRE_TOKENIZERS.items() if given is not None else ():
        own = pre_tokenizer(cut)
        if cut.whole == whole and all(own.pre_tokenize_str(text) == given.pre_tokenize_str(text) for text in _PROBES):
            return name
    raise ModelError(f"The tokenizer of {folder} cuts texts as none of llama.cpp's known pre-tokenizers.")
