"""Numpy dtypes of the C structs that Python fills for the native library. The library confirms them when loaded.

Each dtype has the name and the fields of its struct in ``csrc``, where the fields are explained. ``packer`` fills a
struct several times as fast as a numpy record.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from struct import Struct
from typing import Any

import numpy as np

Layout = np.dtype[Any]
STRUCTS: dict[str, Layout] = {}
"""All structs by their names in C++."""

_TYPES = {"int64": "i8", "uint64": "u8", "pointer": "u8", "double": "f8", "float": "f4"}
_CODES = {"i8": "q", "u8": "Q", "f8": "d", "f4": "f"}  # of the ``struct`` module


def declare(name: str, declaration: str) -> Layout:
    """Make the dtype of a struct.

    Args:
        declaration: lines of a type and the names of its fields. A type is a key of ``_TYPES`` or an earlier struct.
    """
    fields: list[tuple[str, Any]] = []
    for line in declaration.strip().splitlines():
        kind, *names = line.split()
        fields += [(field, _TYPES[kind] if kind in _TYPES else STRUCTS[kind]) for field in names]
    STRUCTS[name] = np.dtype(fields, align=True)
    return STRUCTS[name]


# csrc/ops/kernels.h
AttentionParams = declare(
    "AttentionParams",
    """
    pointer q k v
    int64 q_row q_head k_row k_head v_row v_head
    pointer k_pages v_pages out
    int64 cache_format heads kv_heads dim page_size table_width
    float scale softcap
    int64 window
    pointer positions visible tables starts write_at mask
    int64 num_sequences
    """,
)

# csrc/model/llama_forward.h
LlamaLayer = declare(
    "LlamaLayer",
    """
    pointer attention_norm mlp_norm after_attention after_mlp q_norm k_norm q k v output gate_up down router
    pointer expert_gate_up expert_down
    int64 window rotary
    """,
)
LlamaConfig = declare(
    "LlamaConfig",
    """
    pointer layers embedding final_norm head inverse_frequencies
    int64 embedding_format num_layers hidden heads kv_heads dim intermediate rotated num_tables wide_norms gelu
    int64 num_experts experts_per_token expert_intermediate normalized_experts
    float eps scale rotary_scale embedding_factor residual_factor logit_factor attention_softcap logit_softcap
    """,
)
InputBatch = declare(
    "InputBatch",
    """
    pointer ids positions row_sequence visible mask tables starts write_at logit_rows k_pages v_pages
    int64 num_rows num_sequences num_logit_rows page_size table_width cache_format
    """,
)
Rollout = declare(
    "Rollout",
    """
    pointer temperatures streams depths
    int64 max_depth
    pointer logits
    int64 logits_stride
    pointer q tokens confidence hits
    """,
)
StageIO = declare(
    "StageIO",
    """
    pointer input output logits sum
    """,
)

# csrc/model/input_batch.h
SequenceSlice = declare(
    "SequenceSlice",
    """
    int64 start num_tokens num_nodes first_logit
    pointer pages
    int64 num_pages
    """,
)
KVCacheView = declare(
    "KVCacheView",
    """
    pointer k_pages v_pages
    int64 cache_format page_size vocab_size max_len
    """,
)
BatchView = declare(
    "BatchView",
    """
    pointer slices ids parents
    int64 num_slices
    """,
)

# csrc/spec/blend.h
LogitsSource = declare(
    "LogitsSource",
    """
    pointer logits weights
    int64 num_models vocab_size form
    double plausibility_cutoff
    pointer divergences
    """,
)

# csrc/spec/verify.h
SamplingShape = declare(
    "SamplingShape",
    """
    double temperature top_p min_p
    int64 top_k
    """,
)
AcceptanceParams = declare(
    "AcceptanceParams",
    """
    int64 method
    uint64 seed
    SamplingShape sampling
    """,
)
VerifyTask = declare(
    "VerifyTask",
    """
    int64 check_row first_row num_rows node_offset num_nodes
    pointer q masks
    uint64 base_len
    AcceptanceParams params
    """,
)
VerifyResult = declare("VerifyResult", "int64 num_accepted token bonus invalid")

# csrc/spec/lookup.h
LookupShape = declare(
    "LookupShape",
    """
    int64 depth max_nodes
    pointer widths
    int64 num_widths
    double threshold
    """,
)

# csrc/spec/multi_step.h
RequestSlot = declare(
    "RequestSlot",
    """
    int64 draft_len num_known num_computed num_fed num_left first_logit deferred
    pointer pages
    int64 num_pages
    pointer drafter drafter_cache drafter_pages
    int64 num_drafter_pages
    pointer lookup stop_tokens
    int64 num_stop_tokens
    uint64 stream_kind
    pointer draft parents q
    AcceptanceParams params
    """,
)
OutputHeader = declare("OutputHeader", "int64 draft_len num_accepted token bonus")
MultiStepTask = declare(
    "MultiStepTask",
    """
    pointer target cache slots tokens
    int64 num_slots num_drafting max_draft_len max_steps
    double time_limit
    int64 wakeup_fd
    pointer output
    int64 output_width
    pointer num_fed seconds logits
    int64 blend_form
    pointer blend_weights divergences
    """,
)

# csrc/spec/pool_batch.h
PoolRequest = declare(
    "PoolRequest",
    """
    int64 greedy shares_stream depth max_nodes
    double temperature threshold
    """,
)
PoolBatch = declare(
    "PoolBatch",
    """
    int64 num_requests num_drafters max_depth tree_capacity steps calibration_bins
    double calibration_prior min_prob min_second_prob
    pointer requests streams calibrations weights odds spans tokens parents raw_confidence
    pointer candidates candidate_probs q mix_weights main_path path_len active
    pointer num_nodes out_tokens out_parents out_owners out_confidence
    """,
)

# csrc/spec/pool_lockstep.h
LockstepDrafter = declare(
    "LockstepDrafter",
    """
    int64 drafter
    pointer model cache slices ids requests
    int64 num_requests
    """,
)
MixBuffers = declare(
    "MixBuffers",
    """
    pointer distributions mixtures
    int64 vocab_size kept_steps
    """,
)


def mismatch(library: ctypes.CDLL) -> str:
    """Return the first difference between a library's structs and these, as a clause; empty without a difference."""
    for name, layout in STRUCTS.items():
        size = library.cospec_struct_size(name.encode())
        if size != layout.itemsize:
            return f"struct {name} has {size} bytes in the library and {layout.itemsize} in Python"
        for field, _, own in _fields(layout):
            offset = library.cospec_field_offset(name.encode(), field.encode())
            if offset != own:
                return f"field {name}.{field} is at byte {offset} in the library and at {own} in Python"
    return ""


def packer(struct: Layout, count: int = 1, without: str = "") -> Struct:
    """Return what packs the numbers of ``count`` structs, nested structs flattened, in the order of the fields.

    Args:
        without: the last field, if other bytes follow in its place.
    """
    size = next((offset for name, _, offset in _fields(struct) if name == without), struct.itemsize)
    made = Struct("=" + _format(struct, size, without) * count)
    assert made.size == size * count, "the packed struct has another size than the dtype"
    return made


def _format(layout: Layout, size: int, without: str = "") -> str:
    """Return the format of ``size`` bytes of a struct, with the padding between its fields."""
    found, place = "", 0
    for name, kind, offset in _fields(layout):
        if name != without:
            found += "x" * (offset - place)
            found += _format(kind, kind.itemsize) if kind.names else _CODES[kind.str[1:]]
            place = offset + kind.itemsize
    return found + "x" * (size - place)


def _fields(layout: Layout) -> Iterator[tuple[str, Layout, int]]:
    """Yield name, type and offset of each field."""
    for name in layout.names or ():
        if layout.fields is not None:
            yield name, layout.fields[name][0], layout.fields[name][1]


def words(struct: Layout) -> int:
    """Return the size of a struct in words of 8 bytes."""
    return struct.itemsize // 8
