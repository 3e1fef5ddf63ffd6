"""Triton kernels of paged attention: a softmax for each part of a context, and their merge with the nodes of a tree.

A program computes a *tile*: rows of one sequence, times the query heads that share a key-value head. The sizes of tiles
and parts are constants, and entries that a row does not attend do not change the row's result. So a row's result
depends only on its own entries and their indices, not on other rows or sequences.
"""

import triton
import triton.language as tl

BLOCK = tl.constexpr(64)  # entries whose products are in registers; also the most nodes of a tree
PART = tl.constexpr(256)  # entries of one softmax, as in csrc/ops/attention_kernel.h
LOWEST = tl.constexpr(-1e30)  # the maximum of no entries
PER_BATCH = ["first_tile", "table_step", "parts"]  # Triton would compile again for values of other divisibility


@triton.jit
def _places(table, at, inside, page_size, page_step, slot_step):
    """Return the offsets of cache entries ``at`` of one head."""
    pages = tl.load(table + at // page_size, mask=inside, other=0).to(tl.int64)
    return pages * page_step + (at % page_size).to(tl.int64) * slot_step


@triton.jit
def _entries(memory, scales, places, inside, kind, DIM: tl.constexpr, WIDTH: tl.constexpr, SCALED: tl.constexpr):
    """Return the numbers of entries as dtype ``kind``, ``[BLOCK, WIDTH]``; entries that are not ``inside`` are 0."""
    number = tl.arange(0, WIDTH)
    wanted = inside[:, None] & (number < DIM)[None, :]
    found = tl.load(memory + places[:, None] + number[None, :], mask=wanted, other=0)
    if SCALED:  # a float32 follows the numbers
        scale = tl.load(scales + (places + DIM) // 4, mask=inside, other=0.0)
        return (found.to(tl.float32) * scale[:, None]).to(kind)
    return found.to(kind)


@triton.jit
def _attend(state_sums, state_total, state_max, q, k, v, allowed, scale, softcap):
    """Add the entries of one block to the state of a softmax. Rows that attend no entry keep their states."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if softcap > 0:
        scores = (2 * tl.sigmoid(2 * scores / softcap) - 1) * softcap
    scores = tl.where(allowed, scores, LOWEST)
    largest = tl.maximum(state_max, tl.max(scores, 1))
    weights = tl.where(allowed, tl.exp(scores - largest[:, None]), 0.0)
    factor = tl.exp(state_max - largest)
    sums = state_sums * factor[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return sums, state_total * factor + tl.sum(weights, 1), largest


@triton.jit
def _merge(sums, total, maximum, later_sums, later_total, later_max):
    """Merge two states by their maxima, as a log-sum-exp."""
    largest = tl.maximum(maximum, later_max)
    own, other = tl.exp(maximum - largest), tl.exp(later_max - largest)
    return sums * own[:, None] + later_sums * other[:, None], total * own + later_total * other, largest


@triton.jit
def _tile(tiles, number, head, group, HEADS: tl.constexpr, TILE: tl.constexpr):
    """Return a tile's rows and query heads, each ``[TILE]``, and which of them exist."""
    first, count = tl.load(tiles + 2 * number), tl.load(tiles + 2 * number + 1)
    member = tl.arange(0, TILE)
    live = (member // HEADS < count) & (member % HEADS < group)
    return first + member // HEADS, head * group + member % HEADS, live


@triton.jit(do_not_specialize=PER_BATCH)
def write_kernel(
    new_keys, new_values, keys, values, segments, tables, write_at, key_step, value_step, table_step, page_size,
    page_step, head_step, slot_step, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the keys and values of one row and head to their page; grid ``(T, kv_heads)``.

    Args:
        new_keys, new_values: ``[T, kv_heads, DIM]`` in the dtype of the pages; a row starts ``key_step`` or
            ``value_step`` numbers after the previous row.
        segments, tables, write_at: of ``InputBatch``.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.load(write_at + row)
    page = tl.load(tables + tl.load(segments + row) * table_step + at // page_size).to(tl.int64)
    number = tl.arange(0, WIDTH)
    inside = number < DIM
    place = page * page_step + (at % page_size).to(tl.int64) * slot_step + head * head_step + number
    key = tl.load(new_keys + row * key_step + head * DIM + number, mask=inside, other=0.0)
    value = tl.load(new_values + row * value_step + head * DIM + number, mask=inside, other=0.0)
    tl.store(keys + place, key, mask=inside)
    tl.store(values + place, value, mask=inside)


@triton.jit(do_not_specialize=PER_BATCH)
def context_kernel(
    queries, keys, values, key_scales, value_scales, tiles, segments, tables, visible, positions, sums, norms,
    first_tile, heads, kv_heads, group, table_step, page_size, page_step, head_step, slot_step, parts, scale, softcap,
    window, DIM: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Write the states of one part of the context for one tile and key-value head; grid ``(tiles, kv_heads, parts)``.

    Args:
        queries: ``[T, heads, DIM]``.
        keys, values, key_scales, value_scales: pages; the scales are the same memory as float32.
        tiles: int32 ``[tiles, 2]``, first row and number of rows.
        segments, visible, positions, tables: of ``InputBatch``.
        sums, norms: float32 ``[tiles, kv_heads, parts, TILE, WIDTH]`` and ``[..., 2, TILE]`` of this launch.
        window: 0 for none.
    """
    number, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows, query_heads, live = _tile(tiles, first_tile + number, head, group, HEADS, TILE)
    seen = tl.load(visible + rows, mask=live, other=0)
    end = tl.minimum(tl.max(seen, 0), (part + 1) * PART)
    begin = part * PART
    if begin < end:
        oldest = tl.zeros([TILE], tl.int32)
        if window > 0:
            oldest = (tl.load(positions + rows, mask=live, other=0) - window + 1).to(tl.int32)
            least = tl.min(tl.where(live, oldest, end), 0)
            begin = tl.maximum(begin, tl.maximum(least, 0) // BLOCK * BLOCK)
        dims = tl.arange(0, WIDTH)
        at_query = (rows.to(tl.int64) * heads + query_heads)[:, None] * DIM + dims[None, :]
        q = tl.load(queries + at_query, mask=live[:, None] & (dims < DIM)[None, :], other=0.0)
        table = tables + tl.load(segments + tl.min(tl.where(live, rows, 2147483647), 0)) * table_step
        state, total = tl.zeros([TILE, WIDTH], tl.float32), tl.zeros([TILE], tl.float32)
        maximum = tl.full([TILE], LOWEST, tl.float32)
        for block in range(begin, end, BLOCK):
            at = block + tl.arange(0, BLOCK)
            inside = at < end
            places = _places(table, at, inside, page_size, page_step, slot_step) + head * head_step
            k = _entries(keys, key_scales, places, inside, q.dtype, DIM, WIDTH, SCALED)
            v = _entries(values, value_scales, places, inside, q.dtype, DIM, WIDTH, SCALED)
            allowed = (at[None, :] < seen[:, None]) & (at[None, :] >= oldest[:, None]) & inside[None, :]
            state, total, maximum = _attend(state, total, maximum, q, k, v, allowed, scale, softcap)
        place = ((number * kv_heads + head) * parts + part).to(tl.int64)
        member = tl.arange(0, TILE)
        tl.store(sums + (place * TILE + member)[:, None] * WIDTH + dims[None, :], state)
        tl.store(norms + place * 2 * TILE + member, total)
        tl.store(norms + (place * 2 + 1) * TILE + member, maximum)


@triton.jit(do_not_specialize=PER_BATCH)
def tree_kernel(
    queries, keys, values, key_scales, value_scales, tiles, segments, tables, visible, positions, masks, starts,
    write_at, sums, norms, out, first_tile, heads, kv_heads, group, table_step, page_size, page_step, head_step,
    slot_step, parts, scale, softcap, window, DIM: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr,
    TILE: tl.constexpr, SCALED: tl.constexpr, TREES: tl.constexpr,
):  # fmt: skip
    """Merge the parts of a context in ascending order, then the attended nodes of a tree; grid ``(tiles, kv_heads)``.

    Args:
        masks, starts, write_at: of ``InputBatch``; the other arguments are those of ``context_kernel``.
        out: ``[T, heads, DIM]``.
        TREES: whether rows can have a mask.
    """
    number, head = tl.program_id(0), tl.program_id(1)
    rows, query_heads, live = _tile(tiles, first_tile + number, head, group, HEADS, TILE)
    seen = tl.load(visible + rows, mask=live, other=0)
    dims, member = tl.arange(0, WIDTH), tl.arange(0, TILE)
    at_query = (rows.to(tl.int64) * heads + query_heads)[:, None] * DIM + dims[None, :]
    wanted = live[:, None] & (dims < DIM)[None, :]
    state, total = tl.zeros([TILE, WIDTH], tl.float32), tl.zeros([TILE], tl.float32)
    maximum = tl.full([TILE], LOWEST, tl.float32)
    for part in range(0, tl.cdiv(tl.max(seen, 0), PART)):
        place = ((number * kv_heads + head) * parts + part).to(tl.int64)
        later = tl.load(sums + (place * TILE + member)[:, None] * WIDTH + dims[None, :])
        later_total = tl.load(norms + place * 2 * TILE + member)
        later_max = tl.load(norms + (place * 2 + 1) * TILE + member)
        state, total, maximum = _merge(state, total, maximum, later, later_total, later_max)
    if TREES:
        mask = tl.load(masks + rows, mask=live, other=0)
        known = tl.max(tl.where(mask != 0, seen, 0), 0)  # all nodes of a tree follow the same known tokens; 0: no node
        q = tl.load(queries + at_query, mask=wanted, other=0.0)
        segment = tl.load(segments + tl.min(tl.where(live, rows, 2147483647), 0))
        start, last = tl.load(starts + segment), tl.load(starts + segment + 1) - 1
        node = tl.arange(0, BLOCK)
        inside = known + node <= tl.where(known > 0, tl.load(write_at + last), -1)
        row = start + known + node - tl.load(write_at + start)
        table = tables + segment * table_step
        places = _places(table, known + node, inside, page_size, page_step, slot_step) + head * head_step
        k = _entries(keys, key_scales, places, inside, q.dtype, DIM, WIDTH, SCALED)
        v = _entries(values, value_scales, places, inside, q.dtype, DIM, WIDTH, SCALED)
        allowed = ((mask[:, None] >> node[None, :].to(tl.int64)) & 1 != 0) & inside[None, :]
        if window > 0:
            own = tl.load(positions + rows, mask=live, other=0)
            theirs = tl.load(positions + row, mask=inside, other=0)
            allowed &= own[:, None] - theirs[None, :] < window
        tree, tree_total = tl.zeros([TILE, WIDTH], tl.float32), tl.zeros([TILE], tl.float32)
        tree_max = tl.full([TILE], LOWEST, tl.float32)
        tree, tree_total, tree_max = _attend(tree, tree_total, tree_max, q, k, v, allowed, scale, softcap)
        state, total, maximum = _merge(state, total, maximum, tree, tree_total, tree_max)
    state = state / tl.where(live, total, 1.0)[:, None]
    tl.store(out + at_query, state.to(out.dtype.element_ty), mask=wanted)
