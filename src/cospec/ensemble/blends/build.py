"""Build a blend from the ``ensemble`` option of a configuration or a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cospec.core.interfaces import Blend
from cospec.errors import InvalidInput, words
from cospec.options import parse
from cospec.registry import BLENDS


def blend_class(ensemble: Mapping[str, Any]) -> Any:
    """Return the factory of the blend that ``ensemble["method"]`` names.

    Raises:
        InvalidInput: no blend has this name.
    """
    name = ensemble.get("method")
    if name is None:
        raise InvalidInput("ensemble.method", words("missing"), "one of " + ", ".join(BLENDS.names))
    BLENDS.check(name)
    return BLENDS.load(str(name))


def build_blend(ensemble: Mapping[str, Any], count: int) -> Blend:
    """Build the blend of ``count`` models that ``ensemble`` describes, such as ``{"method": "weighted", "lambda":
    0.3}``.

    Raises:
        InvalidInput: the name is unknown, an option is unknown or out of bounds, or the blend does not take ``count``
            models.
    """
    cls = blend_class(ensemble)
    options = {key: value for key, value in ensemble.items() if key != "method"}
    blend: Blend = cls.build(parse(cls.Options, options, "ensemble."), count)
    return blend
