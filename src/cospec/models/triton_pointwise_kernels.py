"""Triton kernels of the operations between products, see ``pointwise``. A program computes one row of its input.

A row's result depends on that row only.
"""

import triton
import triton.language as tl


@triton.jit
def _scale(x, size, eps):
    """Return the inverse root of the mean square of float32 numbers, which are 0 outside the row."""
    return 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / size + eps)


@triton.jit
def norm_kernel(x, branch, weight, added, out, size, eps, ADD: tl.constexpr, WIDTH: tl.constexpr):
    """Write the normalised row of ``x [T, size]``, or of ``x + branch``, which goes to ``added``; grid ``(T,)``."""
    row = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, WIDTH)
    inside = at < size
    numbers = tl.load(x + row + at, mask=inside, other=0.0)
    if ADD:
        other = tl.load(branch + row + at, mask=inside, other=0.0)
        numbers = (numbers.to(tl.float32) + other.to(tl.float32)).to(out.dtype.element_ty)
        tl.store(added + row + at, numbers, mask=inside)
    numbers = numbers.to(tl.float32)
    normed = numbers * _scale(numbers, size, eps) * tl.load(weight + at, mask=inside, other=0.0)
    tl.store(out + row + at, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def heads_kernel(
    x, norm, cos, sin, out, row_step, heads, rotated, eps, DIM: tl.constexpr, WIDTH: tl.constexpr,
    NORM: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate one head of ``x``; grid ``(T, heads)``.

    Args:
        x: ``[T, heads, DIM]``; a row starts ``row_step`` numbers after the previous row.
        cos, sin: ``[T, rotated / 2]``.
        out: ``[T, heads, DIM]``, contiguous.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = x + token * row_step + head * DIM
    at = tl.arange(0, WIDTH)
    inside = at < DIM
    numbers = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        factor = _scale(numbers, DIM, eps)
        numbers = numbers * factor * tl.load(norm + at, mask=inside, other=0.0)
        numbers = numbers.to(out.dtype.element_ty).to(tl.float32)
    if ROTATE:
        half = rotated // 2
        turned = at < rotated
        partner = tl.where(at < half, at + half, at - half)
        others = tl.load(source + partner, mask=turned, other=0.0).to(tl.float32)
        if NORM:
            others = others * factor * tl.load(norm + partner, mask=turned, other=0.0)
            others = others.to(out.dtype.element_ty).to(tl.float32)
        angle = token * half + tl.where(at < half, at, at - half)
        c = tl.load(cos + angle, mask=turned, other=1.0)
        s = tl.load(sin + angle, mask=turned, other=0.0)
        numbers = numbers * c + tl.where(at < half, -others, others) * s
    tl.store(out + (token * heads + head) * DIM + at, numbers.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_kernel(gate_up, out, size, SILU: tl.constexpr, BLOCK: tl.constexpr):
    """Write ``activation(gate) * up`` of ``gate_up [T, 2 size]``; grid ``(T, blocks of a row)``."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_up + row * 2 * size + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + at, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        gate = gate * tl.sigmoid(gate)
    else:  # tanh(x) is 2 * sigmoid(2 * x) - 1, and 1.5957691 is twice the root of 2 / pi
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    rounded = gate.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + at, (rounded * up).to(out.dtype.element_ty), mask=inside)
