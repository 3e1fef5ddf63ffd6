"""The allowed values of an option in words, from the annotations of its class and an error of pydantic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

Place: TypeAlias = Sequence[int | str]

# pydantic's names of errors
OBJECTS = ("model_type", "dict_type", "mapping_type")
LISTS = ("list_type", "tuple_type")
BOUNDS = {
    "greater_than_equal": "a number from {ge} up",
    "less_than_equal": "a number up to {le}",
    "greater_than": "a number above {gt}",
    "less_than": "a number below {lt}",
    "too_short": "a list of at least {min_length}",
    "string_too_short": "a text of {min_length} characters or more",
}
KINDS = {
    "string_type": "a text",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_parsing": "true or false",
}
NUMBERS = (*list(BOUNDS)[:4], *(error for error, kind in KINDS.items() if kind.endswith("number")))
NUMBER = {int: "a whole number", float: "a number"}
OTHERS = {str: "a text", bool: "true or false"}
ITEMS = {str: "texts", int: "whole numbers", float: "numbers"}


def path(place: Place) -> str:
    """Return the name of a value in errors: ``models[0].dtype`` for ``("models", 0, "dtype")``."""
    return "".join([f"[{part}]" if isinstance(part, int) else f".{part}" for part in place]).removeprefix(".")


def allowed(cls: type[BaseModel], place: Place, error: Mapping[str, Any]) -> str:
    """Describe the values that ``cls`` allows at ``place``; ``error`` is an entry of ``ValidationError.errors()``."""
    kind = error["type"]
    if kind in OBJECTS:
        return "an object"
    if kind in NUMBERS or kind in LISTS:
        found = [_described(*each) for each in _values(cls, (), place)]
        start = "a list" if kind in LISTS else ("a number", "a whole number")
        return next((text for text in found if text.startswith(start)), BOUNDS.get(kind, KINDS.get(kind, "a list")))
    if kind in BOUNDS:
        return BOUNDS[kind].format(**error["ctx"])
    if kind in KINDS:
        return KINDS[kind]
    message = str(error["msg"]).removeprefix("Value error, ")
    return (message[0].lower() + message[1:]).removeprefix("input should be ")


def described(cls: type[BaseModel], place: Place) -> str:
    """Return the types that a value at ``place`` may have, with their bounds, in words."""
    found = [_described(*each) or OTHERS.get(each[0], "an object") for each in _values(cls, (), place)]
    return " or ".join(dict.fromkeys(found)) or "a value"


def keys(cls: type[BaseModel], place: Place) -> list[str]:
    """Return the keys of the objects that ``cls`` allows at ``place``; empty where any key is allowed."""
    objects = [hint for hint, _ in _values(cls, (), place) if isinstance(hint, type) and issubclass(hint, BaseModel)]
    return list(dict.fromkeys(field.alias or name for each in objects for name, field in each.model_fields.items()))


def _values(hint: Any, limits: Sequence[Any], place: Place) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Yield each type that a value at ``place`` may have, with its bounds; ``hint`` is the type of the whole."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        yield from _values(parts[0], (*limits, *parts[1:]), place)
    elif origin in (Union, UnionType):
        for part in parts:
            yield from _values(part, limits, place)
    elif not place:
        yield hint, limits
    elif isinstance(hint, type) and issubclass(hint, BaseModel):
        for name, field in hint.model_fields.items():
            if place[0] == (field.alias or name):
                yield from _values(field.annotation, field.metadata, place[1:])
    elif parts:
        yield from _values(parts[-1] if isinstance(place[0], str) else parts[0], (), place[1:])


def _described(hint: Any, limits: Sequence[Any]) -> str:
    """Return a type with its bounds in words; empty for a type without words."""
    if get_origin(hint) in (list, tuple):
        items = (_items(*item) for item in _values(get_args(hint)[0], (), ()))
        return next((f"a list of {each}" for each in items if each), "a list")
    return NUMBER[hint] + _range(limits) if hint in NUMBER else ""


def _items(hint: Any, limits: Sequence[Any]) -> str:
    """Return the items of a list in words; empty for items without words."""
    if get_origin(hint) is Literal:
        return ", ".join(map(repr, get_args(hint)))
    return ITEMS[hint] + _range(limits) if hint in ITEMS else ""


def _range(limits: Sequence[Any]) -> str:
    """Return bounds in words, such as ``from 1 to 64`` or ``above 0 up to 1``, after a space; empty without bounds."""
    flat = [inner for each in limits for inner in (each.metadata if isinstance(each, FieldInfo) else [each])]
    least: list[Any] = [each.ge for each in flat if isinstance(each, Ge)]
    most: list[Any] = [each.le for each in flat if isinstance(each, Le)]
    above = [f" above {each.gt}" for each in flat if isinstance(each, Gt)]
    below = [f" below {each.lt}" for each in flat if isinstance(each, Lt)]
    low = f" from {max(least)}" if least else "".join(above)  # pydantic adds the bounds of a type and of its field
    if most:
        return f"{low} {'to' if least else 'up to'} {min(most)}"
    low = f"{low} up" if least else low
    return " and".join(filter(None, [low, *below]))
