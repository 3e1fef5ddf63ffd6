"""The structs that Python fills for the native library. ``mismatch`` confirms sizes and offsets when the library loads.

Each class has the name and the fields of its struct in ``csrc``, where the fields are explained.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_double, c_float, c_int64, c_long, c_uint64, c_void_p
from struct import Struct
from typing import Any

from cospec.native.pool_structs import LockstepDrafterStruct

_CODES = {c_int64: "q", c_uint64: "Q", c_double: "d", c_void_p: "Q"}  # of the ``struct`` module


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class AttentionParamsStruct(Structure):
    """``csrc/ops/kernels.h``."""

    _fields_ = [
        *_fields(c_void_p, "q k v"),
        *_fields(c_long, "q_row q_head k_row k_head v_row v_head"),
        *_fields(c_void_p, "k_pages v_pages out"),
        *_fields(c_long, "heads kv_heads dim page_size table_width"),
        *_fields(c_float, "scale softcap"),
        ("window", c_long),
        *_fields(c_void_p, "positions visible tables starts write_at mask"),
        ("num_sequences", c_long),
    ]


class LlamaLayerStruct(Structure):
    """``csrc/model/llama_forward.h``."""

    _fields_ = [
        *_fields(c_void_p, "input_norm mlp_norm q_norm k_norm qkv output gate_up down"),
        ("window", c_long),
    ]


class LlamaConfigStruct(Structure):
    """``csrc/model/llama_forward.h``."""

    _fields_ = [
        ("layers", ctypes.POINTER(LlamaLayerStruct)),
        *_fields(c_void_p, "embedding final_norm head inverse_frequencies"),
        *_fields(c_long, "embedding_format num_layers hidden heads kv_heads dim intermediate"),
        *_fields(c_float, "eps scale rotary_scale"),
    ]


class InputBatchStruct(Structure):
    """``csrc/model/llama_forward.h``."""

    _fields_ = [
        *_fields(c_void_p, "ids positions row_sequence visible mask tables starts write_at logit_rows k_pages v_pages"),
        *_fields(c_long, "num_rows num_sequences num_logit_rows page_size table_width"),
    ]


class RolloutStruct(Structure):
    """``csrc/model/llama_forward.h``."""

    _fields_ = [
        *_fields(c_void_p, "temperatures streams depths"),
        ("max_depth", c_long),
        ("logits", c_void_p),
        ("logits_stride", c_long),
        *_fields(c_void_p, "q tokens confidence"),
    ]


class SequenceSliceStruct(Structure):
    """``csrc/model/input_batch.h``."""

    _fields_ = [
        *_fields(c_int64, "start num_tokens num_nodes first_logit"),
        ("pages", c_void_p),
        ("num_pages", c_int64),
    ]


class KVCacheViewStruct(Structure):
    """``csrc/model/input_batch.h``."""

    _fields_ = [*_fields(c_void_p, "k_pages v_pages"), *_fields(c_long, "page_size vocab_size max_len")]


class BatchViewStruct(Structure):
    """``csrc/model/input_batch.h``."""

    _fields_ = [*_fields(c_void_p, "slices ids parents"), ("num_slices", c_long)]


class LogitsSourceStruct(Structure):
    """``csrc/spec/blend.h``."""

    _fields_ = [
        *_fields(c_void_p, "logits weights"),
        *_fields(c_int64, "num_models vocab_size form"),
        ("plausibility_cutoff", c_double),
    ]


class SamplingShapeStruct(Structure):
    """``csrc/spec/verify.h``."""

    _fields_ = [*_fields(c_double, "temperature top_p min_p"), ("top_k", c_int64)]


class AcceptanceParamsStruct(Structure):
    """``csrc/spec/verify.h``."""

    _fields_ = [("method", c_int64), ("seed", c_uint64), ("sampling", SamplingShapeStruct)]


class VerifyTaskStruct(Structure):
    """``csrc/spec/verify.h``."""

    _fields_ = [
        *_fields(c_int64, "check_row first_row num_rows node_offset num_nodes"),
        ("q", c_void_p),
        ("base_len", c_uint64),
        ("params", AcceptanceParamsStruct),
    ]


class VerifyResultStruct(Structure):
    """``csrc/spec/verify.h``."""

    _fields_ = _fields(c_int64, "num_accepted token bonus invalid")


class RequestSlotStruct(Structure):
    """``csrc/spec/multi_step.h``."""

    _fields_ = [
        *_fields(c_int64, "draft_len num_known num_fed num_left"),
        ("pages", c_void_p),
        ("num_pages", c_int64),
        ("drafter_pages", c_void_p),
        ("num_drafter_pages", c_int64),
        ("stop_tokens", c_void_p),
        ("num_stop_tokens", c_int64),
        ("stream_kind", c_uint64),
        ("q", c_void_p),
        ("params", AcceptanceParamsStruct),
    ]


class MultiStepTaskStruct(Structure):
    """``csrc/spec/multi_step.h``."""

    _fields_ = [
        *_fields(c_void_p, "target cache drafter drafter_cache slots tokens drafts"),
        *_fields(c_int64, "num_slots num_drafting max_draft_len max_steps"),
        ("time_limit", c_double),
        ("wakeup_fd", c_int64),
        *_fields(c_void_p, "output num_fed seconds"),
    ]


STRUCTS: tuple[type[Structure], ...] = (
    AttentionParamsStruct,
    LlamaLayerStruct,
    LlamaConfigStruct,
    InputBatchStruct,
    RolloutStruct,
    SequenceSliceStruct,
    KVCacheViewStruct,
    BatchViewStruct,
    LogitsSourceStruct,
    SamplingShapeStruct,
    AcceptanceParamsStruct,
    VerifyTaskStruct,
    VerifyResultStruct,
    RequestSlotStruct,
    MultiStepTaskStruct,
    LockstepDrafterStruct,
)


def mismatch(library: ctypes.CDLL) -> str:
    """The first difference between a library's structs and these, as a clause; empty without a difference."""
    for struct in STRUCTS:
        name = struct.__name__.removesuffix("Struct")
        size, own = library.cospec_struct_size(name.encode()), ctypes.sizeof(struct)
        if size != own:
            return f"struct {name} has {size} bytes in the library and {own} in Python"
        for field, *_ in struct._fields_:
            offset, own = library.cospec_field_offset(name.encode(), field.encode()), getattr(struct, field).offset
            if offset != own:
                return f"field {name}.{field} is at byte {offset} in the library and at {own} in Python"
    return ""


def packer(struct: type[Structure], count: int = 1, without: str = "") -> Struct:
    """Packs ``count`` structs of 8-byte fields, but for the field ``without``, several times as fast as ctypes."""
    return Struct("=" + _codes(struct, without) * count)


def _codes(struct: type[Structure], without: str = "") -> str:
    kinds = [kind for name, kind, *_ in struct._fields_ if name != without]
    return "".join([_codes(kind) if issubclass(kind, Structure) else _CODES[kind] for kind in kinds])


def words(struct: type[Structure]) -> int:
    """The size of a struct in words of 8 bytes."""
    return ctypes.sizeof(struct) // 8
