"""Blends with one weight per model: one model alone, a mixture of probabilities, and a sum of logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field, FiniteFloat
from torch import Tensor

from cospec.core.sampling import log_softmax, softmax
from cospec.errors import InvalidInput, words
from cospec.native import library
from cospec.native.library import PLAIN, NativeBlend, Source
from cospec.plugin_options import Options


class BlendWeights(Options):
    """Options of ``weighted`` and ``realign``: at most one of the two; without either, all weights are equal.

    Attributes:
        weights: one weight per model; the sum is 1.
        lambda_: with two models, the weight of the second; the first has the rest.
    """

    weights: list[FiniteFloat] | None = None
    lambda_: FiniteFloat | None = Field(default=None, alias="lambda")

    def resolve(self, count: int, least: float, most: float) -> tuple[float, ...]:
        """Return the weights of ``count`` models.

        Raises:
            InvalidInput: both options are given, or the number of weights is not ``count``. Also if a weight is
                outside ``least`` to ``most``, or the sum of the weights is not 1.
        """
        self._check_within(least, most)
        if self.weights is None:
            if self.lambda_ is None:
                return (1 / count,) * count
            if count != 2:
                raise InvalidInput(
                    "ensemble.lambda", self.lambda_, f"given for two models; for {count}, give ensemble.weights"
                )
            return 1 - self.lambda_, self.lambda_
        if self.lambda_ is not None:
            raise InvalidInput("ensemble.lambda", self.lambda_, "left out when ensemble.weights is given")
        if len(self.weights) != count:
            raise InvalidInput("ensemble.weights", self.weights, f"one weight for each of the {count} models")
        if not math.isclose(total := math.fsum(self.weights), 1.0, abs_tol=1e-6):
            raise InvalidInput(
                "ensemble.weights", words(f"{self.weights}, whose sum is {total:g}"), "weights whose sum is 1"
            )
        return tuple(self.weights)

    def _check_within(self, least: float, most: float) -> None:
        """Check the bounds first, because sums of unbounded weights overflow."""
        if not all(least <= weight <= most for weight in self.weights or ()):
            raise InvalidInput("ensemble.weights", self.weights, f"from {least:g} to {most:g}")
        lambda_ = 0.0 if self.lambda_ is None else self.lambda_
        if not (least <= lambda_ <= most and least <= 1 - lambda_ <= most):
            raise InvalidInput(
                "ensemble.lambda", self.lambda_, f"from {max(least, 1 - most):g} to {min(most, 1 - least):g}"
            )


def display_name(name: str, weights: Sequence[float]) -> str:
    """Return the name of the blend in responses, such as ``weighted(0.6, 0.4)``."""
    return f"{name}({', '.join(f'{weight:g}' for weight in weights)})"


def native_reads(logits: Sequence[Tensor]) -> bool:
    """Return whether the native library can read the logits of all models."""
    return all(map(library.reads, logits))


def native_combine(logits: Sequence[Tensor], recipe: NativeBlend) -> Tensor:
    """Return the combined rows ``[R, V]`` in double precision, of logits that ``native_reads``."""
    return torch.from_numpy(library.blend_rows(Source(logits, recipe)))


class SingleOptions(Options):
    """The identity blend has no options."""


class Single:
    """The identity blend; responses call it ``target``. Among several models, it reads the first."""

    Options: ClassVar[type[SingleOptions]] = SingleOptions
    name = "target"
    exact = True
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


class Weighted:
    """``sum_i lambda_i p_i``. A model of weight 0 is no member, so it never runs.

    The distributions are mixed at temperature 1. The request's parameters then apply to the logarithm of the mixture,
    as they apply to one model's logits. At temperature 0 the mixture's most likely token is taken. At temperature 1
    without penalties or truncation, a proposal of model i is accepted with probability ``lambda_i`` or more (CoS
    theorem 3.2).
    """

    Options: ClassVar[type[BlendWeights]] = BlendWeights
    exact = True

    def __init__(self, weights: Sequence[float]) -> None:
        self.name = display_name("weighted", weights)
        self.members = tuple(member for member, weight in enumerate(weights) if weight > 0)
        self._weights = tuple(weights[member] for member in self.members)
        self.recipe = NativeBlend("mixture", self._weights) if len(self.members) > 1 else PLAIN

    @classmethod
    def build(cls, options: BlendWeights, count: int) -> Weighted:
        """Build the blend of ``count`` models; raises ``InvalidInput`` for unsuitable weights."""
        return cls(options.resolve(count, 0, 1))

    def combine(self, logits: Sequence[Tensor]) -> Tensor:
        """Return ``log sum_i lambda_i softmax(l_i)``, ``[R, V]`` in double precision.

        A row is NaN if any model's logits of this row are not numbers.
        """
        if len(self.members) == 1:
            return logits[0]
        if native_reads(logits):
            return native_combine(logits, self.recipe)
        ones = [1.0] * len(logits[0])
        mixed = sum(weight * softmax(rows, ones) for weight, rows in zip(self._weights, logits, strict=True))
        with np.errstate(divide="ignore"):
            result = torch.from_numpy(np.log(mixed))
        broken = torch.stack([~torch.isfinite(rows.amax(-1)) for rows in logits]).any(0)
        result[broken.to(result.device)] = torch.nan
        return result.to(logits[0].device)


MAX_WEIGHT = 100.0  # beyond this weight, rounding errors of the logits decide


class Realign:
    """``softmax(sum_i w_i l_i)``: the product of the models' distributions, each to the power of its weight.

    With an unaligned and an aligned model, ``lambda`` interpolates from the first to the second. A ``lambda`` above 1
    or below 0 extrapolates, so the weights only need to sum to 1.
    """

    Options: ClassVar[type[BlendWeights]] = BlendWeights
    exact = True

    def __init__(self, weights: Sequence[float]) -> None:
        self.name = display_name("realign", weights)
        self.members = tuple(member for member, weight in enumerate(weights) if weight)
        self._weights = tuple(weights[member] for member in self.members)
        self.recipe = PLAIN if self._weights == (1.0,) else NativeBlend("linear", self._weights)

    @classmethod
    def build(cls, options: BlendWeights, count: int) -> Realign:
        """Build the blend of ``count`` models; raises ``InvalidInput`` for unsuitable weights."""
        return cls(options.resolve(count, -MAX_WEIGHT, MAX_WEIGHT))

    def combine(self, logits: Sequence[Tensor]) -> Tensor:
        """Return log-probabilities of ``softmax(sum_i w_i l_i)``, ``[R, V]`` in double precision."""
        if self._weights == (1.0,):
            return logits[0]
        if native_reads(logits):
            return native_combine(logits, self.recipe)
        total = self._weights[0] * logits[0].double()
        for weight, rows in zip(self._weights[1:], logits[1:], strict=True):
            total += weight * rows.double()
        return log_softmax(total)
