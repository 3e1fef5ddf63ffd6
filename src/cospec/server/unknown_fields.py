"""Keys of a request's JSON outside the schemas: ignored bookkeeping, refused with a reason, or unknown.

Clients send many keys that only OpenAI or vLLM define. Bookkeeping keys never fail a call. A key for an unsupported
feature is refused, unless its value leaves the feature off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel
from starlette.responses import Response

from cospec.errors import InvalidInput
from cospec.server.schemas import Schema, unknown_key

HEADER = "X-Cospec-Ignored"
MAX_HEADER = 1000  # characters
EMPTY: tuple[object, ...] = ([], {}, "")  # values that request nothing, for any key

BOOKKEEPING = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "parallel_tool_calls",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "prediction",
        "session_id",
        "stream_options.include_obfuscation",
    }
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a key is refused.

    Attributes:
        allowed: the allowed values, in words.
        harmless: values that leave the feature off.
    """

    allowed: str
    harmless: tuple[object, ...] = ()


_TOOLS = "as tool calls are not supported"
_FUNCTIONS = "as function calls are not supported"
_STRUCTURED = Refusal("absent, as structured output is not supported")
_CACHES = Refusal("absent, as caches are not transferred")
_TRUNCATES = "top_p, top_k and min_p truncate"
_OFF, _NEUTRAL = Refusal(f"absent or 0; {_TRUNCATES}", (0,)), Refusal(f"absent or 1; {_TRUNCATES}", (1,))
_REPEATS = "repetition_penalty counts all tokens of prompt and output"
_ORDER = Refusal("absent, as the order of truncations is fixed: top_k, top_p, min_p")

# Sampling keys of llama.cpp, SGLang, TGI, transformers and text-generation-webui. Keys that only tune a sampler, like
# ``xtc_threshold``, change no text while that sampler is off, so the server ignores those keys.
SAMPLERS = {
    "mirostat": _OFF,
    "mirostat_mode": _OFF,
    "xtc_probability": _OFF,
    "dry_multiplier": _OFF,
    "top_a": _OFF,
    "top_n_sigma": Refusal(f"absent, 0 or -1; {_TRUNCATES}", (0, -1)),
    "epsilon_cutoff": _OFF,
    "eta_cutoff": _OFF,
    "typical_p": _NEUTRAL,
    "typical": _NEUTRAL,
    "tfs": _NEUTRAL,
    "tfs_z": _NEUTRAL,
    "dynatemp_range": Refusal("absent or 0, as the temperature is one number", (0,)),
    "dynamic_temperature": Refusal("absent or false, as the temperature is one number", (False,)),
    "smoothing_factor": Refusal("absent or 0; temperature scales the logits", (0,)),
    "temperature_last": Refusal("absent or false, as temperature comes before truncations", (False,)),
    "samplers": _ORDER,
    "sampler_order": _ORDER,
    "sampler_priority": _ORDER,
    "penalty_alpha": Refusal("absent or 0, as contrastive search is not supported", (0,)),
    "guidance_scale": Refusal("absent or 1, as guidance is not supported", (1,)),
    "repeat_penalty": Refusal("absent or 1; the field is named repetition_penalty here", (1,)),
    "repeat_last_n": Refusal(f"absent or -1; {_REPEATS}", (-1,)),
    "repetition_penalty_range": Refusal(f"absent or 0; {_REPEATS}", (0,)),
    "encoder_repetition_penalty": Refusal(f"absent or 1; {_REPEATS}", (1,)),
    "no_repeat_ngram_size": Refusal("absent or 0; the penalties and bad_words_token_ids avoid repetitions", (0,)),
    "bad_words": Refusal("absent; bad_words_token_ids excludes sequences of token ids"),
    "banned_strings": Refusal("absent; bad_words_token_ids excludes sequences of token ids"),
    "custom_token_bans": Refusal("absent; bad_words_token_ids excludes sequences of token ids"),
    "ban_eos_token": Refusal("absent or false; ignore_eos and min_tokens postpone the end", (False,)),
    "custom_logit_processor": Refusal("absent; logits_processors names plug-ins"),
    "do_sample": Refusal("absent or true; temperature 0 is greedy", (True,)),
    "sampler_seed": Refusal("absent; the field is named seed here"),
    "random_seed": Refusal("absent; the field is named seed here"),
    "max_new_tokens": Refusal("absent; the field is named max_tokens here"),
    "max_length": Refusal("absent; the field is named max_tokens here"),
    "n_predict": Refusal("absent or -1; the field is named max_tokens here", (-1,)),
    "min_new_tokens": Refusal("absent or 0; the field is named min_tokens here", (0,)),
    "min_length": Refusal("absent or 0; the field is named min_tokens here", (0,)),
    "num_return_sequences": Refusal("absent or 1; the field is named n here", (1,)),
    "stop_regex": Refusal("absent; stop takes strings"),
    "n_probs": Refusal("absent or 0; the field is named logprobs here", (0,)),
    "top_n_tokens": Refusal("absent or 0; the field is named logprobs here", (0,)),
    "logprob_token_ids": Refusal("absent; top_logprobs gives the likeliest tokens"),
    "repetition_detection": Refusal("absent; stop and max_tokens end an output"),
    "thinking_token_budget": Refusal("absent or -1, as reasoning is not parsed", (-1,)),
    "watermarking": Refusal("absent or false, as watermarks are not supported", (False,)),
    "watermark": Refusal("absent or false, as watermarks are not supported", (False,)),
}

