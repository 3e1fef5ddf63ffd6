"""Options as data: frozen, without unknown keys, with one-sentence errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from cospec.allowed_values import allowed, described, keys, path
from cospec.errors import InvalidInput, words

DTYPES = {"half": "float16", "float": "float32"}  # other names of a dtype
OptionsT = TypeVar("OptionsT", bound="Options")


class Options(BaseModel):
    """Base of the options of every part. Subclasses add fields with defaults and bounds."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())


def _name_dtype(value: object) -> object:
    """Read vLLM's dtype names and torch's dtypes."""
    name = str(value).removeprefix("torch.")
    return DTYPES.get(name, name if str(value) != name else value)


def _read_off(value: object) -> object:
    """Read YAML's ``off``, which YAML 1.1 takes for false."""
    return "off" if value is False else value


OFF = BeforeValidator(_read_off)
KVCacheDtype = Literal["auto", "float32", "bfloat16", "float16", "int8"]
Dtype = Annotated[Literal["auto", "float32", "bfloat16", "float16"], BeforeValidator(_name_dtype)]


class DrafterPlace(Options):
    """Where a drafter runs.

    Attributes:
        executor: a name in the table of executors: ``inline``, in the caller's thread; in a ``thread`` or
            ``process`` of its own; or on drafter nodes (``node``). Other drafters run meanwhile.
        cores: processors reserved for the process. An empty list lets all processes share the processors.
        name: of the drafter in its pool; empty: the name of the method.
        cost_per_hour: the price of the drafter's machine, in the currency of the target; for metrics only.
    """

    executor: str = "inline"
    cores: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(), strict=False)
    name: str = ""
    cost_per_hour: float = Field(default=0, ge=0, strict=False)


ENGINE_THREAD = DrafterPlace()


class WeightOptions(Options):
    """The weights of a drafter, or of a model of an ensemble. A model without these options takes both of the engine.

    Attributes:
        dtype: as the engine's ``dtype``; ``auto`` keeps the dtype of the model's files.
        quantization: as the engine's ``quantization``. With one of the two options alone the other has its default.
    """

    dtype: Dtype | None = None
    quantization: str | None = None

    @property
    def given(self) -> bool:
        """Whether the model has a dtype or a quantization of its own."""
        return self.dtype is not None or self.quantization is not None


class ModelOptions(WeightOptions):
    """The weights and the KV cache of a drafter, or of a model of an ensemble.

    Attributes:
        kv_cache_dtype: as the engine's ``kv_cache_dtype``; None takes the engine's.
    """

    kv_cache_dtype: KVCacheDtype | None = None


LIKE_TARGET = ModelOptions()


def parse(cls: type[OptionsT], given: Mapping[str, Any], where: str = "") -> OptionsT:
    """Validate ``given`` as ``cls``.

    A validator of ``cls`` may raise ``InvalidInput`` about a field of a part, with its whole path.

    Args:
        where: prefix of the field names in errors, such as ``speculative_config.``.

    Raises:
        InvalidInput: the first key that is unknown or out of bounds.
    """
    try:
        return cls.model_validate(dict(given))
    except ValidationError as error:
        raise _sentence(cls, given, error, where) from None


def _sentence(cls: type[Options], given: Mapping[str, Any], error: ValidationError, where: str) -> InvalidInput:
    first, *others = error.errors()
    if first["type"] == "missing":  # a misspelt key explains the missing one
        misspelt = (each for each in others if each["type"] == "extra_forbidden")
        first = next((each for each in misspelt if each["loc"][:-1] == first["loc"][:-1]), first)
    if isinstance(own := first.get("ctx", {}).get("error"), InvalidInput):
        return own
    place = _place(given, first)
    for other in others:  # every member of a union reports an error; the deepest place belongs to the intended member
        found = _place(given, other)
        if found[: len(place)] == place and len(found) > len(place):
            first, place = other, found
    name = where + path(place)
    if first["type"] == "extra_forbidden":
        return unknown_key(name, first["input"], keys(cls, place[:-1]))
    if first["type"] == "missing":
        return InvalidInput(name, words("missing"), described(cls, place))
    alike = [allowed(cls, place, each) for each in (first, *others) if _place(given, each) == place]
    return InvalidInput(name, first["input"], " or ".join(dict.fromkeys(alike)))


def unknown_key(name: str, given: object, known: Sequence[str]) -> InvalidInput:
    """Return the error about an unknown key.

    Args:
        name: the path of the key.
        known: the keys of the same object.
    """
    refused = InvalidInput(f"key {name}", given, f"one of {', '.join(known)}" if known else "no key here")
    refused.field = name
    return refused


def _place(given: object, error: Mapping[str, Any]) -> tuple[int | str, ...]:
    """Return the path in ``given`` of the wrong value: the parts of ``loc`` without names of union members."""
    found: list[int | str] = []
    for part in error["loc"]:
        here = isinstance(given, list | tuple) and isinstance(part, int) and part < len(given)
        if here or (isinstance(given, Mapping) and part in given):
            found, given = [*found, part], given[part]  # type: ignore[index]
    # A default that a validator refuses is not in ``given`` either.
    return (*found, error["loc"][-1]) if error["type"] == "missing" or not found else tuple(found)
