"""From the ``ensemble`` option of a configuration or a request to a blend."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from cospec.core.interfaces import Blend
from cospec.core.types import DeclaredDistribution, Request
from cospec.errors import InvalidInput, words
from cospec.plugin_options import parse
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


def distribution_of(blend: Blend) -> DeclaredDistribution:
    """Return what responses declare of a blend."""
    return DeclaredDistribution(blend.name, blend.exact)


class BlendRegistry:
    """The blends of an ensemble: its own, and those that requests ask for.

    A request keeps the blend that it started with. Requests with equal options share one blend, and no blend outlives
    its requests. A newly registered function therefore applies to requests that start afterwards.
    """

    def __init__(self, ensemble: Mapping[str, Any], count: int) -> None:
        self._own, self._count = ensemble, count
        self._shared: WeakValueDictionary[tuple[str, Any], Blend] = WeakValueDictionary()
        self._running: dict[str, Blend] = {}  # by request id

    def build(self, ensemble: Mapping[str, Any] | None = None) -> Blend:
        """Return the blend that ``ensemble`` describes now; by default the engine's own.

        Raises:
            InvalidInput: the blend cannot be built for these models.
        """
        asked = self._own if ensemble is None else ensemble
        key = json.dumps(asked, sort_keys=True, default=str), blend_class(asked)
        blend = self._shared.get(key)
        if blend is None:
            blend = self._shared[key] = build_blend(asked, self._count)
        return blend

    def of(self, request: Request) -> Blend:
        """Return the blend of a request; the same from its first step to its last."""
        blend = self._running.get(request.id)
        if blend is None:
            blend = self._running[request.id] = self.build(request.ensemble)
        return blend

    def uses(self, id: str, model: int) -> bool:
        """Return whether the request's blend includes the model."""
        return id in self._running and model in self._running[id].members

    def free(self, ids: Sequence[str]) -> None:
        """Forget requests. Unknown ids are ignored."""
        for id in ids:
            self._running.pop(id, None)
