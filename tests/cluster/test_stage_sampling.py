"""The last stage of a sharded target draws tokens: the tokens of one process, and few bytes on the link."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cospec.assembly.sharding import load_target
from cospec.config import EngineConfig
from cospec.core.interfaces import Model
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.core.plugin_base import Drafter
from cospec.core.types import Request
from cospec.distributed.model import ShardedModel
from cospec.distributed.pipeline import WindowFuture
from cospec.drafters.model import ModelDrafter
from cospec.models.loading import LoadOptions
from cospec.models.weight_cache import WeightCache
from cospec.sampling_params import SamplingParams
from cospec.text.input_processor import make_requests
from harness.llamas import BYTES_PER_TOKEN, PAGE, VOCAB, llama_engine, load
from harness.sharded_targets import pack_parts
from harness.toys import ScriptedDrafter, run_all, tokens_of

pytestmark = pytest.mark.cluster

PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=16),
    "seeded": SamplingParams(temperature=0.9, max_tokens=16, seed=11),
    "truncated": SamplingParams(temperature=1.1, max_tokens=16, seed=12, top_k=20, top_p=0.9, min_p=0.01),
    "edited": SamplingParams(temperature=0.9, max_tokens=16, seed=13, repetition_penalty=1.3),
    "logprobs": SamplingParams(temperature=0, max_tokens=16, logprobs=1),
}
SOME_TREE = [3, 9, 27, 4, 12, 36, 5], [-1, -1, 0, 1, 1, 4, 2]
WINDOW_BYTES = 100  # of a window's result with tokens of one request; logits have 4 * VOCAB bytes per row


class SeenTarget(ShardedModel):
    """The same stages; keeps the slices that were sent, and may change them."""

    def __init__(self, model: ShardedModel, change: Callable[[SequenceSlice], SequenceSlice] = lambda part: part):
        super().__init__(model.name, model.pipeline, model.pages, (VOCAB, model.max_len), model.max_in_flight)
        self._change = change
        self.batches: list[TokenBatch] = []

    def submit(self, batch: TokenBatch) -> WindowFuture:
        self.batches.append(batch)
        return super().submit(TokenBatch(tuple(self._change(part) for part in batch.slices)))


@pytest.fixture(scope="module")
def target(folders: tuple[Path, Path]) -> Iterator[ShardedModel]:
    size, cache = 200 * PAGE * BYTES_PER_TOKEN, WeightCache(1 << 30)
    options = LoadOptions(device="cpu", dtype="float32", page_size=PAGE, cache_bytes=size, weight_cache=cache)
    pack_parts(folders[0], options, 2, 1)
    model, end = load_target(EngineConfig(pipeline_parallel_size=2, threads=1), [(str(folders[0]), options)], options)
    assert isinstance(model, ShardedModel)
    yield model
    end()


def requests(*names: str) -> list[Request]:
    return [
        request
        for number, name in enumerate(names)
        for request in make_requests(
            f"{name}{number}", [(7 * number + place) % VOCAB for place in range(9)], PARAMS[name]
        )
    ]


def outputs(target: Model, drafter: Drafter | None, *names: str) -> dict[str, tuple[int, ...]]:
    engine = llama_engine(target, drafter, k=3, max_nodes=7)
    found = tokens_of(run_all(engine, requests(*names)))
    assert target.pages.usage == 0
    return found


def test_requests_of_both_kinds_share_windows(folders: tuple[Path, Path], target: ShardedModel) -> None:
    names = [*PARAMS, *PARAMS]
    wanted = outputs(load(folders[0]), None, *names)
    for drafter in (None, ModelDrafter(load(folders[1])), ScriptedDrafter(*SOME_TREE)):
        seen = SeenTarget(target)
        assert outputs(seen, drafter, *names) == wanted
        kinds = [{part.sampling is None for part in batch.slices} for batch in seen.batches]
        assert {True, False} in kinds
        assert any(part.parents and part.sampling for batch in seen.batches for part in batch.slices) == bool(drafter)


def test_another_seed_in_the_stage_is_seen(folders: tuple[Path, Path], target: ShardedModel) -> None:
    """The control: the stage's draws decide the tokens of seeded requests."""

    def other(part: SequenceSlice) -> SequenceSlice:
        return part if part.sampling is None else replace(part, sampling=replace(part.sampling, seed=5))

    wanted, found = outputs(load(folders[0]), None, *PARAMS), outputs(SeenTarget(target, other), None, *PARAMS)
    assert [found[id] != wanted[id] for id in wanted] == [False, True, True, False, False]


@pytest.mark.parametrize("name", list(PARAMS))
def test_bytes_of_a_window(target: ShardedModel, name: str) -> None:
    engine = llama_engine(target, None)
    before = target.pipeline.result_bytes
    run_all(engine, requests(name))
    per_window = (target.pipeline.result_bytes - before) / engine.metrics().steps
    if name in ("edited", "logprobs"):
        assert per_window > 4 * VOCAB
    else:
        assert per_window <= WINDOW_BYTES
