"""On a CUDA device the exponential race has the winners of the torch code on the CPU."""

from __future__ import annotations

from importlib.util import find_spec
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from cospec.rng import torch_draws
from cospec.rng.torch_draws import exponential_sample

NAN, INF = float("nan"), float("inf")
DEVICE = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (the extra `triton`)")


def streams(rows: int, seed: int = 0) -> list[Tensor]:
    """Seeds, kinds, positions and bases; the words of the generator take all values, also those above 2^63."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator) for _ in range(4)]


def on_device(weights: Tensor, stream: list[Tensor]) -> list[int]:
    winners = exponential_sample(weights.to(DEVICE), *(part.to(DEVICE) for part in stream))
    assert winners.dtype == torch.int64 and winners.device.type == "cuda"
    return winners.tolist()


@pytest.mark.parametrize(("rows", "size"), [(64, 1), (64, 5), (64, 257), (33, 1024), (33, 32003), (9, 256 * 1024 - 1)])
def test_winners_are_those_of_the_cpu(rows: int, size: int) -> None:
    weights = torch.rand(rows, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size)) ** 4
    weights[::5, ::2] = 0.0
    weights[1] = 0.0
    stream = streams(rows, size)
    wanted = exponential_sample(weights, *stream).tolist()
    assert on_device(weights, stream) == wanted
    assert wanted[1] == -1


@needs_triton
def test_triton_runs_where_it_is_installed() -> None:
    """The torch code has the same winners on the device; control: another stream has others."""
    weights, stream = torch.ones(16, 5000, dtype=torch.float64), streams(16)
    with patch("cospec.rng.triton_draws.triton_race", side_effect=AssertionError("raced")):
        with pytest.raises(AssertionError, match="raced"):
            on_device(weights, stream)
        with patch.object(torch_draws, "races_by_triton", return_value=False):
            wanted = on_device(weights, stream)
    assert on_device(weights, stream) == wanted
    for changed in range(4):
        other = on_device(weights, [part + (number == changed) for number, part in enumerate(stream)])
        assert all(a != b for a, b in zip(other, wanted, strict=True))


def test_rows_with_few_weights() -> None:
    cases: list[dict[int, float]] = [
        {},
        {7: -1.0, 1500: -2.0},
        {2999: 1e-300},
        {1023: INF, 1024: INF, 2500: 1.0},  # equal scores
        {1500: 5e-324},  # a positive weight with a score of 0
        {1500: NAN, 3: 1.0},
    ]
    weights, stream = torch.zeros(len(cases), 3000, dtype=torch.float64), streams(len(cases))
    for row, values in zip(weights, cases, strict=True):
        for place, value in values.items():
            row[place] = value
    wanted = exponential_sample(weights, *stream).tolist()
    assert on_device(weights, stream) == wanted
    assert wanted[:4] == [-1, -1, 2999, 1023] and wanted[5] == -1


def test_no_other_row_changes_a_winner() -> None:
    weights = torch.rand(40, 50000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    stream = streams(40)
    together = on_device(weights, stream)
    assert together == on_device(weights, stream)
    for row in (0, 17, 39):
        assert on_device(weights[row : row + 1], [part[row : row + 1] for part in stream]) == together[row : row + 1]


@needs_triton
def test_batches_of_all_sizes_share_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """An odd number of parts, so that the rows of a tensor have addresses of both kinds; control: other sizes."""
    from triton import knobs

    compiled: list[str] = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **call: compiled.append(call["repr"]))
    weights = torch.rand(4, 3000, dtype=torch.float64)
    on_device(weights, streams(4))
    compiled.clear()
    for rows in (1, 2, 3, 4):
        on_device(weights[:rows], streams(rows))
    assert not compiled
    on_device(weights[:, :77], streams(4))
    assert compiled
