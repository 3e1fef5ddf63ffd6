"""The compiled kernels for models: products of a few rows, and attention over pages. CPU, float32 arithmetic.

A result depends on its own row alone, bit for bit: not on the number of rows or threads, nor on the instruction set,
apart from bf16 on AMX. Loading the library, and the kernels over rows of logits, are in ``cospec.native.library``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from math import prod

import torch
from torch import Tensor, nn

from cospec.errors import InvalidInput, words
from cospec.models.files.array_file import ALIGNMENT, ArrayMemory, Bytes, huge_pages
from cospec.models.input_batch import InputBatch
from cospec.models.kv_cache_formats import CACHE_DTYPES, dtype_name, entry_width
from cospec.models.weights.format import LinearWeights, StoredWeight
from cospec.native import structs
from cospec.native.library import address, available, cdll, isa, set_isa, set_threads, threads, why_not

__all__ = [
    "PackedLinear",
    "attention",
    "available",
    "cache_format",
    "isa",
    "cdll",
    "one_torch_thread",
    "rms_norm",
    "set_isa",
    "set_threads",
    "threads",
    "why_not",
    "zeros",
]

_ATTENTION = structs.packer(structs.AttentionParams)
MAX_DIM = 256  # of a head


class PackedLinear(nn.Module):
    """``x @ weight.T + bias`` with the weight packed for the kernels, a copy of its own.

    Args:
        weight: ``[out, in]`` in any format. Sums are float32 with every format.
        bias: ``[out]`` or None.
    """

    def __init__(self, weight: StoredWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.outputs, weight.inputs
        memory = ArrayMemory()
        add_linear(memory, "weight", LinearWeights(weight, bias))
        self._product = cdll().cospec_linear
        self._handle = LinearHandle(weight.format.kernel, (weight.outputs, weight.inputs), memory.arrays, "weight")

    def forward(self, x: Tensor) -> Tensor:
        """Float32 ``[..., in]`` to ``[..., out]``."""
        shape = x.shape
        if x.dtype != torch.float32 or shape[-1] != self.in_features or x.device.type != "cpu":
            given = words(f"{x.dtype} of shape {tuple(shape)} on {x.device}")
            raise InvalidInput("input of a packed linear layer", given, f"float32 [..., {self.in_features}] on the CPU")
        x = x.contiguous()
        y = torch.empty((*shape[:-1], self.out_features))
        self._product(self._handle.address, x.data_ptr(), x.numel() // self.in_features, y.data_ptr())
        return y


class LinearHandle:
    """The library's handle of a packed weight, which stays in the memory of its arrays.

    Args:
        shape: outputs and inputs.
        arrays: hold the weight as ``name``; scales, bias and order, if any, as ``add_linear`` names them.
        place: of the weight among the weights of the array.
    """

    def __init__(
        self, kernel: str, shape: tuple[int, int], arrays: Mapping[str, Bytes], name: str, place: int = 0
    ) -> None:
        self._weights, self._order, number = arrays[name], arrays.get(f"{name}.order"), kernel_id(kernel)
        vectors = [arrays.get(f"{name}.{part}") for part in ("scale", "bias")]  # the library copies both
        starts = [None if x is None else address(x) + 4 * place * shape[0] for x in vectors]
        found = cdll()
        weight = address(self._weights) + place * _packed_bytes(number, shape)
        order = None if self._order is None else address(self._order)
        self.address: int = found.cospec_linear_new(number, weight, *starts, order, *shape)
        weakref.finalize(self, found.cospec_linear_free, self.address)


def add_linear(to: ArrayMemory, name: str, linear: LinearWeights) -> None:
    """Pack the weight of a linear layer as ``name``, with ``name.scale``, ``name.bias`` and ``name.order``."""
    add_weights(to, name, lambda _: linear.weight, 1)
    if linear.bias is not None:
        add_tensor(to, f"{name}.bias", linear.bias.float())
    if linear.weight.order is not None:
        add_tensor(to, f"{name}.order", linear.weight.order.int())


def add_weights(to: ArrayMemory, name: str, weight: Callable[[int], StoredWeight], count: int) -> None:
    """Pack weights of one shape and format as one array, and their scales as ``name.scale``."""
    first, scales = weight(0), list[Tensor]()
    shape, kernel = (first.outputs, first.inputs), kernel_id(first.format.kernel)
    size = _packed_bytes(kernel, shape)

    def fill(packed: Bytes) -> None:
        for number in range(count):
            own = weight(number) if number else first
            integers, *scale = (part.cpu().contiguous() for part in own.format.pack(own.parts))
            cdll().cospec_pack(kernel, integers.data_ptr(), *shape, address(packed) + number * size)
            scales.extend(scale)

    to.add(name, count * size, fill)
    if scales:
        add_tensor(to, f"{name}.scale", torch.cat(scales).float())


def _packed_bytes(kernel: int, shape: tuple[int, int]) -> int:
    """Return the bytes from a packed weight to the next in an array."""
    size = int(cdll().cospec_packed_bytes(kernel, *shape))
    return -(-size // ALIGNMENT) * ALIGNMENT


def add_tensor(to: ArrayMemory, name: str, tensor: Tensor) -> None:
    """Store the numbers of a tensor of one dimension or more."""
    to.keep(name, tensor.detach().cpu().contiguous().view(torch.uint8).numpy().reshape(-1))


def kernel_id(name: str) -> int:
    """Return the library's number of a weight kernel.

    Raises:
        InvalidInput: the library has no kernel of that name.
    """
    number = int(cdll().cospec_weight_format(name.encode()))
    if number < 0:
        raise InvalidInput("kernel of a weight format", name, "a kernel of csrc/ops/weight_formats.h")
    return number


@cache
def cache_format(dtype: torch.dtype) -> int:
    """Return the library's number of a dtype of the KV cache."""
    return int(cdll().cospec_cache_format(dtype_name(dtype).encode()))


