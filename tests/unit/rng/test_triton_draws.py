"""The Triton kernels of the exponential race find the winners that the torch code finds.

On a CPU the kernels run in Triton's interpreter. ``tests/gpu/test_rng_cuda.py`` runs them on a GPU.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from cospec.rng.torch_draws import exponential_sample
from harness.triton_compiler import compile_for_gpu

NAN, INF = float("nan"), float("inf")

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (the extra `triton`)")
needs_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="Triton runs on a CPU only with TRITON_INTERPRET=1"
)


def streams(rows: int, seed: int = 0) -> list[Tensor]:
    """Seeds, kinds, positions and bases; the words of the generator take all values, also those above 2^63."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator) for _ in range(4)]


def raced(weights: Tensor, stream: list[Tensor]) -> list[int]:
    from cospec.rng.triton_draws import triton_race

    winners = triton_race(weights, *stream)
    assert winners.dtype == torch.int64
    return winners.tolist()


@needs_triton
@needs_interpreter
@pytest.mark.parametrize("size", [1, 4, 5, 257, 1024, 1025, 3000])
def test_winners_are_those_of_torch(size: int) -> None:
    weights = torch.rand(6, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    weights[:, ::3] *= torch.tensor([0.0, 1.0, 1e-3, 1e3, 1e-300, 1.0], dtype=torch.float64)[:, None]
    stream = streams(6, size)
    assert raced(weights, stream) == exponential_sample(weights, *stream).tolist()


@needs_triton
@needs_interpreter
def test_each_part_of_a_stream_counts() -> None:
    """Equal weights, so that the words alone decide; control: another seed, kind, position or base."""
    weights, stream = torch.ones(8, 3000, dtype=torch.float64), streams(8)
    found = [raced(weights, stream)]
    for changed in range(4):
        other = [part + (number == changed) for number, part in enumerate(stream)]
        found.append(raced(weights, other))
        assert found[-1] == exponential_sample(weights, *other).tolist()
    for row in zip(*found, strict=True):
        assert len(set(row)) == 5


@needs_triton
@needs_interpreter
@pytest.mark.parametrize(
    ("values", "winner"),
    [
        ({}, -1),
        ({7: -1.0, 1500: -2.0}, -1),
        ({1500: 0.5}, 1500),
        ({2999: 1e-300}, 2999),
        ({3: -5.0, 1500: 0.5}, 1500),
        ({1023: INF, 1024: INF, 2500: 1.0}, 1023),  # equal scores in two parts
        ({1100: INF, 1101: INF, 40: 9.0}, 1100),  # and in one
        ({1500: 5e-324}, None),  # a positive weight with a score of 0
        ({1500: NAN, 3: 1.0}, -1),
    ],
    ids=str,
)
def test_rows_with_few_weights(values: dict[int, float], winner: int | None) -> None:
    weights, stream = torch.zeros(4, 3000, dtype=torch.float64), streams(4)
    for place, value in values.items():
        weights[:, place] = value
    wanted = exponential_sample(weights, *stream).tolist()
    assert raced(weights, stream) == wanted
    assert winner is None or wanted == [winner] * 4


@needs_triton
@needs_interpreter
def test_no_other_row_changes_a_winner() -> None:
    weights = torch.rand(5, 1500, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weights[2, 1200] = NAN
    stream = streams(5)
    together = raced(weights, stream)
    assert [raced(weights[row : row + 1], [part[row : row + 1] for part in stream])[0] for row in range(5)] == together
    assert raced(weights[:0], [part[:0] for part in stream]) == []


@needs_triton
@needs_interpreter
def test_tensors_need_not_be_contiguous() -> None:
    weights = torch.rand(700, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).T
    stream = [part[::2] for part in streams(8)]
    assert raced(weights, stream) == exponential_sample(weights, *stream).tolist()


COMPILE = """
from cospec.rng.triton_draws import merge_kernel, race_kernel

POINTERS = {"weights": "fp64", "scores": "fp64"} | dict.fromkeys(("streams", "places", "contents", "winners"), "i64")
assert "mul.hi.u64" in compiled(race_kernel, POINTERS, {})
assert "st.global" in compiled(merge_kernel, POINTERS, {"WIDTH": 256})
"""


@needs_triton
def test_the_kernels_compile_for_a_gpu() -> None:
    compile_for_gpu(COMPILE)
