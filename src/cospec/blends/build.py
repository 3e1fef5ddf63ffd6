"""From the ``law`` of a configuration or a request to a blend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cospec.blends.custom import USER_BLENDS, Custom
from cospec.errors import InvalidInput, words
from cospec.options import parse
from cospec.protocols import Blend
from cospec.registry import BLENDS


def build_blend(law: Mapping[str, Any], count: int) -> Blend:
    """The blend of ``count`` models that ``law`` describes, such as ``{"blend": "weighted", "lambda": 0.3}``.

    Raises:
        InvalidInput: no such blend, an option that it does not have or out of bounds, a number of models it does not
            take.
    """
    name = law.get("blend")
    options = {key: value for key, value in law.items() if key != "blend"}
    if name is None:
        raise InvalidInput("law.blend", words("missing"), "one of " + ", ".join([*BLENDS, *USER_BLENDS.names]))
    function = USER_BLENDS.get(name)
    if function is not None:
        if options:
            raise InvalidInput(
                f"key law.{next(iter(options))}", next(iter(options.values())), "left out for this blend"
            )
        return Custom(str(name), function, count)
    BLENDS.check(name, *USER_BLENDS.names)
    cls = BLENDS.load(str(name))
    blend: Blend = cls.build(parse(cls.Options, options, "law."), count)
    return blend