def attention(  # noqa: PLR0913 - a layer's whole attention, called once per layer from one place
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: InputBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Write the batch's keys and values into their pages, then attend.

    Args:
        q: float32 ``[T, H, D]``; ``k`` and ``v`` ``[T, Hkv, D]``. Rows and heads may lie any distance apart.
        k_pages, v_pages: entries ``[pages, Hkv, page_size, W]``, contiguous, see ``kv_cache_dtype``; ``page_size`` and
            ``D`` divide by 8.
        window: a row attends keys less than this many positions back.
        softcap: products pass through ``softcap * tanh(x / softcap)``.

    Returns:
        ``[T, H, D]``.
    """
    q, k, v = (x if x.stride(2) == 1 and x.dtype == torch.float32 else x.float().contiguous() for x in (q, k, v))
    rows, heads, dim = q.shape
    _check_pages(k_pages, v_pages, k, batch)
    out = torch.empty(rows, heads, dim)
    params = _ATTENTION.pack(
        q.data_ptr(), k.data_ptr(), v.data_ptr(),
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        k_pages.data_ptr(), v_pages.data_ptr(), out.data_ptr(),
        cache_format(k_pages.dtype), heads, k.shape[1], dim, batch.page_size, batch.tables.shape[1],
        scale, softcap or 0.0, window or 0,
        batch.positions.data_ptr(), batch.visible.data_ptr(), batch.tables.data_ptr(), batch.starts.data_ptr(),
        batch.write_at.data_ptr(), batch.mask.data_ptr(), batch.tables.shape[0],
    )  # fmt: skip
    cdll().cospec_attention(params)
    return out


def _check_pages(k_pages: Tensor, v_pages: Tensor, k: Tensor, batch: InputBatch) -> None:
    _, kv_heads, page_size, width = k_pages.shape
    dim, dtype = k.shape[2], k_pages.dtype
    known = dtype in CACHE_DTYPES.values() and width == entry_width(dim, dtype)
    fits = known and (kv_heads, page_size) == (k.shape[1], batch.page_size) and v_pages.shape == k_pages.shape
    plain = k_pages.is_contiguous() and v_pages.is_contiguous() and v_pages.dtype is dtype
    if not (fits and plain) or page_size % 8 or dim % 8 or dim > MAX_DIM:
        given = words(f"{k_pages.dtype} of shape {tuple(k_pages.shape)}")
        allowed = (
            f"contiguous {', '.join(CACHE_DTYPES)} [pages, Hkv, page_size, D], page_size and D multiples of 8, D at "
            "most 256; int8 has 4 more bytes"
        )
        raise InvalidInput("KV cache of the native attention", given, allowed)


def zeros(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros on the CPU, in huge pages where the system has some, for tensors that are read in small pieces.

    The system gives a page at the first access, so a large tensor takes no time here.
    """
    memory = huge_pages(prod(size) * dtype.itemsize)
    return torch.from_numpy(memory).view(dtype).view(*size)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension; float32 ``[..., n]`` and ``[n]``."""
    x, weight = x.contiguous(), weight.contiguous()
    y = torch.empty_like(x)
    width = weight.numel()
    cdll().cospec_rms_norm(x.data_ptr(), weight.data_ptr(), eps, x.numel() // width, width, y.data_ptr())
    return y


@contextmanager
def one_torch_thread(native: bool = True) -> Iterator[None]:
    """Limit torch to one thread; nothing changes unless ``native``.

    Torch handles only a few rows of logits between native forwards. Torch's workers spin for milliseconds after each
    large operation, on the processors that the kernels need. Rows are computed bit by bit alike on every number of
    threads.

    Args:
        native: whether all forwards in the context are native.
    """
    before = torch.get_num_threads()
    if native:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
