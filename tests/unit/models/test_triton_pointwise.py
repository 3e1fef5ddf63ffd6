"""The Triton kernels between products compute what torch computes; on a CPU in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cospec.models.attention.triton_paged import TritonAttention
from cospec.models.pointwise import Pointwise, TorchPointwise, pointwise_on
from harness.triton_compiler import compile_for_gpu

EPS = 1e-6
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WHY_NOT = TritonAttention().why_not(DEVICE, (), 16)
# Triton's interpreter cuts bits off where a GPU rounds to bfloat16.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3 if DEVICE.type == "cuda" else 2.5e-2}

needs_triton = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def triton_pointwise() -> Pointwise:
    from cospec.models.triton_pointwise import TritonPointwise

    return TritonPointwise()


def assert_near(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype is wanted.dtype and found.shape == wanted.shape
    bound = TOLERANCE[wanted.dtype]
    torch.testing.assert_close(found, wanted, atol=bound, rtol=bound)


@needs_triton
@DTYPES
@pytest.mark.parametrize("size", [24, 64, 1000])
def test_norms_and_sums(dtype: torch.dtype, size: int) -> None:
    x, branch, weight = normal(5, size, dtype=dtype), normal(5, size, dtype=dtype, seed=1), normal(size, seed=2)
    one, two = triton_pointwise(), TorchPointwise()
    assert_near(one.norm(x, weight, EPS), two.norm(x, weight, EPS))
    for found, wanted in zip(one.add_norm(x, branch, weight, EPS), two.add_norm(x, branch, weight, EPS), strict=True):
        assert_near(found, wanted)
    if dtype is torch.float32 or DEVICE.type == "cuda":
        assert torch.equal(one.add_norm(x, branch, weight, EPS)[0], x + branch), "sums are rounded once"
    assert torch.equal(one.norm(x, weight, EPS)[2:3], one.norm(x[2:3], weight, EPS)), "no other row changes a bit"
    assert not torch.allclose(one.norm(x, weight, EPS), two.norm(x, weight, 0.5)), "control: another epsilon"


@needs_triton
@DTYPES
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("dim", "rotated"), [(32, 32), (24, 24), (80, 40), (32, 0)])
def test_heads(dtype: torch.dtype, normed: bool, dim: int, rotated: int) -> None:
    wide = normal(6, 5 * dim, dtype=dtype)
    x = wide[:, dim : 4 * dim].unflatten(-1, (3, dim))  # queries are a part of a wider product
    angles = torch.arange(6, device=DEVICE)[:, None] * normal(rotated // 2, seed=3).abs()
    rotation = (angles.cos(), angles.sin()) if rotated else None
    norm = normal(dim, seed=4) if normed else None
    found = triton_pointwise().heads(x, norm, rotation, EPS)
    assert_near(found, TorchPointwise().heads(x, norm, rotation, EPS))
    if rotation is not None:
        backwards = (rotation[0], -rotation[1])
        assert not torch.allclose(found, TorchPointwise().heads(x, norm, backwards, EPS), atol=0.1), "control"


@needs_triton
@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [12, 1500])
def test_gates(dtype: torch.dtype, activation: str, size: int) -> None:
    gate_up = 3 * normal(4, 2 * size, dtype=dtype)
    found = triton_pointwise().gate(gate_up, activation)
    assert_near(found, TorchPointwise().gate(gate_up, activation))
    other = "silu" if activation != "silu" else "gelu_tanh"
    assert not torch.allclose(found, TorchPointwise().gate(gate_up, other), atol=0.05), "control"


def test_a_cpu_computes_in_torch() -> None:
    assert isinstance(pointwise_on(torch.device("cpu")), TorchPointwise)


COMPILE = """
from cospec.models.triton_pointwise_kernels import gate_kernel, heads_kernel, norm_kernel

POINTERS = dict.fromkeys(("x", "branch", "added", "out", "gate_up"), "bf16")
POINTERS |= dict.fromkeys(("weight", "norm", "cos", "sin"), "fp32")
SIZES = {"ADD": True, "WIDTH": 128, "DIM": 80, "NORM": True, "ROTATE": True, "SILU": False, "BLOCK": 1024}
for kernel in (gate_kernel, heads_kernel, norm_kernel):
    assert "ld.global" in compiled(kernel, POINTERS, SIZES, {"eps": "fp32"})
"""


@needs_triton
def test_the_kernels_compile_for_a_gpu() -> None:
    compile_for_gpu(COMPILE)
