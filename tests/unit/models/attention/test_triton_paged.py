"""The Triton kernels: parts of long contexts, results that no other row changes, and code for a GPU.

``tests/contract/test_attention.py`` compares every back end with plain attention. On a CPU the kernels run in Triton's
interpreter.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.errors import InvalidInput
from cospec.models.attention import triton_paged
from cospec.models.attention.backend import AttentionShape, choose_attention
from cospec.models.attention.triton_paged import TritonAttention
from cospec.models.input_batch import InputBatch, pack
from cospec.models.kv_cache import LayerBlocks, LayerShape
from harness.attention import SCALE, TREE, AttentionCase, attention_case, dense_attention
from harness.triton_compiler import compile_for_gpu

CPU = torch.device("cpu")
BACKEND = TritonAttention()
LONG = SequenceSlice("long", 262, (1, 2, 3, 4), parents=(-1, 0, 1))  # two parts
SHORT = SequenceSlice("short", 30, (1,))
BRANCHING = SequenceSlice("tree", 254, (1, 2, 3, 4, 5, 6, 7, 8), parents=TREE)

needs_triton = pytest.mark.skipif(bool(BACKEND.why_not(CPU, (), 16)), reason=BACKEND.why_not(CPU, (), 16))


def attended(case: AttentionCase, window: int | None = None) -> Tensor:
    pages = LayerBlocks(case.k_pages.clone(), case.v_pages.clone())
    return BACKEND.prepare(case.batch)(case.q, case.k, case.v, pages, AttentionShape(SCALE, window))


@needs_triton
@pytest.mark.parametrize("window", [None, 8, 100], ids=str)
def test_contexts_of_several_parts(window: int | None) -> None:
    case = attention_case((LONG, SHORT, BRANCHING))
    torch.testing.assert_close(attended(case, window).double(), dense_attention(case, window), atol=1e-5, rtol=1e-5)


@needs_triton
def test_no_other_sequence_changes_a_bit() -> None:
    together = attended(attention_case((SHORT, LONG, BRANCHING)))
    for slice, rows in ((SHORT, together[:1]), (LONG, together[1:5]), (BRANCHING, together[5:])):
        assert torch.equal(attended(attention_case((slice,))), rows)


@needs_triton
def test_a_row_of_a_draft_attends_as_a_decoding_step() -> None:
    """The last row of a draft attends the same entries as a step of one row, whose entries are in the cache.

    The interpreter multiplies with NumPy, whose last bit depends on the number of rows on some processors.
    """
    draft = attention_case((LONG,))
    pages = LayerBlocks(draft.k_pages.clone(), draft.v_pages.clone())
    wanted = BACKEND.prepare(draft.batch)(draft.q, draft.k, draft.v, pages, AttentionShape(SCALE))[3:]
    step = SequenceSlice("long", LONG.start + 3, (4,))
    batch = pack(TokenBatch((step,)), {"long": draft.batch.tables[0].tolist()}, 16, CPU)

    def found(batch: InputBatch) -> Tensor:
        return BACKEND.prepare(batch)(draft.q[3:], draft.k[3:], draft.v[3:], pages, AttentionShape(SCALE))

    assert torch.allclose(found(batch), wanted, rtol=0.0, atol=1e-6)
    less = replace(batch, visible=batch.visible - 1)
    assert not torch.allclose(found(less), wanted, rtol=0.0, atol=1e-3), "control: a row that attends one entry less"


@needs_triton
def test_launches_that_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    case = attention_case((SHORT, LONG, BRANCHING))
    wanted = attended(case)
    monkeypatch.setattr(triton_paged, "MAX_STATES", 1)
    assert torch.equal(attended(case), wanted)


def test_a_cpu_without_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    sentence = r"attention_backend is 'triton'; allowed is auto or .*, because Triton (runs|is not installed)"
    with pytest.raises(InvalidInput, match=sentence):
        choose_attention("triton", CPU, [LayerShape(2, 32)], 16)


COMPILE = """
from cospec.models.attention.triton_kernels import context_kernel, tree_kernel, write_kernel

POINTERS = dict.fromkeys(("queries", "keys", "values", "key_scales", "value_scales", "out"), "bf16")
POINTERS |= dict.fromkeys(("new_keys", "new_values"), "bf16")
POINTERS |= dict.fromkeys(("tiles", "segments", "tables", "visible", "starts", "write_at"), "i32")
POINTERS |= {"positions": "i64", "masks": "i64", "sums": "fp32", "norms": "fp32"}
SIZES = {"DIM": 80, "WIDTH": 128, "HEADS": 4, "TILE": 16, "SCALED": False, "TREES": True}
for kernel, word in ((context_kernel, "mma"), (tree_kernel, "mma"), (write_kernel, "st.global")):
    assert word in compiled(kernel, POINTERS, SIZES, {"scale": "fp32", "softcap": "fp32"})
"""


@needs_triton
def test_the_kernels_compile_for_a_gpu() -> None:
    compile_for_gpu(COMPILE)
