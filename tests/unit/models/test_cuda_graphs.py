"""Steps of fixed size equal ordinary ones, and a recording that fails costs nothing but speed.

The recorder of these tests repeats the step itself, so all but the recording is checked without a GPU.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.models.attention.sdpa import SDPA
from cospec.models.cuda_graphs import (
    GraphRunner,
    GraphShape,
    StaticBatch,
    Step,
    graph_shape_of,
    step_of,
)
from cospec.models.input_batch import InputBatch
from cospec.models.kv_cache import KVCache
from harness.decoding import LENGTHS, decode, play, prompts, runner_of
from harness.tiny import VOCAB

CPU = torch.device("cpu")


def shape_of(batch: InputBatch) -> GraphShape | None:
    return graph_shape_of(batch, SDPA.capture_entries)


def again(step: Step) -> Step:
    """Records nothing: does the step again, into the same tensor."""
    kept: Tensor = step()
    return lambda: kept.copy_(step())


def entries(kv: KVCache) -> list[Tensor]:
    return [x for layer in kv.layers for x in (layer.keys, layer.values)]


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3"])
@pytest.mark.parametrize("numbers", [(0,), (3, 0), (0, 1, 2, 3, 4), (4, 2, 1)], ids=str)
def test_steps_of_fixed_size_equal_ordinary_ones(name: str, numbers: tuple[int, ...]) -> None:
    runner, kv = runner_of(name)
    runner.logits(prompts(kv), kv.layers)
    batch = decode(kv, 0, *numbers)
    bucket = shape_of(batch)
    assert bucket is not None and bucket.slices >= len(numbers)
    before = copy.deepcopy(kv.layers)
    wanted = runner.logits(batch, kv.layers)
    kept = [x.clone() for x in entries(kv)]
    for now, then in zip(kv.layers, before, strict=True):
        now.keys.copy_(then.keys)
        now.values.copy_(then.values)
    static = StaticBatch(bucket, batch.page_size, CPU)
    step = step_of(runner, static.batch, kv.layers)
    for other in (decode(kv, 0, 4, 3, 2, 1, 0), batch):  # values that another batch left do not matter
        if other.ids.shape[0] <= bucket.slices:
            static.fill(other)
            found = step()
    assert found.shape == (bucket.slices, VOCAB)
    torch.testing.assert_close(found[: len(numbers)], wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[len(numbers) :], wanted[:1].expand(bucket.slices - len(numbers), -1))
    if len(numbers) == len(LENGTHS):
        for one, two in zip(entries(kv), kept, strict=True):
            torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)


def test_buckets_are_powers_of_two() -> None:
    _, kv = runner_of("llama")
    assert shape_of(decode(kv, 0, 0)) == GraphShape(1, 16)
    assert shape_of(decode(kv, 0, 0, 1, 2)) == GraphShape(4, 16)
    assert shape_of(decode(kv, 0, 0, 1, 2, 3, 4)) == GraphShape(8, 16)
    assert shape_of(prompts(kv)) is None
    assert graph_shape_of(decode(kv, 0, 0, 1, 2), most_entries=1023) is None
    assert graph_shape_of(decode(kv, 0, 0), most_entries=0) is None, "a back end that captures nothing"
    chain = SequenceSlice("s0", 70, (1, 2, 3), parents=(-1, 0))
    assert shape_of(kv.pack(TokenBatch((chain, SequenceSlice("s1", 5, (3,)))))) == GraphShape(2, 16, 4)
    long = SequenceSlice("s0", 70, tuple(range(17)))
    assert shape_of(kv.pack(TokenBatch((long,)))) is None


def assert_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)


class Counted:
    """A recorder that counts."""

    def __init__(self, record: Callable[[Step], Step] = again) -> None:
        self.calls, self._record = 0, record

    def __call__(self, step: Step) -> Step:
        self.calls += 1
        return self._record(step)


def test_a_run_with_recorded_steps_equals_one_without(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Counted()
    runner, kv = runner_of("llama")
    found = play(GraphRunner(runner, recorder), kv)
    assert_equal(found, play(*runner_of("llama")))
    assert recorder.calls == 4, "for eight, four sequences and one, and two sequences of several rows"
    assert not caplog.records


def broken(step: Step) -> Step:
    raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nand so on")


def stale(step: Step) -> Step:
    """The graph of some other batch."""
    kept = step() * 1.01
    return lambda: kept


def no_numbers(step: Step) -> Step:
    return lambda: step() * float("nan")


@pytest.mark.parametrize(
    ("record", "words"), [(broken, "not permitted"), (stale, "logits differ"), (no_numbers, "logits differ by nan")]
)
def test_a_recording_that_fails_is_reported_once(
    record: Callable[[Step], Step], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Counted(record)
    runner, kv = runner_of("llama")
    with caplog.at_level(logging.WARNING):
        found = play(GraphRunner(runner, recorder), kv)
    assert_equal(found, play(*runner_of("llama")))
    assert recorder.calls == 1
    assert [words in record.getMessage() and "\n" not in record.getMessage() for record in caplog.records] == [True]


def test_other_pages_are_not_mistaken_for_those_recorded() -> None:
    runner, kv = runner_of("llama")
    graphs = GraphRunner(runner, again)
    first = play(graphs, kv)
    _, other = runner_of("llama")
    assert_equal(play(graphs, other), first)
