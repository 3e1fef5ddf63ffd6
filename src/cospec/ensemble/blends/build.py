"""From the ``law`` of a configuration or a request to a blend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cospec.core.interfaces import Blend
from cospec.errors import InvalidInput, words
from cospec.options import parse
from cospec.registry import BLENDS


def blend_class(ensemble: Mapping[str, Any]) -> Any:
    """What builds the blend that ``law`` names.

    Raises:
        InvalidInput: no such blend.
    """
    name = ensemble.get("method")
    if name is None:
        raise InvalidInput("ensemble.method", words("missing"), "one of " + ", ".join(BLENDS.names))
    BLENDS.check(name)
    return BLENDS.load(str(name))


def build_blend(ensemble: Mapping[str, Any], count: int) -> Blend:
    """The blend of ``count`` models that ``law`` describes, such as ``{"method": "weighted", "lambda": 0.3}``.

    Raises:
        InvalidInput: no such blend, an option that it does not have or out of bounds, a number of models it does not
            take.
    """
    cls = blend_class(ensemble)
    options = {key: value for key, value in ensemble.items() if key != "method"}
    blend: Blend = cls.build(parse(cls.Options, options, "law."), count)
    return blend
