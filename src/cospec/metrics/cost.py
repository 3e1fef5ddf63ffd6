"""Prices that the user declares, as prices of tokens (CoSine tables 1 and 3). Any currency."""

from __future__ import annotations

from collections.abc import Mapping

SECONDS_PER_HOUR = 3600.0
MILLION = 1e6


def price_per_million(cost_per_hour: float, tokens: float, seconds: float) -> float | None:
    """The price of a million output tokens, of machines that wrote ``tokens`` in ``seconds``; None without tokens."""
    return cost_per_hour / SECONDS_PER_HOUR * seconds / tokens * MILLION if tokens else None


def present(prices: Mapping[str, float], engines: int) -> dict[str, float]:
    """Prices per hour of all machines: every engine has a target and drafters of its own."""
    return {name: price * engines for name, price in prices.items() if price}
