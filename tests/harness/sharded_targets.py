"""Targets in several processes: their requests, their tokens, and losses in the middle of requests."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from cospec.assembly.sharding import load_target
from cospec.config import EngineConfig
from cospec.core.engine import Engine
from cospec.core.interfaces import Model
from cospec.core.plugin_base import Drafter
from cospec.core.types import Event, Request
from cospec.distributed.model import ShardedModel
from cospec.models.loading import LoadOptions, load_stage
from cospec.models.shard import Shard
from cospec.models.weight_cache import WeightCache
from cospec.sampling_params import SamplingParams
from cospec.text.input_processor import make_requests
from harness.llamas import BYTES_PER_TOKEN, PAGE, VOCAB, llama_engine, write_pair
from harness.toys import run_all, tokens_of

LAYERS = 4
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=16),
    "edited": SamplingParams(temperature=0, max_tokens=16, repetition_penalty=1.3, min_tokens=5, logprobs=2),
    "seeded": SamplingParams(temperature=0.9, max_tokens=16, seed=11, n=2),
}


@dataclass(frozen=True)
class Folders:
    target: Path
    drafter: Path

    @classmethod
    def write(cls, folder: Path) -> Folders:
        """Write a small target and a drafter like the target."""
        found = cls(folder / "target", folder / "drafter")
        write_pair(found.target, found.drafter, layers=LAYERS)
        return found


def pack_parts(target: str | Path, options: LoadOptions, stages: int, ranks: int) -> None:
    """Pack the weights of all parts in this process, which has imported transformers, for the start of the stages."""
    for stage, rank in product(range(stages), range(ranks)):
        part = Shard(stage, stages, rank, ranks)
        load_stage(str(target), replace(options, shard=part, num_pages=1), None if ranks == 1 else lambda _: None)


@contextmanager
def sharded(folders: Folders, stages: int, ranks: int = 1, pages: int = 200, **config: Any) -> Iterator[ShardedModel]:
    cache = WeightCache(1 << 30)
    options = LoadOptions(
        device="cpu", dtype="float32", page_size=PAGE, cache_bytes=pages * PAGE * BYTES_PER_TOKEN, weight_cache=cache
    )
    pack_parts(folders.target, options, stages, ranks)
    made = EngineConfig(pipeline_parallel_size=stages, tensor_parallel_size=ranks, threads=1, **config)
    model, end = load_target(made, [(str(folders.target), options)], options)
    try:
        assert isinstance(model, ShardedModel)
        yield model
    finally:
        end()


def requests(params: SamplingParams) -> list[Request]:
    """Prompts of several lengths, some of which begin alike."""
    prompts = [[(3 * n + i * i) % VOCAB if i > 20 else i for i in range(8 + 9 * n)] for n in range(6)]
    return [each for n, prompt in enumerate(prompts) for each in make_requests(f"r{n}", prompt, params)]


def outputs(
    target: Model, drafter: Drafter | None, params: SamplingParams, **config: Any
) -> dict[str, tuple[int, ...]]:
    return tokens_of(run_all(llama_engine(target, drafter, **config), requests(params)))


def disturbed(engine: Engine, disturb: Callable[[], None]) -> dict[str, list[Event]]:
    """Run all requests; ``disturb`` is called once in the middle."""
    events: dict[str, list[Event]] = {}
    for request in requests(PARAMS["seeded"]):
        events[request.id] = []
        engine.add(request)
    steps = 0
    while engine.has_work:
        steps += 1
        if steps == 12:
            disturb()
        for event in engine.step():
            events[event.id].append(event)
        engine.check_integrity()
    return events


def running(pid: int) -> bool:
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(found.strip()) and not found.strip().startswith("Z")
