"""Writes a tokenizer of transformers as the metadata of a GGUF file: the inverse of ``gguf_tokenizer``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gguf import GGUFWriter
from tokenizers import Tokenizer

from cospec.errors import ModelError
from cospec.models.files.gguf_file import GgufFile
from cospec.models.files.gguf_tokenizer import (
    ENDS,
    NOT_STRIPPING,
    PRE_TOKENIZERS,
    SPACE,
    STRIPPING_MODELS,
    TokenKind,
    pre_tokenizer,
    read_tokenizer,
)
from cospec.models.hf_loading import eos_ids, load_tokenizer
from cospec.models.model_folder import read_object

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
# Texts without a space at their start, which transformers and llama.cpp join differently with the space that
# sentencepiece puts before a text.
_PROBES = (
    "It's  1234 naïve\n\n x\tDON'T  _a(b)",
    "don't 12345 ÀÉ 日本 \r\n  foo//bar",
    "cafe\u0301 — 🙂 \u00a0" + "a" * 20 + "\n" * 5,
    "def f(x):\n\n\treturn {'a': 1234567890}  # " + SPACE,
)


class TokenizerWriter:
    """Writes the tokenizer that ``load_tokenizer`` returns for ``folder``.

    BPE over bytes is written, and BPE over characters with single bytes for unknown ones.

    Args:
        vocab_size: rows of the embedding. llama.cpp wants a token for each row; tokens beyond have none.

    Raises:
        ModelError: the tokenizer is unreadable or of another kind.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder, self._size, self._loaded = folder, vocab_size, load_tokenizer(folder)
        self._tokenizer: Tokenizer = self._loaded.backend_tokenizer
        self._model = json.loads(self._tokenizer.to_str())["model"]
        if self._model["type"] != "BPE":
            raise ModelError(f"The tokenizer of {folder} is of type {self._model['type']}; allowed is BPE.")
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self._ids = {token: id for token, id in vocab.items() if id < vocab_size}
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {id: token for id, token in added.items() if id < vocab_size}
        merges: list[Any] = self._model["merges"]
        self._merges = [tuple(each.split(" ")) if isinstance(each, str) else tuple(each) for each in merges]
        self._bytes = bool(self._model.get("byte_fallback"))

    def write(self, writer: GGUFWriter) -> None:
        """Write the metadata.

        Raises:
            ModelError: llama.cpp knows no such pre-tokenizer, or no such token.
        """
        names = {id: token for token, id in self._ids.items()}
        tokens = [names.get(id, f"[PAD{id}]") for id in range(self._size)]
        if self._bytes:
            writer.add_tokenizer_model("llama")
            writer.add_tokenizer_pre("default")
            writer.add_token_scores(_scores(tokens, self._merges))
            first = self._tokenizer.encode("a", add_special_tokens=False).ids[0]
            writer.add_add_space_prefix(names[first].startswith(SPACE))
        else:
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre(self._pre())
            writer.add_token_merges([" ".join(each) for each in self._merges])
        writer.add_token_list(tokens)
        writer.add_token_types(self._kinds(names))
        self._write_stripping(writer)
        self._write_special(writer)
        self._write_template(writer)

    def check(self, file: GgufFile) -> None:
        """Compare the tokenizer of ``file``, as it is read, on a few texts.

        Raises:
            ModelError: the tokens of a text differ, or tokens that end outputs are missing.
        """
        found = read_tokenizer(file)
        for text in _PROBES:
            ids, read = self._tokenizer.encode(text).ids, found.tokenizer.encode(text).ids
            if ids != read or self._tokenizer.decode(ids) != found.tokenizer.decode(ids):
                raise ModelError(
                    f"The tokenizer of {self._folder} gives {text!r} the tokens {ids}; allowed in a GGUF file are "
                    f"{read}."
                )
        if missing := sorted(self._ends() - set(found.eos_ids)):
            raise ModelError(
                f"The model {self._folder} ends outputs with the tokens {missing} too; allowed in a GGUF file are "
                f"{sorted(found.eos_ids)}."
            )

    def _kinds(self, names: Mapping[int, str]) -> list[int]:
        """Return the kind of each token; ids without a token are unused."""
        found = dict.fromkeys(names, TokenKind.NORMAL)
        for id, token in self._added.items():
            found[id] = TokenKind.CONTROL if token.special else TokenKind.USER_DEFINED
        if self._bytes:
            found |= {id: TokenKind.BYTE for id, name in names.items() if _BYTE.fullmatch(name)}
            found |= {id: TokenKind.UNKNOWN for id, name in names.items() if name == self._model.get("unk_token")}
        return [found.get(id, TokenKind.UNUSED) for id in range(self._size)]

    def _write_stripping(self, writer: GGUFWriter) -> None:
        """Write a model name by which llama.cpp drops white space after added tokens, where the tokenizer does so.

        Raises:
            ModelError: a token drops other white space.
        """
        every = {token.content for token in self._added.values()}
        strips = {token.content for token in self._added.values() if token.rstrip}
        odd = {token.content for token in self._added.values() if token.lstrip or token.single_word}
        if strips == every - set(NOT_STRIPPING) and strips:
            writer.add_name(STRIPPING_MODELS[0])
        else:
            odd |= strips
        if odd:
            raise ModelError(
                f"The tokenizer of {self._folder} has the tokens {', '.join(sorted(odd)[:4])} with lstrip, rstrip or "
                "single_word, which GGUF files cannot hold; allowed are tokens without."
            )

    def _write_special(self, writer: GGUFWriter) -> None:
        """Write the tokens that begin and end texts and outputs."""
        ids = {}
        for name, add in (
            ("bos", writer.add_bos_token_id),
            ("eos", writer.add_eos_token_id),
            ("pad", writer.add_pad_token_id),
            ("unk", writer.add_unk_token_id),
        ):
            token = self._loaded.special_tokens_map.get(f"{name}_token")
            if token in self._ids:
                ids[name] = self._ids[token]
                add(ids[name])
        known = {id for id, token in self._added.items() if token.special and token.content in ENDS}
        others = sorted(self._ends() - known - {ids.get("eos")})
        adders = [writer.add_eot_token_id, writer.add_eom_token_id]
        for add, id in zip(adders if "eos" in ids else [writer.add_eos_token_id, *adders], others, strict=False):
            add(id)  # ``check`` refuses more
        encoded = self._tokenizer.encode("a").ids
        writer.add_add_bos_token("bos" in ids and encoded[0] == ids["bos"])
        writer.add_add_eos_token("eos" in ids and encoded[-1] == ids["eos"])

    def _ends(self) -> set[int]:
        return {id for id in eos_ids(self._folder, self._loaded) if id < self._size}

    def _write_template(self, writer: GGUFWriter) -> None:
        file, settings = self._folder / "chat_template.jinja", self._folder / "tokenizer_config.json"
        if file.exists():
            writer.add_chat_template(file.read_text(encoding="utf-8"))
        elif settings.exists() and (template := read_object(settings).get("chat_template")):
            writer.add_chat_template(template)  # one, or several with names

    def _pre(self) -> str:
        """Return the name of the pre-tokenizer that cuts texts as this one."""
        given, normalizer = self._tokenizer.pre_tokenizer, self._tokenizer.normalizer
        composed = normalizer is not None and normalizer.normalize_str("e\u0301") == "é"
        for name, cut in PRE_TOKENIZERS.items() if given is not None else ():
            same = (cut.whole, cut.composed) == (bool(self._model.get("ignore_merges")), composed)
            own = pre_tokenizer(cut)
            if same and all(own.pre_tokenize_str(text) == given.pre_tokenize_str(text) for text in _PROBES):
                return name
        allowed = ", ".join(PRE_TOKENIZERS)
        raise ModelError(
            f"The tokenizer of {self._folder} has a pre-tokenizer without a name in GGUF files; allowed are {allowed}."
        )


def _scores(tokens: Sequence[str], merges: Sequence[tuple[str, ...]]) -> list[float]:
    """Return a score per token: tokens of earlier merges score higher, as sentencepiece scores them."""
    ranks = {"".join(merge): -float(rank) for rank, merge in reversed(list(enumerate(merges)))}
    return [ranks.get(token, -float(len(merges))) for token in tokens]
