"""Chooses the packing of a quantized checkpoint from its ``quantization_config``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cospec.errors import ModelError
from cospec.models.files.packings import Awq, Fp8, Gptq, PackedIntegers, Packing, PlainIntegers

_BITSANDBYTES = {"load_in_4bit": 4, "load_in_8bit": 8}


def choose_packing(name: str, config: Mapping[str, Any]) -> Packing:
    """Return the packing that a ``quantization_config`` describes.

    Raises:
        ModelError: no packing fits; the sentence names method and kind.
    """
    method = config.get("quant_method") or config.get("quant_algo")
    bits = config.get("bits", config.get("w_bit"))
    layout = str(config.get("checkpoint_format", "gptq"))
    size = _size(name, "group_size", config.get("group_size", config.get("q_group_size")))
    if method == "gptq" and bits in (2, 4, 8) and layout in ("gptq", "gptq_v2"):
        return Gptq(bits, 2 if layout == "gptq_v2" else 1, size)
    if method == "awq" and bits == 4 and str(config.get("version", "gemm")).lower() == "gemm":
        return Awq(size)
    if method == "fp8":
        return Fp8(_tile(name, "weight_block_size", config.get("weight_block_size")))
    if method == "compressed-tensors":
        return _compressed(name, config)
    raise _refused(name, config)


def _compressed(name: str, config: Mapping[str, Any]) -> Packing:
    layout, groups = config.get("format"), config.get("config_groups") or {}
    weights = [_weights(group) for group in groups.values()] if isinstance(groups, dict) else []
    kinds = {(str(each.get("num_bits")), str(each.get("type", "int"))) for each in weights}
    if len(kinds) == 1:
        ((number, kind),) = kinds
        bits = int(number) if number.isdecimal() else 0
        sizes = {_size(name, "group_size", each.get("group_size")) for each in weights}
        size = sizes.pop() if len(sizes) == 1 else None
        if layout == "pack-quantized" and kind == "int" and bits in (2, 4, 8):
            return PackedIntegers(bits, size)
        if layout in ("int-quantized", "naive-quantized") and kind == "int" and bits == 8:
            return PlainIntegers(size)
        if layout in ("float-quantized", "naive-quantized") and kind == "float" and bits == 8:
            tiles = {_tile(name, "block_structure", each.get("block_structure")) for each in weights}
            if len(tiles) == 1:
                return Fp8((1, size) if size else tiles.pop())
    raise _refused(name, config)


def _weights(group: Any) -> dict[str, Any]:
    found = group.get("weights") if isinstance(group, dict) else None
    return found if isinstance(found, dict) else {}


def _size(name: str, key: str, size: Any) -> int | None:
    """Return the inputs of a group; None where the configuration names no size."""
    if size is None or size == -1:
        return None
    if type(size) is not int or size <= 0:
        raise ModelError(f"The configuration of {name} has {key} {size!r}; allowed is a positive integer, or -1.")
    return size


def _tile(name: str, key: str, tile: Any) -> tuple[int, int]:
    """Return the outputs and inputs of a tile, by default those of DeepSeek and transformers."""
    if tile is None:
        return Fp8.tile
    sides = re.findall(r"\d+", tile) if isinstance(tile, str) else tile  # "128x128" in old files
    numbers = [int(side) for side in sides if str(side).isdecimal()] if isinstance(sides, list) else []
    if len(numbers) != 2 or 0 in numbers or len(sides) != 2:
        raise ModelError(f"The configuration of {name} has {key} {tile!r}; allowed are two positive integers.")
    return numbers[0], numbers[1]


def _refused(name: str, config: Mapping[str, Any]) -> ModelError:
    method = config.get("quant_method") or config.get("quant_algo") or "an unnamed method"
    bits = next((config[key] for key in ("bits", "w_bit") if isinstance(config.get(key), int)), None)
    bits = bits or next((each for key, each in _BITSANDBYTES.items() if config.get(key) is True), None)
    layout = config.get("checkpoint_format") or config.get("version") or config.get("format")
    shown = ", ".join(str(each) for each in (method, f"{bits} bits" if bits else None, layout) if each)
    return ModelError(
        f"The model {name} is stored quantized ({shown}); allowed are gptq with 2, 4 and 8 bits, awq with 4 bits in "
        "version gemm, compressed-tensors in pack-quantized, int-quantized and float-quantized, and fp8."
    )
