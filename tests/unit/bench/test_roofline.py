"""What a token costs in bytes and operations, and which share of the device that is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from cospec.bench.roofline import Device, StepCost, bandwidth, cost_of, figures, flop_rate
from cospec.core.stats import StepStats, StepTimes


def stats(sequences: int, batched: int, context: int, committed: int, target: float, total: float) -> StepStats:
    return StepStats(
        step=0, sequences=sequences, batched_tokens=batched, context_tokens=context, depth=0,
        proposed=batched - sequences, accepted=0, committed=committed, times=StepTimes(0.0, target), total=total,
    )  # fmt: skip


def test_shares_are_the_least_time_over_the_measured() -> None:
    """Weights of 80 bytes and 2 rounds with 10 tokens of cache: 180 bytes at 100 bytes/s take 1.8 s of 3.6."""
    cost, device = StepCost(weight_bytes=80.0, cache_bytes=1.0, operations=10.0), Device(100.0, 1e6)
    found = figures(cost, [stats(1, 4, 10, 2, 1.8, 2.0), stats(1, 4, 10, 4, 1.8, 2.0)], device)
    assert found["tokens"] == 6
    assert found["megabytes_per_token"] == pytest.approx(180 / 6 / 1e6)
    assert found["megaflop_per_token"] == pytest.approx(80 / 6 / 1e6)
    assert found["intensity"] == pytest.approx(80 / 180)
    assert found["share_of_target"] == pytest.approx(0.5)
    assert found["share_of_step"] == pytest.approx(0.45)


def test_arithmetic_binds_where_it_takes_longer() -> None:
    cost = StepCost(weight_bytes=1.0, cache_bytes=0.0, operations=100.0)
    found = figures(cost, [stats(1, 5, 0, 5, 10.0, 10.0)], Device(1e9, 100.0))
    assert found["floor_ms_per_token"] == pytest.approx(1000.0)
    assert found["share_of_target"] == pytest.approx(0.5)


@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_that_is_no_output_layer_is_not_read(tmp_path: Path, tied: bool) -> None:
    config = transformers.LlamaConfig(
        vocab_size=10, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=tied,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).float()
    model.save_pretrained(tmp_path)
    every = sum(parameter.numel() for parameter in model.parameters())
    read = every if tied else every - 80
    found = cost_of(str(tmp_path))
    assert found == StepCost(4.0 * read, 2.0 * 2 * 1 * 4 * 4, 2.0 * read)
    assert cost_of(str(tmp_path), "bfloat16").weight_bytes == 2.0 * read
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    kept = [each for each in matrices if tied or each is not model.model.embed_tokens.weight]
    norms = every - sum(each.numel() for each in matrices)
    int8 = sum(each.numel() + 4 * each.shape[0] for each in kept) + 4 * norms
    assert cost_of(str(tmp_path), quantization="int8").weight_bytes == int8


def test_the_device_is_measured() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    assert 0.1 < bandwidth(8 << 20) < 10_000
    assert 1e8 < flop_rate() < 1e15
    assert 1e8 < flop_rate(dtype=torch.bfloat16) < 1e15
    torch.set_num_threads(before)


def test_the_better_of_two_measurements_of_a_device_counts() -> None:
    assert Device(1.0, 5.0).best(Device(2.0, 4.0)) == Device(2.0, 5.0)