REFUSED = SAMPLERS | {
    "tools": Refusal(f"absent, {_TOOLS}"),
    "tool_choice": Refusal(f"absent, 'none' or 'auto', {_TOOLS}", ("none", "auto")),
    "functions": Refusal(f"absent, {_FUNCTIONS}"),
    "function_call": Refusal(f"absent, 'none' or 'auto', {_FUNCTIONS}", ("none", "auto")),
    "response_format": Refusal(
        "absent or {'type': 'text'}, as structured output is not supported", ({"type": "text"},)
    ),
    "structured_outputs": _STRUCTURED,
    "guided_json": _STRUCTURED,
    "guided_regex": _STRUCTURED,
    "guided_choice": _STRUCTURED,
    "guided_grammar": _STRUCTURED,
    "guided_decoding_backend": _STRUCTURED,
    "guided_whitespace_pattern": _STRUCTURED,
    "json_schema": _STRUCTURED,
    "regex": _STRUCTURED,
    "ebnf": _STRUCTURED,
    "grammar": _STRUCTURED,
    "suffix": Refusal("absent, as text cannot be inserted before a suffix"),
    "echo": Refusal("absent or false, as a chat does not return its messages", (False,)),
    "add_special_tokens": Refusal("absent or false, as the chat template adds special tokens", (False,)),
    "chat_template": Refusal("absent, as the model's own chat template is used"),
    "prompt_embeds": Refusal("absent, as prompts are text or token ids"),
    "truncate_prompt_tokens": Refusal("absent, as prompts are not truncated"),
    "truncate": Refusal("absent, as prompts are not truncated"),
    "negative_prompt": Refusal("absent, as guidance is not supported"),
    "modalities": Refusal("absent or ['text'], as only text is supported", (["text"],)),
    "audio": Refusal("absent, as only text is supported"),
    "web_search_options": Refusal("absent, as the server does not search the web"),
    "moderation": Refusal("absent, as the server does not moderate"),
    "use_beam_search": Refusal("absent or false, as beam search is not supported", (False,)),
    "num_beams": Refusal("absent or 1, as beam search is not supported", (1,)),
    "diversity_penalty": Refusal("absent or 0, as beam search is not supported", (0,)),
    "length_penalty": Refusal("absent or 1, as beam search is not supported", (1,)),
    "early_stopping": Refusal("absent or false, as beam search is not supported", (False,)),
    "best_of": Refusal("absent or 1; n is the number of choices", (1,)),
    "spaces_between_special_tokens": Refusal("absent or true", (True,)),
    "return_tokens_as_token_ids": Refusal("absent or false; return_token_ids gives the ids", (False,)),
    "max_completion_tokens": Refusal("absent; max_tokens bounds a completion"),
    "top_logprobs": Refusal("absent or 0; logprobs is the number of alternatives", (0,)),
    "cache_salt": Refusal("absent, as the prefix cache takes no salt"),
    "kv_transfer_params": _CACHES,
    "ec_transfer_params": _CACHES,
}


def check(body: Schema, strict: bool) -> list[str]:
    """Return the names of the ignored keys, without bookkeeping.

    Args:
        strict: refuse unknown keys.

    Raises:
        InvalidInput: a key asks for an unsupported feature, or is unknown under ``strict``.
    """
    ignored: dict[str, None] = {}
    for place, value in _unknown(body, ()):
        name = ".".join(part for part in place if isinstance(part, str))
        refusal = REFUSED.get(name)
        if refusal is not None:
            if value not in (*EMPTY, *refusal.harmless):
                raise InvalidInput(name, value, refusal.allowed)
        elif name not in BOOKKEEPING:
            if strict:
                raise unknown_key(type(body), place, value)
            ignored[name] = None
    return list(ignored)


def name_ignored(response: Response, ignored: Sequence[str]) -> None:
    """Name the ignored keys in a header; a long list ends with ``...``."""
    if not ignored:
        return
    # A header may not end with a space, which an empty last name would cause.
    text = ", ".join(quote(name, safe="._-", errors="replace") or '""' for name in ignored[:MAX_HEADER])
    response.headers[HEADER] = text if len(text) <= MAX_HEADER else f"{text[:MAX_HEADER]}..."


def _unknown(value: Any, place: tuple[int | str, ...]) -> Iterator[tuple[tuple[int | str, ...], Any]]:
    """Yield place and value of every key without a field, except nulls."""
    if isinstance(value, BaseModel):
        for name, given in (value.model_extra or {}).items():
            if given is not None:
                yield (*place, name), given
        for name in type(value).model_fields:
            yield from _unknown(getattr(value, name), (*place, name))
    elif isinstance(value, list) and value and isinstance(value[0], BaseModel):  # lists of token ids are skipped
        for number, item in enumerate(value):
            yield from _unknown(item, (*place, number))
