"""Recorded decoding steps on a CUDA device equal ordinary ones."""

from __future__ import annotations

import logging

import pytest
import torch

from cospec.models.attention.backend import AttentionBackend
from cospec.models.attention.sdpa import SDPA
from cospec.models.attention.triton_paged import TritonAttention
from cospec.models.cuda_graphs import CudaRecorder, GraphRunner, Step
from cospec.models.kv_cache import LayerShape
from cospec.models.llama import FusedLlama
from cospec.models.weights.fp32 import Fp32
from harness.decoding import decode, play, prompts, runner_of
from harness.tiny import VOCAB, tiny

DEVICE = "cuda"
LARGEST = {torch.float32: 1e-3, torch.bfloat16: 5e-2}  # difference, relative to the largest logit
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Counted:
    """Records as usual and counts how often a recording was repeated."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0
        self._record = CudaRecorder()

    def __call__(self, step: Step) -> Step:
        self.recorded += 1
        replay = self._record(step)

        def counted() -> torch.Tensor:
            self.replayed += 1
            return replay()

        return counted


@pytest.mark.parametrize("attention", [SDPA, TritonAttention()], ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3"])
def test_a_run_with_graphs_equals_one_without(
    name: str, dtype: torch.dtype, attention: AttentionBackend, caplog: pytest.LogCaptureFixture
) -> None:
    """Recorded Triton kernels are compared with stock attention that is not recorded."""
    reason = attention.why_not(torch.device(DEVICE), [LayerShape(2, 32)], 16)
    if reason:
        pytest.skip(reason)
    recorder = Counted()
    runner, kv = runner_of(name, DEVICE, dtype, attention)
    found = play(GraphRunner(runner, recorder), kv)
    wanted = play(*runner_of(name, DEVICE, dtype))
    assert not caplog.records, caplog.text
    assert (recorder.recorded, recorder.replayed) == (4, 10), "four kinds of batches, whose ten steps all ran recorded"
    for one, two in zip(found, wanted, strict=True):
        assert one.shape == two.shape
        if one.numel():
            assert float((one - two).abs().max()) <= LARGEST[dtype] * float(two.abs().max())


def test_graphs_of_two_models_run_at_the_same_time() -> None:
    """Both are captured in one thread, and replayed on streams of their own; products of one row divide their sums."""
    wide = torch.randn(2, 4096, 4096, device=DEVICE, dtype=torch.bfloat16) / 64
    replays, rows = [], [torch.randn(1, 4096, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    for weight, row in zip(wide, rows, strict=True):

        def step(weight: torch.Tensor = weight, row: torch.Tensor = row) -> torch.Tensor:
            states = row
            for _ in range(20):
                states = torch.nn.functional.linear(states, weight)
            return states

        replays.append(CudaRecorder()(step))
    wanted = [replay().clone() for replay in replays]
    streams = [torch.cuda.Stream() for _ in replays]
    torch.cuda.synchronize()
    for _ in range(100):
        found = []
        for replay, stream in zip(replays, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(replay().clone())
        torch.cuda.synchronize()
        assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))


def test_graphs_outlive_the_captures_of_compiled_code() -> None:
    """Compiled code frees the work memory of all streams; then other tensors fill what was freed."""
    weight, row = (torch.randn(size, 4096, device=DEVICE, dtype=torch.bfloat16) / 64 for size in (4096, 1))

    def step() -> torch.Tensor:
        states = row
        for _ in range(20):
            states = torch.nn.functional.linear(states, weight)
        return states

    replay = CudaRecorder()(step)
    wanted = replay().clone()
    compiled = torch.compile(step, mode="reduce-overhead")
    for _ in range(3):
        compiled()
    torch.cuda.empty_cache()
    filling = [torch.full((1 << 20,), float("nan"), device=DEVICE) for _ in range(64)]
    assert torch.equal(replay(), wanted)
    assert all(part.isnan().all() for part in filling), "a product wrote into memory of another tensor"


def test_results_outlive_later_steps() -> None:
    runner, kv = runner_of("llama", DEVICE)
    graphs = GraphRunner(runner, CudaRecorder())
    graphs.logits(prompts(kv), kv.layers)
    first, second = (graphs.logits(decode(kv, step, 0, 1, 2), kv.layers) for step in (0, 1))
    kept = second.clone()
    third = graphs.logits(decode(kv, 2, 0, 1, 2), kv.layers)
    assert torch.equal(second, kept)
    assert not torch.equal(third, second) and first.shape == (3, VOCAB)


def test_failed_recordings_leave_the_device_usable(caplog: pytest.LogCaptureFixture) -> None:
    """A step that reads a result on the host cannot be recorded."""

    def record(step: Step) -> Step:
        def reading() -> torch.Tensor:
            logits = step()
            return logits * float(logits.isfinite().all().item())

        return CudaRecorder()(reading)

    runner, kv = runner_of("llama", DEVICE)
    with caplog.at_level(logging.WARNING):
        found = play(GraphRunner(runner, record), kv)
    assert len(caplog.records) == 1
    for one, two in zip(found, play(*runner_of("llama", DEVICE)), strict=True):
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)


def test_llamas_on_a_gpu_use_graphs() -> None:
    _, kv = runner_of("llama", DEVICE)
    fused = FusedLlama.from_hf(tiny("llama").to(DEVICE), kv, Fp32())
    assert isinstance(fused.runner, GraphRunner)
