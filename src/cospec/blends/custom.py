"""Blends that users write: any function of the models' logits, known by a name."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Final

import torch
from torch import Tensor

from cospec.errors import InvalidInput, words
from cospec.native import Recipe
from cospec.registry import BLENDS

Combine = Callable[[Seq[Tensor]], Tensor]
"""The logits of every model, ``[R, V]`` each, to the law's ``[R, V]``; each row by itself, the same for any R."""


class UserBlends:
    """Functions by name."""

    def __init__(self) -> None:
        self._functions: dict[str, Combine] = {}

    def register(self, name: str, function: Combine) -> None:
        """Make ``{"blend": name}`` mean ``function``; a later registration replaces an earlier one.

        Raises:
            InvalidInput: the name is taken by a built-in blend, or the function cannot be called.
        """
        if name in BLENDS:
            raise InvalidInput("blend name", name, "a name that no built-in blend has")
        if not callable(function):
            raise InvalidInput("blend function", function, "a function of a list of logits")
        self._functions[name] = function

    def get(self, name: object) -> Combine | None:
        """The function of that name."""
        return self._functions.get(name) if isinstance(name, str) else None

    @property
    def names(self) -> list[str]:
        """In the order of registration."""
        return list(self._functions)


USER_BLENDS: Final = UserBlends()
register_blend = USER_BLENDS.register


class Custom:
    """A user's function. What it returns is checked; what it raises ends the requests that asked for it."""

    def __init__(self, name: str, function: Combine, count: int) -> None:
        self.name, self.members = name, tuple(range(count))
        self.recipe: Recipe | None = None
        self._function = function

    def combine(self, logits: Seq[Tensor]) -> Tensor:
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
