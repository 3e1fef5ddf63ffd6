"""The distribution of a single model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from cospec.native.library import PLAIN, NativeBlend
from cospec.options import Options


class SingleOptions(Options):
    """The identity blend has no options."""


class Single:
    """The identity blend; responses call it ``target``. Among several models, it reads the first."""

    Options: ClassVar[type[SingleOptions]] = SingleOptions
    name = "target"
    members: tuple[int, ...] = (0,)
    recipe: NativeBlend | None = PLAIN

    @classmethod
    def build(cls, options: SingleOptions, count: int) -> Single:
        """Build the blend; the number of models does not matter."""
        return cls()

    def combine(self, logits: Sequence[Tensor]) -> Tensor:
        """Return the only member of ``logits``, ``[R, V]``."""
        (only,) = logits
        return only
