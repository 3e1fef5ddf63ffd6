"""The cospec engine in this process as a comparable system."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from cospec.assembly.build import build_engine
from cospec.bench.counters import SpeculationCounters, from_engine
from cospec.bench.request_record import Chunk, Params, Prompt, Timing
from cospec.config import EngineConfig
from cospec.core.engine import Engine
from cospec.core.types import Event, Request
from cospec.errors import CospecError
from cospec.metrics.engine_counters import prices_of
from cospec.sampling_params import SamplingParams
from cospec.text.input_processor import make_requests


class EngineSystem:
    """An engine with one configuration. Its options are ``EngineConfig``'s keys.

    Prefix caching is off by default, because repetitions would find their prompts in the cache.
    """

    def __init__(self, name: str, config: EngineConfig) -> None:
        self.name = name
        self._config = config
        self._engine: Engine | None = None
        self._numbers = count()

    @classmethod
    def build(cls, name: str, options: Mapping[str, Any]) -> EngineSystem:
        """See ``systems.Buildable``."""
        return cls(name, EngineConfig.build({"enable_prefix_caching": False, **options}))

    @property
    def engine(self) -> Engine:
        """The engine after ``start``."""
        assert self._engine is not None, "start comes before run"
        return self._engine

    def start(self) -> None:
        """See ``systems.System``."""
        self._engine = build_engine(self._config)

    def run(self, prompts: Sequence[Prompt], params: Params) -> list[Timing]:
        """See ``systems.System``; all prompts are in the engine from the first step."""
        started = time.perf_counter()
        sampling = SamplingParams(
            temperature=params.temperature,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            seed=params.seed,
        )
        requests = [self._request(prompt, sampling) for prompt in prompts]
        refused: dict[str, str] = {}
        for request in requests:
            try:
                self.engine.add(request)
            except CospecError as error:
                refused[request.id] = str(error)
        seen: dict[str, list[tuple[float, Event]]] = {request.id: [] for request in requests}
        while self.engine.has_work:
            events = self.engine.step()
            now = time.perf_counter() - started
            for event in events:
                seen[event.id].append((now, event))
        end = time.perf_counter() - started
        return [
            _timing(prompt, request, seen[request.id], end, refused.get(request.id))
            for prompt, request in zip(prompts, requests, strict=True)
        ]

    def counters(self) -> SpeculationCounters | None:
        """See ``systems.System``."""
        return from_engine(dataclasses.asdict(self.engine.metrics()))

    def cost_per_hour(self) -> float:
        """See ``systems.System``."""
        return sum(prices_of(dataclasses.asdict(self.engine.metrics())).values())

    def stop(self) -> None:
        """See ``systems.System``."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        gc.collect()

    def _request(self, prompt: Prompt, sampling: SamplingParams) -> Request:
        ids = list(self.engine.tokenizer.encode(prompt.text))
        (request,) = make_requests(f"bench-{next(self._numbers)}", ids, sampling, arrival=time.monotonic())
        return request


def _timing(
    prompt: Prompt, request: Request, seen: Sequence[tuple[float, Event]], end: float, refused: str | None
) -> Timing:
    last = seen[-1][1] if seen else None
    stats = last.stats if last is not None else None
    error = refused or (last.error if last is not None else None)
    return Timing(
        id=prompt.id,
        arrival=0.0,
        sent=0.0,
        end=seen[-1][0] if seen else end,
        chunks=tuple(Chunk(at, event.text) for at, event in seen if event.text),
        category=prompt.category,
        prompt_tokens=len(request.prompt),
        reported_tokens=sum(len(event.tokens) for _, event in seen),
        stats={} if stats is None else dataclasses.asdict(stats),
        finish_reason=last.finish.value if last is not None and last.finish is not None else None,
        error=error,
        error_kind=None if error is None else ("refused" if refused else "engine"),
    )
