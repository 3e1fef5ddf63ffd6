// Attention of a few rows over KV pages, with a running softmax over blocks of 64 cache entries.
//
// Blocks start at multiples of 64 of the cache index. Entries that a row does not attend do not change its result.
// So a row's result depends only on its own entries and their indices, not on other rows, pages or threads.
#pragma once
#include "ops/kernels.h"
#include "ops/simd.h"

namespace cospec {

namespace {

constexpr long BLOCK = 64;
constexpr long HALF = 8;  // entries that are certain to be in one page

// Bits of the entries begin .. begin + 63 that lie in [from, to).
INLINE uint64_t range_bits(long from, long to, long begin) {
    long low = from - begin < 0 ? 0 : from - begin, high = to - begin > 64 ? 64 : to - begin;
    if (low >= high) return 0;
    return (high - low == 64 ? ~0ull : (1ull << (high - low)) - 1) << low;
}

struct VisibleRange {  // the cache entries that one row attends
    long from, to;
    uint64_t tree;  // bit j: entry to + j
    uint64_t in_block(long begin) const {
        uint64_t bits = range_bits(from, to, begin);  // none when a window begins after `to`
        const long shift = to - begin;
        if (shift >= 0 && shift < 64) bits |= tree << shift;
        if (shift < 0 && shift > -64) bits |= tree >> -shift;
        return bits;
    }
    long end() const { return tree ? to + 64 - __builtin_clzll(tree) : to; }
};

static VisibleRange visible_range(const AttentionParams& params, long sequence, long row) {
    VisibleRange r = {0, params.visible[row], (uint64_t)params.mask[row]};
    if (!params.window || params.positions[row] < params.window) return r;
    const int64_t oldest = params.positions[row] - params.window + 1;
    r.from = oldest;
    // Draft nodes are part of this batch, and their positions follow their depths.
    const long first = params.starts[sequence], offset = first - params.write_at[first];
    for (uint64_t bits = r.tree; bits; bits &= bits - 1) {
        const int j = __builtin_ctzll(bits);
        if (params.positions[r.to + j + offset] < oldest) r.tree &= ~(1ull << j);
    }
    return r;
}

// Running state of one query: the largest score so far, the sum of weights per lane, and the weighted values.
struct Query {
    const float* q;
    VisibleRange range;
    uint64_t bits;  // of the current block
    float largest;
    float total[16];
};

// Compute q . k for sixteen entries: eight consecutive ones at each of two addresses.
INLINE V scores16(const float* q, const float* k0, const float* k1, long dim) {
#if defined(__AVX512F__)
    V part[16];
    UNROLL_FOR (int j = 0; j < 16; j++) part[j] = zero();
    long d = 0;
    for (; d + 16 <= dim; d += 16) {
        const V value = load(q + d);
        UNROLL_FOR (int j = 0; j < 16; j++) part[j] = fma(value, load((j < 8 ? k0 : k1) + (j % 8) * dim + d), part[j]);
    }
    if (d < dim) {
        const V value = load_low8(q + d);
        UNROLL_FOR (int j = 0; j < 16; j++)
            part[j] = fma(value, load_low8((j < 8 ? k0 : k1) + (j % 8) * dim + d), part[j]);
    }
    return sums16(part);
#else
    float result[16];
    for (int group = 0; group < 4; group++) {
        const float* k = (group < 2 ? k0 : k1) + group % 2 * 4 * dim;
        V part[4] = {zero(), zero(), zero(), zero()};
        long d = 0;
        for (; d + 16 <= dim; d += 16) {
            const V value = load(q + d);
            UNROLL_FOR (int j = 0; j < 4; j++) part[j] = fma(value, load(k + j * dim + d), part[j]);
        }
        if (d < dim) {
            const V value = load_low8(q + d);
            UNROLL_FOR (int j = 0; j < 4; j++) part[j] = fma(value, load_low8(k + j * dim + d), part[j]);
        }
        sums4(part, result + 4 * group);
    }
    return load(result);
#endif
}

// sum += weights[p] * values of entry p for the entries in `bits`, ascending; LANES vectors from dimension `d` on.
template <int LANES> static void add_values(
    const float* weights, uint64_t bits, const float* const* values, long dim, long d, float* sum) {
    V c[LANES];
    UNROLL_FOR (int i = 0; i < LANES; i++) c[i] = load(sum + d + 16 * i);
    if (bits == ~0ull) {
        for (int half = 0; half < BLOCK / HALF; half++) {
            const float* row = values[half] + d;
            for (int j = 0; j < HALF; j++, row += dim) {
                const V weight = splat(weights[HALF * half + j]);
                UNROLL_FOR (int i = 0; i < LANES; i++) c[i] = fma(weight, load(row + 16 * i), c[i]);
            }
        }
    } else {
        for (; bits; bits &= bits - 1) {
            const int p = __builtin_ctzll(bits);
            const float* row = values[p / HALF] + p % HALF * dim + d;
            const V weight = splat(weights[p]);
            UNROLL_FOR (int i = 0; i < LANES; i++) c[i] = fma(weight, load(row + 16 * i), c[i]);
        }
    }
    UNROLL_FOR (int i = 0; i < LANES; i++) store(sum + d + 16 * i, c[i]);
}

// The same for a last half vector.
static void add_last8(const float* weights, uint64_t bits, const float* const* values, long dim, long d, float* sum) {
    V c = load_low8(sum + d);
    for (; bits; bits &= bits - 1) {
        const int p = __builtin_ctzll(bits);
        c = fma(splat(weights[p]), load_low8(values[p / HALF] + p % HALF * dim + d), c);
    }
    store_low8(sum + d, c);
}

static void add_block(const float* weights, uint64_t bits, const float* const* values, long dim, float* sum) {
    long d = 0;
#if defined(__AVX512F__)
    for (; d + 128 <= dim; d += 128) add_values<8>(weights, bits, values, dim, d, sum);
#endif
    for (; d + 64 <= dim; d += 64) add_values<4>(weights, bits, values, dim, d, sum);
    for (; d + 32 <= dim; d += 32) add_values<2>(weights, bits, values, dim, d, sum);
    for (; d + 16 <= dim; d += 16) add_values<1>(weights, bits, values, dim, d, sum);
    if (d < dim) add_last8(weights, bits, values, dim, d, sum);
}

// Turn a block's scores into weights under the query's running maximum, and rescale the earlier sums.
static void update_softmax(Query& query, float* scores, float* sum, long padded) {
    const V low = splat(-1e30f);
    V block_max = low;
    for (int i = 0; i < 4; i++)
        block_max = larger(block_max, select((uint32_t)(query.bits >> (16 * i)) & 0xffff, load(scores + 16 * i), low));
    const float maximum = largest(block_max);
    V total = load(query.total);
    if (maximum > query.largest) {
        const V factor = exponential(splat(query.largest) - splat(maximum));
        for (long d = 0; d < padded; d += 16) store(sum + d, load(sum + d) * factor);
        total = total * factor;
        query.largest = maximum;
    }
    const V largest_so_far = splat(query.largest);
    for (int i = 0; i < 4; i++) {
        const V weight = select(
            (uint32_t)(query.bits >> (16 * i)) & 0xffff, exponential(load(scores + 16 * i) - largest_so_far), zero());
        store(scores + 16 * i, weight);
        total = total + weight;
    }
    store(query.total, total);
}

INLINE long padded_dim(long dim) { return (dim + 15) / 16 * 16; }

static size_t attend_scratch(long rows, long heads_per_kv, long dim) {
    return (size_t)rows * heads_per_kv * (BLOCK + padded_dim(dim) + sizeof(Query) / sizeof(float) + 2);
}

struct BlockPointers {  // addresses of the keys and values of a block's halves
    const float *keys[BLOCK / HALF], *values[BLOCK / HALF];
};

static BlockPointers block_pointers(const AttentionParams& params, long sequence, long kv_head, long begin, long end) {
    BlockPointers block;
    const int32_t* table = params.tables + sequence * params.table_width;
    for (long half = 0; half < BLOCK / HALF; half++) {
        long at = begin + half * HALF;
        if (at >= end) at = begin;  // not attended; any readable address will do
        const long page = table[at / params.page_size];
        const long offset =
            ((page * params.kv_heads + kv_head) * params.page_size + at % params.page_size) * params.dim;
        block.keys[half] = params.k_pages + offset;
        block.values[half] = params.v_pages + offset;
    }
    return block;
}

// Pages are too small for the hardware prefetcher, so the next block is fetched explicitly.
INLINE void prefetch(const float* half, long dim) {
    for (long i = 0; i < HALF * dim; i += 16) __builtin_prefetch(half + i);
}

static void score_block(
    const AttentionParams& params, const BlockPointers& block, const Query& query, float* scores, int i) {
    V score = scores16(query.q, block.keys[2 * i], block.keys[2 * i + 1], params.dim) * splat(params.scale);
    if (params.softcap != 0) score = hyperbolic_tangent(score / splat(params.softcap)) * splat(params.softcap);
    store(scores + 16 * i, score);
}

static void attend(const AttentionParams& params, long sequence, long kv_head, long first, long last, float* scratch) {
    const long heads_per_kv = params.heads / params.kv_heads, count = (last - first) * heads_per_kv,
               padded = padded_dim(params.dim);
    float *scores = scratch, *sums = scores + count * BLOCK;
    Query* queries = (Query*)(((uintptr_t)(sums + count * padded) + 7) & ~(uintptr_t)7);
    long begin = params.visible[first], end = 0;
    for (long i = 0; i < count; i++) {
        const long row = first + i / heads_per_kv, head = kv_head * heads_per_kv + i % heads_per_kv;
        queries[i] = {
            params.q + row * params.q_row + head * params.q_head, visible_range(params, sequence, row), 0, -1e30f, {0}};
        if (queries[i].range.from < begin) begin = queries[i].range.from;
        if (queries[i].range.end() > end) end = queries[i].range.end();
    }
    memset(sums, 0, sizeof(float) * count * padded);
    begin = begin / BLOCK * BLOCK;
    BlockPointers block = block_pointers(params, sequence, kv_head, begin, end), next = block;
    for (long at = begin; at < end; at += BLOCK, block = next) {
        if (at + BLOCK < end) next = block_pointers(params, sequence, kv_head, at + BLOCK, end);
        for (long i = 0; i < count; i++) queries[i].bits = queries[i].range.in_block(at);
        for (int part = 0; part < 4; part++) {
            for (int half = 2 * part; half < 2 * part + 2; half++) {
                prefetch(block.values[half], params.dim);
                prefetch(next.keys[half], params.dim);
            }
            for (long i = 0; i < count; i++)
                if (queries[i].bits >> (16 * part) & 0xffff)
                    score_block(params, block, queries[i], scores + i * BLOCK, part);
        }
        for (long i = 0; i < count; i++) {
            if (!queries[i].bits) continue;
            update_softmax(queries[i], scores + i * BLOCK, sums + i * padded, padded);
            add_block(scores + i * BLOCK, queries[i].bits, block.values, params.dim, sums + i * padded);
        }
    }
    for (long i = 0; i < count; i++) {
        const long row = first + i / heads_per_kv, head = kv_head * heads_per_kv + i % heads_per_kv;
        float* out = params.out + (row * params.heads + head) * params.dim;
        const float inverse_total = 1.0f / sum(load(queries[i].total));
        for (long d = 0; d < params.dim; d++) out[d] = sums[i * padded + d] * inverse_total;
    }
}

}  // namespace

}  // namespace cospec
