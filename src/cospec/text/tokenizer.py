"""Converts text to tokens and back: bounded prompts, chat templates, the exact bytes of one token."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cospec.errors import InvalidInput, is_text, words
from cospec.text.special_token_escaping import SpecialTokenGuard

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenText(NamedTuple):
    """One token alone.

    Attributes:
        data: its bytes, which may be incomplete characters.
        text: the same as text; incomplete characters become ``bytes:\\xe2\\x96``.
        characters: number of whole characters.
    """

    data: bytes
    text: str
    characters: int


class TextTokenizer:
    """A tokenizer with the checks of prompts.

    Args:
        tokenizer: a Hugging Face tokenizer.
        max_model_len: tokens of one sequence. Longer prompts are refused, very long prompts before tokenization.
        vocab_size: of the model; token ids outside are refused.
    """

    def __init__(self, tokenizer: Any, max_model_len: int, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._token_texts: dict[int, TokenText] = {}  # of the vocabulary; answers may name a token many times

    def encode(self, text: str, add_special_tokens: bool = True, field: str = "prompt") -> tuple[int, ...]:
        """Return the token ids of ``text``.

        Args:
            add_special_tokens: as in vLLM, let the tokenizer add tokens such as the start of the text. The text of a
                special token becomes the token. False does neither, so no text becomes a special token.

        Raises:
            InvalidInput: the text is too long for the context in any case, is no valid text, or the model has no
                tokenizer.
        """
        self._check_text(text, field)
        return self._encode(text, add_special_tokens) if add_special_tokens else self._literal(text)

    def _check_text(self, text: str, field: str) -> None:
        if self._tokenizer is None:
            raise InvalidInput(field, words("text, given to a model without a tokenizer"), "token ids")
        if not is_text(text):
            raise InvalidInput(field, words("holding half a character"), "text of whole Unicode characters")
        limit = self._max_model_len * self._longest
        if len(text) > limit:
            shown = words(f"{len(text)} characters long")
            raise InvalidInput(field, shown, f"at most {self._max_model_len} tokens, the context of the model")

    def _encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        """Return token ids; the text of a special token becomes the token."""
        # With ``verbose`` the tokenizer would warn of prompts that ``check`` refuses.
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False))

    def _literal(self, text: str) -> tuple[int, ...]:
        """Return token ids without special tokens, for any text."""
        ids = self._literal_tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
        return tuple(ids)

    @cached_property
    def _literal_tokenizer(self) -> Any:
        """A second tokenizer: ``split_special_tokens`` changes a tokenizer that other threads use."""
        return copy.deepcopy(self._tokenizer)

    def prepare(self) -> None:
        """Read the vocabulary now; else the first request would wait."""
        if self._tokenizer is not None:
            _ = self._longest, self._bytes_of, self._special

    def check(self, ids: Sequence[int], field: str = "prompt") -> tuple[int, ...]:
        """Return ``ids`` unchanged after a check.

        Raises:
            InvalidInput: an id is outside the vocabulary, or the list is empty or too long for the context.
        """
        if not ids:
            raise InvalidInput(field, words("empty"), "at least one token")
        if len(ids) >= self._max_model_len:
            allowed = f"at most {self._max_model_len - 1} tokens, to leave room for one in the context of the model"
            raise InvalidInput(field, words(f"{len(ids)} tokens long"), allowed)
        self.known(ids, field)
        return tuple(ids)

    def known(self, ids: Sequence[int], field: str) -> Sequence[int]:
        """Return ``ids`` unchanged after a check.

        Raises:
            InvalidInput: an id is outside the vocabulary.
        """
        for id in ids:
            if not 0 <= id < self._vocab_size:
                raise InvalidInput(field, words(f"given with token id {id}"), f"ids from 0 to {self._vocab_size - 1}")
        return ids

    @property
    def template_names(self) -> Names:
        """Return the names that the chat template reads; empty without a template."""
        try:
            return names_read(self._tokenizer.get_chat_template())
        except (AttributeError, ValueError):  # no tokenizer, no template, or several without a default
            return Names()

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> tuple[int, ...]:
        """Return the token ids of a conversation in the tokenizer's chat template.

        Only the template adds special tokens: a special token's text in a message stays text.

        Args:
            add_generation_prompt: end with the opening of an assistant's message.
            continue_final_message: leave the last message open, so that the output continues the message.
            variables: values for the template; names that the template does not read have no effect.

        Raises:
            InvalidInput: the tokenizer has no template, the template refuses the messages, or both flags are set.
        """
        if add_generation_prompt and continue_final_message:
            raise InvalidInput("continue_final_message", True, "true only when add_generation_prompt is false")
        if not getattr(self._tokenizer, "chat_template", None):
            shown = words("given to a model whose tokenizer has no chat template")
            raise InvalidInput("messages", shown, "a prompt without roles, as for /v1/completions")
        guard = SpecialTokenGuard(self._special_texts)
        read = self.template_names.variables
        try:
            text = self._tokenizer.apply_chat_template(
                guard.hide(messages),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **{name: value for name, value in variables.items() if name in read},
            )
        except Exception as error:  # templates are code of the model's authors and may raise anything
            shown = words(f"refused by the chat template ({error})")
            raise InvalidInput("messages", shown, "a conversation that the model's chat template takes") from None
        pieces = guard.split(str(text))
        self._check_text("".join(piece.text for piece in pieces), "messages")
        encoded = (self._literal(piece.text) if piece.literal else self._encode(piece.text, False) for piece in pieces)
        return tuple(chain.from_iterable(encoded))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of ``ids``."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def piece(self, id: int) -> str:
        """Return the token's form in the vocabulary."""
        return str(self._tokenizer.convert_ids_to_tokens(id) or "")

    def token_text(self, id: int) -> TokenText:
        """Return the bytes and the text of a token."""
        found = self._token_texts.get(id)
        if found is None:
            data = self._to_bytes(id)
            found = self._token_texts[id] = TokenText(data, _to_text(data), len(data.decode(errors="ignore")))
        return found

    def _to_bytes(self, id: int) -> bytes:
        piece = self.piece(id)
        if id in self._special:
            return piece.encode()
        if self._bytes_of is not None and all(char in self._bytes_of for char in piece):
            return bytes(self._bytes_of[char] for char in piece)
        match = _BYTE_PIECE.fullmatch(piece)
        return bytes([int(match[1], 16)]) if match else piece.replace("▁", " ").encode()

    def is_special(self, id: int) -> bool:
        """Whether the text omits the token by default."""
        return id in self._special

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(self._tokenizer.all_special_ids)

    @cached_property
    def _special_texts(self) -> tuple[str, ...]:
        return tuple(str(token) for token in self._tokenizer.added_tokens_decoder.values() if token.special)

    @cached_property
    def _longest(self) -> int:
        """Return the most characters of any token."""
        return max(len(piece) for piece in self._tokenizer.get_vocab())

    @cached_property
    def _bytes_of(self) -> dict[str, int] | None:
        """Return byte-level BPE's map from characters to bytes; None for other vocabularies."""
        if not any("Ġ" in piece for piece in self._tokenizer.get_vocab()):
            return None
        plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
        others = [byte for byte in range(256) if byte not in plain]
        return {chr(byte): byte for byte in plain} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


def _to_text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


@dataclass(frozen=True, slots=True)
class Names:
    """The names that a template reads.

    Attributes:
        variables: names that the template does not set.
        keys: attributes and constant strings; each may be the key of a message.
    """

    variables: frozenset[str] = frozenset()
    keys: frozenset[str] = frozenset()


class _Generation(Extension):
    """The block ``{% generation %}`` of transformers, which marks an assistant's tokens."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Parse the content of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=16)
def names_read(source: str) -> Names:
    """Return the names that the template ``source`` reads; empty if ``source`` is no template."""
    environment = ImmutableSandboxedEnvironment(extensions=[_Generation, loopcontrols])
    try:
        tree = environment.parse(source)
        variables = find_undeclared_variables(tree)
    except TemplateError:  # rendering refuses the template with the reason
        return Names()
    keys = {node.attr for node in tree.find_all(nodes.Getattr)}
    keys |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return Names(frozenset(variables), frozenset(keys))
