"""A rollout in torch chooses what single steps choose, with and without captured steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from cospec.acceptance.device_draft_probs import DeviceProbs
from cospec.core.model_io import RolloutOutput, RolloutParams, SequenceSlice, TokenBatch
from cospec.core.sampling import softmax
from cospec.models.cuda_graphs import GraphRunner, Step
from cospec.models.torch_rollout import TorchRollout
from cospec.rng.random_streams import RandomStreams, StreamKind, exponential_sample
from harness.decoding import LENGTHS, Forward, prompts, runner_of
from harness.tiny import VOCAB, tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TEMPERATURES = (0.0, 0.9, 1.4)
ALL_DRAW = (0.7, 0.9, 1.4)
BACKLOG = (1, 4, 2)  # tokens that each sequence feeds first


def again(step: Step) -> Step:
    """Captures nothing: repeats the step, into the same tensor."""
    kept = step()
    return lambda: kept.copy_(step())


def backlog() -> list[SequenceSlice]:
    """Known tokens that the caches lack; every token but the first of a slice is compared with the likeliest one."""
    return [SequenceSlice(f"s{n}", LENGTHS[n], tokens(count, n)) for n, count in enumerate(BACKLOG)]


def params_of(
    kind: StreamKind, depth: int, temperatures: Sequence[float] = TEMPERATURES, **options: bool
) -> list[RolloutParams]:
    return [
        RolloutParams(temperature, stream(kind, number, 0), depth, **options)
        for number, temperature in enumerate(temperatures)
    ]


def stream(kind: StreamKind, number: int, step: int) -> tuple[int, int, int, int, int, int]:
    return RandomStreams(2**63 + number, 20).stream(LENGTHS[number] + BACKLOG[number] + step, kind)


def rolled(captured: bool, params: Sequence[RolloutParams]) -> RolloutOutput:
    runner, kv = runner_of("qwen3", DEVICE)
    forward: Forward = GraphRunner(runner, again) if captured else runner
    forward.logits(prompts(kv), kv.layers)
    rollout = TorchRollout(lambda batch: forward.logits(batch, kv.layers), kv, VOCAB, 200)
    return rollout(TokenBatch(tuple(backlog())), params)


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("kind", [StreamKind.TARGET, StreamKind.DRAFT])
@pytest.mark.parametrize("depth", [1, 5])
@pytest.mark.parametrize("temperatures", [TEMPERATURES, ALL_DRAW], ids=["some greedy", "all draw"])
def test_a_rollout_is_stepping(temperatures: Sequence[float], depth: int, kind: StreamKind, captured: bool) -> None:
    found = rolled(captured, params_of(kind, depth, temperatures, confident=True, logits=True))
    assert found.logits is not None and found.confidence is not None
    assert found.logits.shape == (depth, 3, VOCAB) and (found.q is not None) == (kind is StreamKind.DRAFT)
    runner, kv = runner_of("qwen3", DEVICE)
    runner.logits(prompts(kv), kv.layers)
    slices = backlog()
    for step in range(depth):
        logits = runner.logits(kv.pack(TokenBatch(tuple(slices))), kv.layers).cpu()
        ends = torch.tensor([len(part.tokens) for part in slices]).cumsum(0) - 1
        rows = logits[ends]
        torch.testing.assert_close(found.logits[step].cpu(), rows, atol=1e-4, rtol=1e-4)
        for number, temperature in enumerate(temperatures):
            token, q = int(rows[number].argmax()), softmax(rows[number : number + 1], [temperature or 1.0])
            if temperature:
                (token,) = exponential_sample(q, [stream(kind, number, step)])
            assert found.tokens[number][step] == token
            assert abs(found.confidence[number, step] - q.max()) < 1e-4
            if found.q is not None:
                own = found.q[number, step]
                assert isinstance(own, DeviceProbs) and own.rows.device.type == DEVICE
                np.testing.assert_allclose(np.asarray(own), q[0], atol=1e-4, rtol=0.0)
                assert float(own.chosen) == pytest.approx(float(np.asarray(own)[token]))
            start = slices[number].start + len(slices[number].tokens)
            slices[number] = SequenceSlice(slices[number].id, start, (token,))


def test_chains_of_different_lengths_roll_together() -> None:
    alone = rolled(False, params_of(StreamKind.TARGET, 5)).tokens
    params = [replace(own, depth=depth) for own, depth in zip(params_of(StreamKind.TARGET, 5), (5, 1, 3), strict=True)]
    found = rolled(False, params).tokens
    assert found == [alone[0], [*alone[1][:1], *[-1] * 4], [*alone[2][:3], *[-1] * 2]]


def test_hits_count_the_known_tokens_that_were_likeliest() -> None:
    runner, kv = runner_of("qwen3", DEVICE)
    runner.logits(prompts(kv), kv.layers)
    rows = runner.logits(kv.pack(TokenBatch(tuple(backlog()))), kv.layers).argmax(-1).tolist()
    right = [
        sum(known == rows[sum(BACKLOG[:n]) + place] for place, known in enumerate(part.tokens[1:]))
        for n, part in enumerate(backlog())
    ]
    assert list(rolled(False, params_of(StreamKind.TARGET, 2)).hits) == right
    guess = rows[BACKLOG[0]]  # the likeliest token after the first one of the second slice
    rollout = TorchRollout(lambda batch: runner.logits(batch, kv.layers), kv, VOCAB, 200)
    known = (tokens(4, 1)[0], guess)
    batch = TokenBatch((SequenceSlice("s1", LENGTHS[1], known),))
    assert list(rollout(batch, params_of(StreamKind.TARGET, 2)[:1]).hits) == [1]


@pytest.mark.parametrize("temperatures", [TEMPERATURES, ALL_DRAW], ids=["some greedy", "all draw"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_rows_that_are_not_numbers_end_a_draft(value: float, temperatures: Sequence[float]) -> None:
    runner, kv = runner_of("qwen3", DEVICE)
    runner.logits(prompts(kv), kv.layers)
    calls: list[int] = []

    def score(batch: object) -> torch.Tensor:
        calls.append(0)
        rows = runner.logits(batch, kv.layers)  # type: ignore[arg-type]
        if len(calls) == 2:
            rows[1] = value
        return rows

    rollout = TorchRollout(score, kv, VOCAB, 200)
    slices = [SequenceSlice(f"s{n}", LENGTHS[n], (n,)) for n in range(3)]
    found = rollout(TokenBatch(tuple(slices)), params_of(StreamKind.DRAFT, 3, temperatures)).tokens
    assert found[1][1] == -1 and found[1][0] >= 0 and min(found[0] + found[2]) >= 0
