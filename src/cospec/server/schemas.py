"""The JSON of requests: OpenAI's keys, vLLM's sampling keys, and cospec's keys.

Schemas check types; ``SamplingParams`` checks ranges.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields
from itertools import takewhile
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request as HttpRequest

from cospec import plugin_options
from cospec.allowed_values import NUMBERS, allowed, described, keys, path
from cospec.core.types import SpeculationParams
from cospec.errors import InvalidInput, words
from cospec.sampling_params import MAX_LOGPROBS, SamplingParams, allowed_numbers
from cospec.server import bodies
from cospec.server.settings import ServerSettings

SchemaT = TypeVar("SchemaT", bound="Schema")
Whole = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]  # range of the messages to the engine
SAMPLING_FIELDS = frozenset(f.name for f in fields(SamplingParams))
UNIONS = {
    "prompt": "a string, a list of strings, a list of token ids or a list of such lists",
    "content": "a string or a list of parts {'type': 'text', 'text': ...}",
    "stop": "a string or a list of strings",
    "role": "'system', 'developer', 'user' or 'assistant', as tool calls are not supported",
    "refusal": "null or absent",
    "audio": "null or absent, as only text is supported",
    "function_call": "null or absent, as function calls are not supported",
    "tool_calls": "null, empty or absent, as tool calls are not supported",
}
FAIL_FAST = Field(fail_fast=True)  # report one wrong element instead of a million
_UNION_MEMBER = re.compile(r"str|list\[.*\]")

TokenIds = Annotated[list[int], FAIL_FAST]


class Schema(BaseModel):
    """Base of all bodies: types are not converted. ``unknown_fields.check`` handles keys without a field."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, protected_namespaces=())


class StreamOptions(Schema):
    """OpenAI's ``stream_options``; vLLM's ``continuous_usage_stats`` adds the current usage to every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SpeculationChoice(Schema):
    """The speculation choices of a request; an absent choice takes the engine's configuration."""

    model_config = ConfigDict(extra="forbid")  # only cospec has these keys, so an unknown key is a mistake

    enabled: bool = True
    length: int | None = Field(default=None, ge=0, le=64)
    acceptance_method: str | None = None
    policy: str | None = None
    drafters: Annotated[list[str], FAIL_FAST] | None = None


class TextPart(Schema):
    """A content part of a message; cospec supports text only."""

    type: Literal["text"]
    text: str


class Message(Schema):
    """One message of a conversation.

    Attributes:
        reasoning_content, reasoning: a model's reasoning before the answer, under both names in use.
    """

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], FAIL_FAST]
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    # keys that clients send back with an appended answer
    refusal: None = None
    annotations: Any = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None

    def plain(self) -> dict[str, str]:
        """Return the message for chat templates. ``developer`` is OpenAI's newer word for ``system``."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        own = {"role": "system" if self.role == "developer" else self.role, "content": text}
        more = {"name": self.name, "reasoning_content": self.reasoning_content or self.reasoning}
        return own | {key: value for key, value in more.items() if value is not None}


class Sampled(Schema):
    """The keys that completions and chat completions share."""

    model: str | None = None
    n: Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words_token_ids: Annotated[list[TokenIds], FAIL_FAST] | None = None
    logits_processors: dict[str, dict[str, Any]] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], FAIL_FAST] | None = None
    stop_token_ids: Annotated[list[int], FAIL_FAST] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Whole | None = None
    max_tokens: Whole | None = None
    prompt_logprobs: int | None = None
    priority: Whole = 0
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # keys of cospec
    speculation: SpeculationChoice | None = None
    ensemble: dict[str, Any] | None = None
    include_speculation_stats: bool = False
    return_token_ids: bool = False
    return_sources: bool = False

    @property
    def prompt_count(self) -> int:
        """Number of prompts of the call."""
        return 1

    @property
    def bounded(self) -> dict[str, int | None]:
        """Return the numbers that the operator bounds, by field name."""
        return {"priority": self.priority, "prompt_logprobs": self.prompt_logprobs}

    @property
    def usage_wanted(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def usage_always(self) -> bool:
        """Whether every chunk of a stream has the current usage."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def check(self) -> None:
        """Refuse fields that contradict each other.

        Raises:
            InvalidInput: two fields contradict each other.
        """
        if self.stream_options is not None and not self.stream:
            raise InvalidInput("stream_options", words("given without stream"), "present only when stream is true")

    def sampling(self, **changes: Any) -> SamplingParams:
        """Return the sampling parameters, overridden by ``changes``.

        Raises:
            InvalidInput: a field is out of range.
        """
        given = {name: getattr(self, name) for name in type(self).model_fields if name in SAMPLING_FIELDS}
        values = {name: value for name, value in (given | changes).items() if value is not None or name in changes}
        return SamplingParams.parse(values)

    def choice(self) -> SpeculationParams:
        """Return the request's speculation choices for the engine."""
        given = self.speculation or SpeculationChoice()
        drafters = None if given.drafters is None else tuple(given.drafters)
        return SpeculationParams(given.enabled, given.length, given.acceptance_method, given.policy, drafters)


