"""Options in groups: a command takes frozen dataclasses, and Typer sees each field as an option."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command for Typer: one parameter per field instead of each dataclass parameter."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {}
    flat: list[Parameter] = []
    for parameter in signature(command).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind):
            groups[parameter.name] = kind
            own = get_type_hints(kind, include_extras=True)
            flat += [_keyword(field.name, _default(field), own[field.name]) for field in fields(kind)]
        else:
            flat.append(_keyword(parameter.name, parameter.default, kind))

    @functools.wraps(command)
    def called(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        command(**given)

    called.__signature__ = Signature(flat)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return called


def _keyword(name: str, default: Any, annotation: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return Parameter.empty if field.default is MISSING else field.default
