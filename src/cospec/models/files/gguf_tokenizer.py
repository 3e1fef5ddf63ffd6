"""The tokenizer of a GGUF model, built from the file's metadata.

GGUF files hold vocabulary, merges or scores, kinds of tokens, and the name of a pre-tokenizer. The pre-tokenizer itself
is code in llama.cpp. The table below has the patterns by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from cospec.errors import ModelError
from cospec.models.files.gguf_config import token_id
from cospec.models.files.gguf_file import GgufFile
from cospec.models.files.gguf_values import GgufValues

SPACE = "▁"
# Tokens that end a turn, see llama.cpp's vocabulary loader. The metadata name few ends.
ENDS = (
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<EOT>",
)  # fmt: skip

# llama.cpp drops white space after added tokens of models with these names. No key of a file says so.
STRIPPING_MODELS, NOT_STRIPPING = ("phi-3", "phi3"), ("<unk>", "<s>", "<|endoftext|>")


class TokenKind(IntEnum):
    """Values of ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut before merges.

    Attributes:
        pattern: the pieces; None for GPT-2's own pattern.
        digits: digits become single pieces first.
        whole: a piece that is a token stays whole, whatever the merges are.
        starts: the tokenizer adds the start of the text unless the file says otherwise.
        composed: characters are composed first (NFC).
    """

    pattern: str | None = None
    digits: bool = False
    whole: bool = False
    starts: bool = False
    composed: bool = False


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDINGS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(numbers: str) -> str:
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_ENDINGS}"


def _cased(contraction: str, numbers: str) -> str:
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{start}{_UPPER}*{_LOWER}+{contraction}|{start}{_UPPER}+{_LOWER}*{contraction}"
        rf"|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDINGS}"
    )


_GPT2, _DIGITS = PreTokenizer(), PreTokenizer(digits=True)
_LLAMA3 = PreTokenizer(_words(r"\p{N}{1,3}"), whole=True, starts=True)
_QWEN2 = PreTokenizer(_words(r"\p{N}"), composed=True)
_GPT4 = PreTokenizer(_words(r"\p{N}{1,3}"))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "default"), _GPT2),
    "olmo": PreTokenizer(composed=True),
    **dict.fromkeys(("smollm", "refact", "starcoder", "command-r"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _GPT4),
    "tekken": PreTokenizer(_cased("", r"\p{N}"), whole=True, starts=True),
    **dict.fromkeys(("gpt-4o", "llama4"), PreTokenizer(_cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"))),
}
"""Pre-tokenizers by the name in ``tokenizer.ggml.pre``."""


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """A tokenizer, with the contents of its configuration files."""

    tokenizer: Tokenizer
    config: Mapping[str, Any]
    chat_template: str | None
    eos_ids: tuple[int, ...]


def read_tokenizer(file: GgufFile) -> GgufTokenizer:
    """Build the tokenizer of a file.

    Raises:
        ModelError: the kind of tokenizer, or the pre-tokenizer, is unknown.
    """
    values = _Vocabulary(file)
    kind = values.text("model", None)
    if kind not in ("gpt2", "llama"):
        raise ModelError(f"The file {file.path} has a tokenizer of type {kind}; allowed are gpt2 and llama.")
    tokenizer = _byte_level(values) if kind == "gpt2" else _sentencepiece(values)
    name = GgufValues(file, "general").text("name", "").lower()
    strips = any(part in name for part in STRIPPING_MODELS)
    for special, chosen in ((True, (TokenKind.UNKNOWN, TokenKind.CONTROL)), (False, (TokenKind.USER_DEFINED,))):
        added = [
            AddedToken(token, normalized=False, special=special, rstrip=strips and token not in NOT_STRIPPING)
            for token in values.of_kind(*chosen)
        ]
        tokenizer.add_special_tokens(added) if special else tokenizer.add_tokens(added)
    starts = PRE_TOKENIZERS[values.pre].starts if kind == "gpt2" else True
    names = {f"{name}_token": values.token(key) for name, key in _SPECIAL.items()}
    _add_ends(tokenizer, values, starts)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": GgufValues(file, file.architecture).integer("context_length", None),
        **{name: token for name, token in names.items() if token is not None},
    }
    template = GgufValues(file, "tokenizer").text("chat_template", None)
    return GgufTokenizer(tokenizer, config, template, values.ends())


_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


class _Vocabulary(GgufValues):
    """The metadata of the tokenizer."""

    def __init__(self, file: GgufFile) -> None:
        super().__init__(file, "tokenizer.ggml")
        self.tokens = self.texts("tokens")
        self.ids = {token: id for id, token in enumerate(self.tokens)}
        self.kinds = self.numbers("token_type", len(self.tokens)) or [TokenKind.NORMAL] * len(self.tokens)

    @property
    def pre(self) -> str:
        name = self.text("pre", "default")
        if name not in PRE_TOKENIZERS:
            allowed = ", ".join(PRE_TOKENIZERS)
            raise ModelError(f"The file {self.file.path} has the pre-tokenizer {name}; allowed are {allowed}.")
        return name

    def merges(self) -> list[tuple[str, str]]:
        """Return the pairs of tokens that are merged, the first pair first."""
        pairs = []
        for merge in self.texts("merges"):
            left, _, right = merge.partition(" ")
            if not {left, right, left + right} <= self.ids.keys():
                raise ModelError(
                    f"The file {self.file.path} has {merge[:40]!r} in tokenizer.ggml.merges; "
                    "allowed are two tokens with a space between, whose union is a token."
                )
            pairs.append((left, right))
        return pairs

    def of_kind(self, *kinds: TokenKind) -> list[str]:
        return [token for token, own in zip(self.tokens, self.kinds, strict=True) if own in kinds]

    def token(self, key: str) -> str | None:
        id = token_id(self.file, key, len(self.tokens))
        return None if id is None else self.tokens[id]

    def ends(self) -> tuple[int, ...]:
        """Return the tokens that end an output."""
        named = [token_id(self.file, key, len(self.tokens)) for key in ("eos", "eot", "eom")]
        control = {token: id for id, token in enumerate(self.tokens) if self.kinds[id] == TokenKind.CONTROL}
        return tuple(sorted({id for id in [*named, *(control.get(text) for text in ENDS)] if id is not None}))


def pre_tokenizer(cut: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    """Return the pre-tokenizer of a byte-level vocabulary."""
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if cut.digits else []
    if cut.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(cut.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.pattern is None))
    return pre_tokenizers.Sequence(steps)


def _byte_level(values: _Vocabulary) -> Tokenizer:
    """Byte-level BPE, as of GPT-2."""
    cut = PRE_TOKENIZERS[values.pre]
    tokenizer = Tokenizer(BPE(vocab=values.ids, merges=values.merges(), ignore_merges=cut.whole))
    tokenizer.pre_tokenizer = pre_tokenizer(cut)
    if cut.composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(values: _Vocabulary) -> Tokenizer:
    """BPE over characters with single bytes for unknown ones, as of sentencepiece."""
    unknown = next(iter(values.of_kind(TokenKind.UNKNOWN)), None)
    model = BPE(vocab=values.ids, merges=_merges(values), fuse_unk=True, byte_fallback=True, unk_token=unknown)
    tokenizer = Tokenizer(model)
    prefix = values.flag("add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    joined = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*joined, decoders.Strip(" ", 1, 0)] if prefix else joined)
    return tokenizer


def _merges(values: _Vocabulary) -> list[tuple[str, str]]:
    """Return the merges of a vocabulary with scores: all pairs that form a token, best score first."""
    given = values.merges()
    if given:
        return given
    scores = values.numbers("scores", len(values.tokens)) or [-float(id) for id in range(len(values.tokens))]
    merged = (TokenKind.NORMAL, TokenKind.USER_DEFINED, TokenKind.UNUSED)
    found = []
    for id, token in enumerate(values.tokens):
        if values.kinds[id] in merged:
            pairs = ((token[:at], token[at:]) for at in range(1, len(token)))
            found += [
                (-scores[id], id, left, right) for left, right in pairs if left in values.ids and right in values.ids
            ]
    return [(left, right) for _, _, left, right in sorted(found, key=lambda pair: pair[:2])]


def _add_ends(tokenizer: Tokenizer, values: _Vocabulary, starts: bool) -> None:
    """Add the tokens that begin and end each text."""
    begin = values.token("bos") if values.flag("add_bos_token", starts) else None
    end = values.token("eos") if values.flag("add_eos_token", False) else None
    ids = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys((begin, end)) if token is not None]
    if ids:
        single = [f"{begin}:0"] * (begin is not None) + ["$A:0"] + [f"{end}:0"] * (end is not None)
        pair = [*single, *(piece.replace(":0", ":1") for piece in single if piece.startswith("$"))]
        pair = [piece.replace("$A:1", "$B:1") for piece in pair]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)