class CompletionBody(Sampled):
    """Body of ``/v1/completions``."""

    prompt: str | Annotated[list[str], FAIL_FAST] | TokenIds | Annotated[list[TokenIds], FAIL_FAST]
    echo: bool | None = None
    best_of: int | None = None
    logprobs: int | None = None
    add_special_tokens: bool = True

    @property
    def prompt_count(self) -> int:
        several = not isinstance(self.prompt, str) and not (self.prompt and isinstance(self.prompt[0], int))
        return len(self.prompt) if several else 1

    @property
    def bounded(self) -> dict[str, int | None]:
        return super().bounded | {"logprobs": self.logprobs}

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidInput("best_of", self.best_of, f"absent or equal to n, here {self.n or 1}")


class Templated(Schema):
    """The keys for the chat template.

    Attributes:
        add_generation_prompt: None is true, unless the last message is continued.
        continue_final_message: the output continues the last message.
        chat_template_kwargs: template variables by name. The fields ``reasoning_effort``, ``verbosity`` and
            ``documents`` are also variables and override this mapping.
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    documents: list[dict[str, Any]] | None = None

    @property
    def opens_answer(self) -> bool:
        """Whether the prompt ends with the opening of an assistant's message."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt


class ChatBody(Sampled, Templated):
    """Body of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    max_completion_tokens: Whole | None = Field(default=None, ge=1)

    @property
    def bounded(self) -> dict[str, int | None]:
        return super().bounded | {"top_logprobs": self.top_logprobs}

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise InvalidInput("top_logprobs", words("given without logprobs"), "present only when logprobs is true")


class TokenizeBody(Templated):
    """Body of ``/tokenize``: a prompt, or the messages of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1, fail_fast=True)
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(Schema):
    """Body of ``/detokenize``."""

    model: str | None = None
    tokens: Annotated[list[int], FAIL_FAST]


async def receive(schema: type[SchemaT], http: HttpRequest, settings: ServerSettings) -> SchemaT:
    """Read and parse a request's body.

    Raises:
        BodyTooLarge: the body exceeds the limit.
        Overloaded: the bodies of all requests have too many bytes now.
        InvalidInput: as in ``read``.
    """
    data = await bodies.read_bytes(http, settings.max_body_bytes)
    return await bodies.off_loop(len(data), lambda: read(schema, data, settings))


def read(schema: type[SchemaT], data: bytes, settings: ServerSettings) -> SchemaT:
    """Parse a request's body.

    Raises:
        InvalidInput: the body is no JSON, or a value has another type; the error names the first. A top-level null
            counts as absent.
    """
    given = bodies.parse(data, settings)
    try:
        return schema.model_validate({key: value for key, value in given.items() if value is not None})
    except ValidationError as error:
        raise _sentence(schema, error) from None


def _sentence(schema: type[Schema], error: ValidationError) -> InvalidInput:
    first = error.errors(include_url=False)[0]
    parts = list(takewhile(lambda part: not _UNION_MEMBER.fullmatch(str(part)), first["loc"]))
    if not parts:  # a key that is no text belongs to no field
        return InvalidInput("body", words(f"an object that cannot be read ({first['msg']})"), "a JSON object")
    name = path(parts)
    if first["type"] == "extra_forbidden":
        return unknown_key(schema, parts, first["input"])
    union = UNIONS.get(str(parts[-1]))
    if first["type"] == "missing":
        return InvalidInput(name, words("missing"), union or described(schema, parts))
    # A union reports one error per member. The first member, a string, gets the whole value.
    numbers = allowed_numbers(name) if first["type"] in NUMBERS else None  # the schema's own bounds are wider
    return InvalidInput(name, first["input"], union or numbers or allowed(schema, parts, first))


def unknown_key(schema: type[Schema], place: Sequence[int | str], given: object) -> InvalidInput:
    """Return the error about an unknown key, with the allowed keys at its ``place``."""
    return plugin_options.unknown_key(path(place), given, sorted(keys(schema, place[:-1])))
