"""A server by its URL as a comparable system."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from pydantic import Field

from cospec.bench.counters import LoadSample, SpeculationCounters
from cospec.bench.http_client import Endpoint, StreamClock, complete, probe, read_load
from cospec.bench.request_record import Params, Prompt, Timing
from cospec.plugin_options import Options, parse


class UrlOptions(Options):
    """Options of a server in a comparison.

    Attributes:
        model: of the comparison; only its tokenizer is used.
        served_model_name: the server's model name; None asks the server.
    """

    url: str
    model: str = "zoo"
    served_model_name: str | None = None
    chat: bool = False
    api_key: str | None = None
    extra_body: dict[str, Any] = Field(default_factory=dict)
    timeout: float = Field(default=600.0, gt=0, strict=False)


class UrlSystem:
    """Sends each batch at once over persistent connections."""

    def __init__(self, name: str, endpoint: Endpoint) -> None:
        self.name = name
        self._endpoint = endpoint
        self._runner: asyncio.Runner | None = None
        self._http: httpx.AsyncClient | None = None

    @classmethod
    def build(cls, name: str, options: Mapping[str, Any]) -> UrlSystem:
        """See ``systems.Buildable``."""
        own = parse(UrlOptions, options, f"{name}.")
        return cls(name, Endpoint(own.url, own.served_model_name, own.chat, own.api_key, own.extra_body, own.timeout))

    def start(self) -> None:
        """See ``systems.System``.

        Raises:
            InvalidInput: no server answers at the URL.
        """
        self._runner, self._http = asyncio.Runner(), self._endpoint.connect()
        try:
            self._endpoint = self._runner.run(probe(self._http, self._endpoint))
        except BaseException:
            self.stop()
            raise

    def run(self, prompts: Sequence[Prompt], params: Params) -> list[Timing]:
        """See ``systems.System``."""
        runner, http = self._started()

        async def together() -> list[Timing]:
            clock = StreamClock()
            return await asyncio.gather(*(complete(http, self._endpoint, one, params, clock) for one in prompts))

        return runner.run(together())

    def counters(self) -> SpeculationCounters | None:
        """See ``systems.System``."""
        load = self._load()
        return None if load is None else load.counters

    def cost_per_hour(self) -> float:
        """See ``systems.System``."""
        load = self._load()
        return 0.0 if load is None else load.cost_per_hour

    def stop(self) -> None:
        """See ``systems.System``."""
        if self._runner is not None and self._http is not None:
            self._runner.run(self._http.aclose())
            self._runner.close()
        self._runner = self._http = None

    def _load(self) -> LoadSample | None:
        runner, http = self._started()
        return runner.run(read_load(http, 0.0))

    def _started(self) -> tuple[asyncio.Runner, httpx.AsyncClient]:
        assert self._runner is not None and self._http is not None, "start comes before run"
        return self._runner, self._http
