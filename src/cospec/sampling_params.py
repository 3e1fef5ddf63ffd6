"""Sampling parameters of a request, in vLLM's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from cospec.errors import InvalidInput, is_text

MAX_LOGPROBS = 20
GREEDY_BELOW = 1e-5
LARGEST_WHOLE = 2**63 - 1  # the largest signed 64-bit number, the limit of messages and native structs
LEAST_REPETITION_PENALTY = 0.01  # a smaller divisor would take logits out of single precision's range
WHOLE_NUMBERS = {
    "n": (1, 128),
    "top_k": (-1, LARGEST_WHOLE),
    "min_tokens": (0, LARGEST_WHOLE),
    "max_tokens": (1, LARGEST_WHOLE),
    "seed": (-(2**63), 2**64 - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
NUMBERS = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (LEAST_REPETITION_PENALTY, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}
ABOVE = ("top_p",)  # the lower bound is excluded
NULLABLE = ("max_tokens", "seed", "logprobs", "prompt_logprobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the engine samples the tokens of one request; every field applies at every drafted position.

    Attributes:
        n: number of independent outputs.
        temperature: 0 is greedy; other values scale the logits by 1 / temperature.
        top_p, top_k, min_p: truncations, applied in the order top-k, top-p, min-p. ``top_k`` 0 or -1 is off. ``top_k``
            and ``top_p`` keep every token that ties with the last kept token; transformers keeps only some ties.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output; from 0.01 to
            100.
        presence_penalty, frequency_penalty: subtracted from logits of output tokens, once or per occurrence.
        logit_bias: token id to a number that is added to the logit.
        allowed_token_ids: the only tokens of the output; None allows all tokens.
        bad_words_token_ids: sequences of token ids that do not occur in the output.
        logits_processors: installed or registered logits processors by name, each with its options.
        min_tokens, max_tokens: bounds of the output length in tokens. Stop tokens have probability 0 below
            ``min_tokens``.
        stop: strings that end the output; the text ends before the string.
        stop_token_ids: token ids that end the output.
        ignore_eos: continue after the end-of-sequence token.
        seed: under ``match``, model, prompt, parameters and seed alone determine the output. Other acceptance methods
            also read the drafts. Where drafter, policy or execution mode learns, or untrusted nodes draft, a repeated
            request is a new sample.
        logprobs: number of alternatives per output token; 0 reports the sampled token only, None nothing.
        prompt_logprobs: the same for the tokens of the prompt.
        include_stop_str_in_output: keep the stop string in the text.
        skip_special_tokens: omit special tokens from the text.

    Raises:
        InvalidInput: a field is out of range. The sentence names the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    logits_processors: Mapping[str, Mapping[str, Any]] | None = None
    min_tokens: int = 0
    max_tokens: int | None = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        object.__setattr__(self, "stop", _listed("stop", stop, "a non-empty string or a list of them"))
        ids = _listed("stop_token_ids", self.stop_token_ids or (), "a list of token ids")
        object.__setattr__(self, "stop_token_ids", ids)
        self._set_masks()
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidInput(name, getattr(self, name), "True or False")
        for name, bounds in NUMBERS.items():
            _number(name, getattr(self, name), *bounds, above=name in ABOVE)
        for name, limits in WHOLE_NUMBERS.items():
            if name not in NULLABLE or getattr(self, name) is not None:
                _whole(name, getattr(self, name), *limits)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidInput("min_tokens", self.min_tokens, f"at most max_tokens, here {self.max_tokens}")
        self._check_lists()
        self._check_masks()

    def _set_masks(self) -> None:
        if self.allowed_token_ids is not None:
            allowed = _listed("allowed_token_ids", self.allowed_token_ids, "a list of at least one token id")
            object.__setattr__(self, "allowed_token_ids", allowed)
        kind = "a list of non-empty lists of token ids"
        sequences = _listed("bad_words_token_ids", self.bad_words_token_ids or (), kind)
        listed = tuple(_listed("bad_words_token_ids", each, kind) for each in sequences)
        object.__setattr__(self, "bad_words_token_ids", listed)

    def _check_masks(self) -> None:
        if self.allowed_token_ids == ():
            raise InvalidInput("allowed_token_ids", [], "a list of at least one token id, or None")
        for token in self.allowed_token_ids or ():
            _whole("allowed_token_ids", token, 0)
        for sequence in self.bad_words_token_ids:
            if not sequence:
                raise InvalidInput("bad_words_token_ids", [], "a list of non-empty lists of token ids")
            for token in sequence:
                _whole("bad_words_token_ids", token, 0)
        chosen = self.logits_processors
        if not isinstance(chosen, Mapping | None) or not all(
            isinstance(each, Mapping) for each in (chosen or {}).values()
        ):
            raise InvalidInput("logits_processors", chosen, "an object from names to options")

    def _check_lists(self) -> None:
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidInput("stop", text, "a non-empty string or a list of them")
            if not is_text(text):
                raise InvalidInput("stop", text, "text of whole Unicode characters")
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0)
        if not isinstance(self.logit_bias, Mapping | None):
            raise InvalidInput("logit_bias", self.logit_bias, "an object from token id to a number")
        for token, bias in (self.logit_bias or {}).items():
            _whole("logit_bias", token, 0)
            _number(f"logit_bias[{token}]", bias, -100, 100)

    @property
    def greedy(self) -> bool:
        """Whether the target distribution is a point mass on the likeliest token."""
        return self.temperature < GREEDY_BELOW

    @property
    def truncates(self) -> bool:
        """Whether truncation sets some tokens' probability to 0."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def edits_logits(self) -> bool:
        """Whether a logits processor changes the logits or excludes tokens."""
        edits = self.has_penalties or bool(self.logit_bias) or bool(self.logits_processors)
        return edits or self.min_tokens > 0 or self.allowed_token_ids is not None or bool(self.bad_words_token_ids)

    @property
    def processors(self) -> dict[str, Mapping[str, Any]]:
        """Names and options of the logits processors that apply, in the order of application."""
        own = {
            "penalties": self.has_penalties,
            "logit_bias": bool(self.logit_bias),
            "min_tokens": self.min_tokens > 0,
            "allowed_token_ids": self.allowed_token_ids is not None,
            "bad_words_token_ids": bool(self.bad_words_token_ids),
        }
        return {**{name: {} for name, applies in own.items() if applies}, **(self.logits_processors or {})}

    @property
    def has_penalties(self) -> bool:
        """Whether the target distribution depends on earlier tokens through penalties."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> SamplingParams:
        """Build from JSON keys and refuse an unknown key by name. Keys of ``logit_bias`` may be strings."""
        known = {f.name for f in fields(cls)}
        for key in given:
            if key not in known:
                raise InvalidInput("sampling parameter", key, "one of " + ", ".join(sorted(known)))
        values = dict(given)
        bias = values.get("logit_bias")
        if bias is not None:
            try:
                values["logit_bias"] = {int(token): float(value) for token, value in dict(bias).items()}
                if not all(str(int(token)) == str(token) for token in bias):  # two keys would name one token
                    raise ValueError
            except (TypeError, ValueError):
                raise InvalidInput("logit_bias", bias, "an object from token id to a number") from None
        return cls(**values)


def allowed_numbers(name: str) -> str | None:
    """Return the allowed numbers of a field in words; None for a field that is no number."""
    if name in WHOLE_NUMBERS:
        return _whole_words(*WHOLE_NUMBERS[name])
    return _number_words(*NUMBERS[name], name in ABOVE) if name in NUMBERS else None


def _listed(name: str, given: object, allowed: str) -> tuple[Any, ...]:
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise InvalidInput(name, given, allowed)
    return tuple(given)


def _whole(name: str, value: object, low: int, high: int | None = None) -> None:
    """Check a whole number. Token ids have no ``high`` here: the vocabulary bounds token ids."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise InvalidInput(name, value, _whole_words(low, high))


def _whole_words(low: int, high: int | None) -> str:
    return f"a whole number from {low}" + (f" to {high}" if high is not None else " up")


def _number(name: str, value: object, low: float, high: float, above: bool = False) -> None:
    bounded = isinstance(value, int | float) and low <= value <= high  # false for NaN
    if isinstance(value, bool) or not bounded or (above and value == low):
        raise InvalidInput(name, value, _number_words(low, high, above))


def _number_words(low: float, high: float, above: bool) -> str:
    return f"a number {'above' if above else 'from'} {low} {'up ' if above else ''}to {high}"
