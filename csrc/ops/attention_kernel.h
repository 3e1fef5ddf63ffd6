// Attention of a few rows over KV pages, with a running softmax over blocks of 64 cache entries.
//
// Blocks and spans start at multiples of 64 and SPAN of the cache index. Entries that a row does not attend do not
// change its result. So a row's result depends only on its own entries and their indices, not on other rows, pages or
// threads. The numbers of an entry become float32 in registers, and all arithmetic is float32.
#pragma once
#include "ops/attention_scores.h"

namespace cospec {

namespace {

struct Values {  // halves [first, last) of a block
    Halves halves;
    int first, last;
    uint64_t bits() const { return range_bits(first * HALF, last * HALF, 0); }
};

// state += weights of Q queries times the values of whole halves; VECTORS vectors from number `d` on.
template <class E, int Q, int VECTORS>
static void add_tile(const Query* queries, const Values& values, long stride, long d) {
    V sum[Q][VECTORS];
    UNROLL_FOR (int i = 0; i < Q; i++)
        UNROLL_FOR (int l = 0; l < VECTORS; l++) sum[i][l] = load(queries[i].state + SUMS + d + 16 * l);
    for (int half = values.first; half < values.last; half++) {
        const uint8_t* entry = values.halves.at[half];
        for (int j = 0; j < HALF; j++, entry += stride) {
            if (values.halves.ahead && d == 0 && j % 4 == 0) fetch(values.halves.ahead[half] + j * stride, 4 * stride);
            V value[VECTORS];
            UNROLL_FOR (int l = 0; l < VECTORS; l++) value[l] = numbers<E>(entry, d + 16 * l);
            UNROLL_FOR (int i = 0; i < Q; i++) {
                const V weight = splat(queries[i].scores[HALF * half + j]);
                UNROLL_FOR (int l = 0; l < VECTORS; l++) sum[i][l] = fma(weight, value[l], sum[i][l]);
            }
        }
    }
    UNROLL_FOR (int i = 0; i < Q; i++)
        UNROLL_FOR (int l = 0; l < VECTORS; l++) store(queries[i].state + SUMS + d + 16 * l, sum[i][l]);
}

// The same for one query and the entries in its `bits`, ascending. WHOLE: see numbers().
template <class E, int VECTORS, bool WHOLE = true>
static void add_some(const Query& query, const Values& values, long stride, long d) {
    float* state = query.state + SUMS + d;
    V sum[VECTORS];
    UNROLL_FOR (int l = 0; l < VECTORS; l++) sum[l] = load(state + 16 * l);
    for (uint64_t bits = query.bits & values.bits(); bits; bits &= bits - 1) {
        const int p = __builtin_ctzll(bits);
        const uint8_t* entry = values.halves.at[p / HALF] + p % HALF * stride;
        const V weight = splat(query.scores[p]);
        UNROLL_FOR (int l = 0; l < VECTORS; l++) sum[l] = fma(weight, numbers<E, WHOLE>(entry, d + 16 * l), sum[l]);
    }
    UNROLL_FOR (int l = 0; l < VECTORS; l++) store(state + 16 * l, sum[l]);
}

// Add the values of halves for Q queries that attend all entries, or for one query.
template <class E, int Q> static void add_halves(const Query* queries, const Values& values, long dim) {
    constexpr int VECTORS = TILE / Q;
    const long stride = entry_bytes<E>(dim);
    long d = 0;
    if (!(~queries[0].bits & values.bits())) {
        if constexpr (VECTORS >= 8)
            for (; d + 128 <= dim; d += 128) add_tile<E, Q, 8>(queries, values, stride, d);
        if constexpr (VECTORS >= 4)
            for (; d + 64 <= dim; d += 64) add_tile<E, Q, 4>(queries, values, stride, d);
        for (; d + 32 <= dim; d += 32) add_tile<E, Q, 2>(queries, values, stride, d);
        for (; d + 16 <= dim; d += 16) add_tile<E, Q, 1>(queries, values, stride, d);
    }
    for (int i = 0; i < Q; i++) {
        long at = d;
        for (; at + 64 <= dim; at += 64) add_some<E, 4>(queries[i], values, stride, at);
        for (; at + 16 <= dim; at += 16) add_some<E, 1>(queries[i], values, stride, at);
        if (at < dim) add_some<E, 1, false>(queries[i], values, stride, at);
    }
}

struct BlockScales {  // of the entries of formats with scales
    float keys[BLOCK], values[BLOCK];
};

template <class E> static void read_scales(const uint8_t* const* halves, long dim, float* scales) {
    for (long half = 0; half < HALVES; half++)
        for (long j = 0; j < HALF; j++)
            memcpy(
                scales + HALF * half + j, halves[half] + (j + 1) * entry_bytes<E>(dim) - sizeof(float), sizeof(float));
}

// Turn a block's products into weights under the query's running maximum, and rescale the earlier sums.
template <class E>
static void update_softmax(const Query& query, const AttentionParams& params, const BlockScales& scales) {
    const V low = splat(LOWEST);
    V block_max = low;
    for (int i = 0; i < 4; i++) {
        V score = load(query.scores + 16 * i) * splat(params.scale);
        if constexpr (E::scaled) score = score * load(scales.keys + 16 * i);
        if (params.softcap != 0) score = hyperbolic_tangent(score / splat(params.softcap)) * splat(params.softcap);
        store(query.scores + 16 * i, score);
        block_max = larger(block_max, select((uint32_t)(query.bits >> (16 * i)) & 0xffff, score, low));
    }
    float* state = query.state;
    const float maximum = largest(block_max);
    V total = load(state + TOTAL);
    if (maximum > state[0]) {
        const V factor = exponential(splat(state[0]) - splat(maximum));
        for (long d = SUMS; d < attention_state(params.dim); d += 16) store(state + d, load(state + d) * factor);
        total = total * factor;
        state[0] = maximum;
    }
    const V largest_so_far = splat(state[0]);
    for (int i = 0; i < 4; i++) {
        const uint32_t bits = (uint32_t)(query.bits >> (16 * i)) & 0xffff;
        V weight = select(bits, exponential(load(query.scores + 16 * i) - largest_so_far), zero());
        total = total + weight;
        if constexpr (E::scaled) weight = weight * load(scales.values + 16 * i);
        store(query.scores + 16 * i, weight);
    }
    store(state + TOTAL, total);
}

static void clear_state(float* state, long dim) {
    memset(state, 0, sizeof(float) * attention_state(dim));
    state[0] = LOWEST;
}

// Merge the state of a later span into the state of earlier spans.
static void merge_state(float* state, const float* later, long dim) {
    const long size = attention_state(dim);
    if (later[0] == LOWEST) return;
    if (state[0] == LOWEST) {
        memcpy(state, later, sizeof(float) * size);
        return;
    }
    const float maximum = later[0] > state[0] ? later[0] : state[0];
    const V own = exponential(splat(state[0]) - splat(maximum)), other = exponential(splat(later[0]) - splat(maximum));
    for (long d = TOTAL; d < size; d += 16) store(state + d, fma(load(later + d), other, load(state + d) * own));
    state[0] = maximum;
}

static void write_output(const AttentionParams& params, const AttentionTask& task, const float* states) {
    const long group = params.heads / params.kv_heads;
    for (long kv_head = task.first_head; kv_head < task.last_head; kv_head++)
        for (long row = task.first; row < task.last; row++)
            for (long head = kv_head * group; head < (kv_head + 1) * group; head++) {
                float* out = params.out + (row * params.heads + head) * params.dim;
                const float inverse_total = 1.0f / sum(load(states + TOTAL));
                for (long d = 0; d < params.dim; d++) out[d] = states[SUMS + d] * inverse_total;
                states += attention_state(params.dim);
            }
}

// Addresses of the halves of a block of one head: keys, then values.
static void find_halves(const AttentionParams& params, const int32_t* table, long kv_head, long stride, long begin,
    long end, const uint8_t** halves) {
    for (long half = 0; half < HALVES; half++) {
        long at = begin + half * HALF;
        if (at >= end) at = begin;  // not attended; any readable address will do
        const long page = table[at / params.page_size];
        const long offset = ((page * params.kv_heads + kv_head) * params.page_size + at % params.page_size) * stride;
        halves[half] = (const uint8_t*)params.k_pages + offset;
        halves[HALVES + half] = (const uint8_t*)params.v_pages + offset;
    }
}

// Call `run` with neighbouring queries that attend all entries in `wanted`, TILE_QUERIES or two of them, or with one
// query that attends some.
template <class Run> INLINE void for_tiles(const Query* queries, long count, uint64_t wanted, Run run) {
    for (long i = 0, size; i < count; i += size) {
        long whole = 0;
        while (whole < TILE_QUERIES && i + whole < count && !(~queries[i + whole].bits & wanted)) whole++;
        size = whole == TILE_QUERIES ? TILE_QUERIES : whole >= 2 ? 2 : 1;
        if (queries[i].bits & wanted) run(queries + i, size);
    }
}

// The queries of a task, `each` of every head.
struct Queries {
    Query* all;
    long count, each;
    Query* of_head(long head) const { return all + head * each; }
};

// Attend the entries [begin, end), which are in one span. Small pages of several heads are read in the order of memory.
template <class E>
static void attend_span(
    const AttentionParams& params, const AttentionTask& task, long begin, long end, const Queries& queries) {
    const long dim = params.dim, stride = entry_bytes<E>(dim), heads = task.last_head - task.first_head;
    const int32_t* table = params.tables + task.sequence * params.table_width;
    const long limit = params.write_at[params.starts[task.sequence + 1] - 1] + 1;
    typedef const uint8_t* Block[MAX_TASK_HEADS][2 * HALVES];
    Block blocks[2];
    const auto find = [&](long at) {
        Block& found = blocks[at / BLOCK % 2];
        for (long h = 0; h < heads; h++) find_halves(params, table, task.first_head + h, stride, at, limit, found[h]);
    };
    const int parts = parts_at_once(queries.each);
    // The sums of many queries, or of one head, stay in registers for the whole block.
    const int step = heads == 1 || parts == 2 ? HALVES : 2;
    begin = begin / BLOCK * BLOCK;
    find(begin);
    for (long at = begin; at < end; at += BLOCK) {
        const Block &halves = blocks[at / BLOCK % 2], &next = blocks[(at / BLOCK + 1) % 2];
        const bool more = at + BLOCK < limit;
        if (more) find(at + BLOCK);
        for (long i = 0; i < queries.count; i++) queries.all[i].bits = queries.all[i].range.in_block(at);
        for (int part = 0; part < 4; part += parts)
            for (long h = 0; h < heads; h++) {
                const Query* const first = queries.of_head(h);
                const Halves keys = {halves[h] + 2 * part, more ? next[h] + 2 * part : nullptr};
#if defined(__AVX512F__)
                if (parts == 2) {
                    score_many<E>(first, queries.each, keys, dim, part);
                    continue;
                }
#endif
                for_tiles(first, queries.each, 0xffffull << (16 * part), [&](const Query* q, long size) {
                    const auto score = size == TILE_QUERIES ? score_tile<E, TILE_QUERIES>
                                       : size == 2          ? score_tile<E, 2>
                                                            : score_tile<E, 1>;
                    score(q, q == first ? keys : Halves{keys.at, nullptr}, dim, part);
                });
            }
        for (long h = 0; h < heads; h++) {
            BlockScales scales;
            if constexpr (E::scaled) {
                read_scales<E>(halves[h], dim, scales.keys);
                read_scales<E>(halves[h] + HALVES, dim, scales.values);
            }
            for (const Query* q = queries.of_head(h); q < queries.of_head(h + 1); q++)
                if (q->bits) update_softmax<E>(*q, params, scales);
        }
        for (int half = 0; half < HALVES; half += step)
            for (long h = 0; h < heads; h++) {
                const Query* const first = queries.of_head(h);
                const Values all = {{halves[h] + HALVES, nullptr}, half, half + step};
                const Values fetching = {{all.halves.at, more ? next[h] + HALVES : nullptr}, half, half + step};
                for_tiles(first, queries.each, all.bits(), [&](const Query* q, long size) {
                    const auto add = size == TILE_QUERIES ? add_halves<E, TILE_QUERIES>
                                     : size == 2          ? add_halves<E, 2>
                                                          : add_halves<E, 1>;
                    add(q, q == first ? fetching : all, dim);
                });
            }
    }
}

static size_t attend_scratch(long queries, long dim) {
    return (size_t)queries * (BLOCK + 2 * attention_state(dim) + sizeof(Query) / sizeof(float)) + 2;
}

template <class E>
static void attend_format(const AttentionParams& params, const AttentionTask& task, float* scratch) {
    const long group = params.heads / params.kv_heads, each = (task.last - task.first) * group;
    const long count = (task.last_head - task.first_head) * each, size = attention_state(params.dim);
    float *scores = scratch, *merged = scores + count * BLOCK, *later = merged + count * size;
    Query* queries = (Query*)(((uintptr_t)(later + count * size) + 7) & ~(uintptr_t)7);
    long begin = params.visible[task.first], end = 0;
    for (long i = 0; i < count; i++) {
        const long row = task.first + i % each / group, head = (task.first_head + i / each) * group + i % group;
        queries[i] = {params.q + row * params.q_row + head * params.q_head, visible_range(params, task.sequence, row),
            0, scores + i * BLOCK, nullptr};
        if (queries[i].range.from < begin) begin = queries[i].range.from;
        if (queries[i].range.end() > end) end = queries[i].range.end();
    }
    const bool all = task.span == ALL_SPANS;
    const long first_span = all ? begin / SPAN : task.span, last_span = all ? (end - 1) / SPAN : task.span;
    for (long span = first_span; span <= last_span; span++) {
        float* states = !all ? task.state : span == first_span ? merged : later;
        for (long i = 0; i < count; i++) clear_state(queries[i].state = states + i * size, params.dim);
        const long from = span * SPAN > begin ? span * SPAN : begin;
        const long to = (span + 1) * SPAN < end ? (span + 1) * SPAN : end;
        attend_span<E>(params, task, from, to, {queries, count, each});
        for (long i = 0; states == later && i < count; i++)
            merge_state(merged + i * size, later + i * size, params.dim);
    }
    if (all) write_output(params, task, merged);
}

static void attend(const AttentionParams& params, const AttentionTask& task, float* scratch) {
    switch (params.cache_format) {
#define FORMAT(name, id, Entry) \
    case id: attend_format<Entry>(params, task, scratch); break;
        CACHE_FORMATS(FORMAT)
#undef FORMAT
    }
}

static void merge_spans(const AttentionParams& params, const AttentionTask& task, long spans) {
    const long size = attention_state(params.dim);
    const long count = task.num_queries(params);
    for (long span = 1; span < spans; span++)
        for (long i = 0; i < count; i++)
            merge_state(task.state + i * size, task.state + (span * count + i) * size, params.dim);
    write_output(params, task, task.state);
}

}  // namespace

}  // namespace cospec
