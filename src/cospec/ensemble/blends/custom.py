"""Blends that users write: any function of the models' logits, registered under a name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cospec.errors import InvalidInput, words
from cospec.native.library import NativeBlend
from cospec.options import Options as PluginOptions
from cospec.registry import BLENDS

Combine = Callable[[Sequence[Tensor]], Tensor]
"""The logits of every model, ``[R, V]`` each, to the law's ``[R, V]``; each row by itself, the same for any R."""


class FunctionOptions(PluginOptions):
    """None."""


@dataclass(frozen=True, slots=True, eq=False)
class FunctionBlend:
    """A user's function in the place of a class of blends. Each registration is an object of its own."""

    name: str
    function: Combine
    Options: ClassVar[type[PluginOptions]] = FunctionOptions

    def build(self, options: FunctionOptions, count: int) -> Custom:
        """For any number of models."""
        return Custom(self.name, self.function, count)


def register_blend(name: str, function: Combine) -> None:
    """Make ``{"method": name}`` mean ``function``; a later registration replaces an earlier one.

    Raises:
        InvalidInput: cospec or an installed package has the name, or the function cannot be called.
    """
    if not callable(function):
        raise InvalidInput("blend function", function, "a function of a list of logits")
    BLENDS.register(name, FunctionBlend(name, function))


class Custom:
    """A user's function. What it returns is checked; what it raises ends the requests that asked for it."""

    def __init__(self, name: str, function: Combine, count: int) -> None:
        self.name, self.members = name, tuple(range(count))
        self.recipe: NativeBlend | None = None
        self._function = function

    def combine(self, logits: Sequence[Tensor]) -> Tensor:
        """Raises ``InvalidInput`` when the function raises, or returns something else than ``[R, V]`` numbers."""
        field = f"law {self.name}"
        try:
            result = self._function([rows.clone() for rows in logits])
        except Exception as error:  # whatever it is, it must not end the requests that have another law
            raised = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise InvalidInput(field, words(f"a function that raised {raised}"), "one that does not") from error
        if not isinstance(result, Tensor) or result.shape != logits[0].shape or not result.is_floating_point():
            found = f"a tensor {list(result.shape)}" if isinstance(result, Tensor) else f"a {type(result).__name__}"
            allowed = f"a floating-point tensor {list(logits[0].shape)}"
            raise InvalidInput(field, words(f"a function that returned {found}"), allowed)
        return torch.nan_to_num(result.double(), nan=torch.nan, posinf=torch.nan, neginf=-torch.inf)
