"""Quantized safetensors: integers in the packings of GPTQ and AWQ, and a model whose linear layers are quantized so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
GROUP = 32
CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "desc_act": True, "sym": True},
    "gptq-asymmetric": {"quant_method": "gptq", "bits": 4, "desc_act": True, "sym": False},
    "awq": {"quant_method": "awq", "bits": 4, "version": "gemm"},
}
"""Kinds of ``write_quantized``; the first two have an act-order."""
Numbers = NDArray[np.int64]
Floats = NDArray[np.float32]


def words(integers: Numbers, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Words of 32 bits along the last dimension: number ``order[n]`` of each word has the bits ``n * bits`` on."""
    count = 32 // bits
    order = order or tuple(range(count))
    rows, length = integers.shape
    found = np.zeros((rows, -(-length // count)), np.int64)
    for row in range(rows):
        for word in range(found.shape[1]):
            for place, number in enumerate(order):
                if word * count + number < length:
                    found[row, word] |= int(integers[row, word * count + number]) << (place * bits)
    return torch.from_numpy(found.astype(np.uint32).view(np.int32))


def gptq_tensors(
    integers: Numbers, zeros: Numbers, scales: Floats, groups: Numbers, bits: int = 4
) -> dict[str, torch.Tensor]:
    """A layer of GPTQ: integers ``[out, in]``, stored zero points and scales ``[out, groups]``, groups ``[in]``."""
    return {
        "qweight": words(integers, bits).t().contiguous(),
        "qzeros": words(zeros.T, bits),
        "scales": torch.from_numpy(scales).half().t().contiguous(),
        "g_idx": torch.from_numpy(groups).int(),
    }


def awq_tensors(integers: Numbers, zeros: Numbers, scales: Floats) -> dict[str, torch.Tensor]:
    """A layer of AWQ: integers ``[out, in]``, zero points and scales ``[out, groups]``."""
    return {
        "qweight": words(integers.T, 4, AWQ_ORDER),
        "qzeros": words(zeros.T, 4, AWQ_ORDER),
        "scales": torch.from_numpy(scales).half().t().contiguous(),
    }


def write_quantized(plain: Path, to: Path, kind: str, own_orders: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Quantize the projections of a float model in groups of 32 inputs.

    Args:
        kind: a key of ``CONFIGS``.
        own_orders: projections that do not have the order of inputs of the others.

    Returns:
        The exact values of all tensors by their names in the float model.
    """
    config = json.loads((plain / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIGS[kind]}))
    state = load_file(plain / "model.safetensors")
    stored, values = dict(state), dict(state)
    for name in [name for name in state if name.endswith("_proj.weight")]:
        module = name.removesuffix(".weight")
        own = module.endswith(own_orders) if own_orders else False
        tensors, value = _quantized(state[name].numpy(), kind, seed=int(own))
        del stored[name]
        stored |= {f"{module}.{part}": tensor for part, tensor in tensors.items()}
        values[name] = torch.from_numpy(value)
    save_file(stored, to / "model.safetensors")
    return values


def _quantized(weight: Floats, kind: str, seed: int) -> tuple[dict[str, torch.Tensor], Floats]:
    """The tensors of a layer, and its exact value."""
    groups: Numbers = np.arange(weight.shape[1]) // GROUP
    if kind != "awq":
        groups = np.random.default_rng(seed).permutation(groups)
    sorted_inputs = weight[:, np.argsort(groups, kind="stable")].reshape(len(weight), -1, GROUP)
    low, high = sorted_inputs.min(-1), sorted_inputs.max(-1)
    if kind == "gptq":
        scales = np.maximum(high, -low) / 7
        zeros = np.full(scales.shape, 8)
    else:
        scales = (high - low) / 15
        zeros = np.clip(np.rint(-low / scales), 1, 15).astype(np.int64)
    scales = scales.astype(np.float16).astype(np.float32)
    places = np.rint(weight / scales[:, groups]) + zeros[:, groups]
    integers: Numbers = np.clip(places, 0, 15).astype(np.int64)
    value = scales[:, groups] * (integers - zeros[:, groups]).astype(np.float32)
    stored = (
        awq_tensors(integers, zeros, scales) if kind == "awq" else gptq_tensors(integers, zeros - 1, scales, groups)
    )
    return stored, value
