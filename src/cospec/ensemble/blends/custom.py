"""User blends: any function of the models' logits, registered under a name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cospec.errors import InvalidInput, words
from cospec.native.library import NativeBlend
from cospec.plugin_options import Options as PluginOptions
from cospec.registry import BLENDS

Combine = Callable[[Sequence[Tensor]], Tensor]
"""Maps the logits of every model, ``[R, V]`` each, to the blend's ``[R, V]``.

Each row must depend on the same row alone, and must not depend on R.
"""


class FunctionOptions(PluginOptions):
    """A user's function has no options."""


@dataclass(frozen=True, slots=True, eq=False)
class FunctionBlend:
    """A user's function in the place of a blend class. Each registration is a distinct object."""

    name: str
    function: Combine
    Options: ClassVar[type[PluginOptions]] = FunctionOptions

    def build(self, options: FunctionOptions, count: int) -> Custom:
        """Build the blend for any number of models."""
        return Custom(self.name, self.function, count)


def register_blend(name: str, function: Combine) -> None:
    """Register ``function`` as the blend ``{"method": name}``; a later registration replaces an earlier one.

    Raises:
        InvalidInput: cospec or an installed package has the name, or ``function`` is not callable.
    """
    if not callable(function):
        raise InvalidInput("blend function", function, "a function of a list of logits")
    BLENDS.register(name, FunctionBlend(name, function))


class Custom:
    """Calls a user's function and checks its result. An exception ends the requests that use the blend."""

    exact = True

    def __init__(self, name: str, function: Combine, count: int) -> None:
        self.name, self.members = name, tuple(range(count))
        self.recipe: NativeBlend | None = None
        self._function = function

    def combine(self, logits: Sequence[Tensor]) -> Tensor:
        """Return the function's rows ``[R, V]`` in double precision.

        Raises:
            InvalidInput: the function raised, or did not return a floating-point tensor ``[R, V]``.
        """
        field = f"ensemble {self.name}"
        try:
            result = self._function([rows.clone() for rows in logits])
        except Exception as error:  # no exception of a user may end requests with another blend
            raised = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise InvalidInput(field, words(f"a function that raised {raised}"), "one that does not") from error
        if not isinstance(result, Tensor) or result.shape != logits[0].shape or not result.is_floating_point():
            found = f"a tensor {list(result.shape)}" if isinstance(result, Tensor) else f"a {type(result).__name__}"
            allowed = f"a floating-point tensor {list(logits[0].shape)}"
            raise InvalidInput(field, words(f"a function that returned {found}"), allowed)
        return torch.nan_to_num(result.double(), nan=torch.nan, posinf=torch.nan, neginf=-torch.inf)
