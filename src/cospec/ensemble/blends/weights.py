"""Weights of a blend, as a configuration gives them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import Field, FiniteFloat

from cospec.errors import InvalidInput, words
from cospec.options import Options


class WeightOptions(Options):
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
            InvalidInput: both options are given, the number of weights is not ``count``, a weight is outside
                ``least`` to ``most``, or the weights do not sum to 1.
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
