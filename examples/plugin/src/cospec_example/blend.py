"""The product of the models' distributions (product of experts; Hinton 2002): a token needs the consent of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from cospec.native.library import NativeBlend
from cospec.plugin_options import Options


class ProductOptions(Options):
    """Keys of ``ensemble`` for this blend.

    Attributes:
        power: of every model's probability; None is one part of as many as there are models, the geometric mean.
    """

    power: float | None = Field(default=None, gt=0, le=10)


class Product:
    """``softmax(power * sum of the models' log-probabilities)``."""

    Options: ClassVar[type[ProductOptions]] = ProductOptions

    def __init__(self, count: int, power: float | None) -> None:
        self.members = tuple(range(count))
        self.recipe: NativeBlend | None = None  # the native library does not have this blend
        self.name = "product" if power is None else f"product(power={power:g})"
        self._power = 1 / count if power is None else power

    @classmethod
    def build(cls, options: ProductOptions, count: int) -> Product:
        """For any number of models."""
        return cls(count, options.power)

    def combine(self, logits: Sequence[Tensor]) -> Tensor:
        """``[R, V]`` for each model to ``[R, V]``, in double precision."""
        return self._power * torch.stack([torch.log_softmax(rows.double(), -1) for rows in logits]).sum(0)
