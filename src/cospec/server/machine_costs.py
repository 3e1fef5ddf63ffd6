"""The cost of a server's machines, which may join, leave and change their number while the server runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress

from cospec.core.interfaces import Clock
from cospec.errors import CospecError
from cospec.metrics.engine_counters import SECONDS_PER_HOUR, prices_of
from cospec.runtime.engine_client import EngineClient

NOTE_SECONDS = 5.0  # between two notes of the prices


class MachineCosts:
    """Adds up prices over time. Prices hold from their ``note`` to the next; the first prices hold from the start.

    Prices that fell hold for one note more: a replica that is busy for seconds does not answer.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock, self._since = clock, clock()
        self._spent = 0.0
        self._per_hour: float | None = None  # of all machines, since the latest note
        self._noted = 0.0  # the latest note

    def note(self, prices: Mapping[str, float]) -> None:
        """Note the present prices per hour, by component."""
        self._spent = self.spent(prices)
        noted = sum(prices.values())
        self._since, self._per_hour, self._noted = self._clock(), max(noted, self._noted), noted

    def spent(self, prices: Mapping[str, float]) -> float:
        """Return the cost since the start; changes nothing.

        Args:
            prices: the present prices, which count where none were noted.
        """
        per_hour = sum(prices.values()) if self._per_hour is None else self._per_hour
        return self._spent + per_hour * (self._clock() - self._since) / SECONDS_PER_HOUR


async def watch(client: EngineClient, costs: MachineCosts) -> None:
    """Note the prices of an engine's machines at intervals, for ever; without an answer the latest prices hold."""
    while True:
        with suppress(CospecError):
            costs.note(prices_of(await client.metrics()))
        await asyncio.sleep(NOTE_SECONDS)
