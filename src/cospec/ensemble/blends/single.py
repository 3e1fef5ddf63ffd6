"""The law of one model: its own distribution (spec section 2, ``single``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from cospec.native.library import PLAIN, NativeBlend
from cospec.options import Options


class SingleOptions(Options):
    """None."""


class Single:
    """The identity blend; the response declares it as ``target``. Of several models it is the first one's."""

    Options: ClassVar[type[SingleOptions]] = SingleOptions
    name = "target"
    members: tuple[int, ...] = (0,)
    recipe: NativeBlend | None = PLAIN

    @classmethod
    def build(cls, options: SingleOptions, count: int) -> Single:
        """The same for any number of models."""
        return cls()

    def combine(self, logits: Sequence[Tensor]) -> Tensor:
        """The only member of ``logits``, ``[R, V]``."""
        (only,) = logits
        return only
