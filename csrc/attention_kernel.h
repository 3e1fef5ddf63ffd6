// Attention of a few rows over pages, with a running softmax over blocks of 64 cache entries.
//
// Blocks start at multiples of 64 of the cache index, and entries that a row does not attend leave no trace in it, so a
// row's result depends on its own entries and their indices alone: not on other rows, pages or threads.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace {

constexpr long BLOCK = 64;
constexpr long HALF = 8;  // entries that are certain to be in one page

// Bits of the entries begin .. begin + 63 that lie in [from, to).
INLINE uint64_t range_bits(long from, long to, long begin) {
    long low = from - begin < 0 ? 0 : from - begin, high = to - begin > 64 ? 64 : to - begin;
    if (low >= high) return 0;
    return (high - low == 64 ? ~0ull : (1ull << (high - low)) - 1) << low;
}

struct Reach {  // the cache entries that one row attends
    long from, to;
    uint64_t tree;  // bit j: entry to + j
    uint64_t in_block(long begin) const {
        uint64_t bits = range_bits(from, to, begin);  // none when a window begins behind `to`
        const long shift = to - begin;
        if (shift >= 0 && shift < 64) bits |= tree << shift;
        if (shift < 0 && shift > -64) bits |= tree >> -shift;
        return bits;
    }
    long end() const { return tree ? to + 64 - __builtin_clzll(tree) : to; }
};

static Reach reach_of(const AttentionJob& job, long segment, long row) {
    Reach r = {0, job.visible[row], (uint64_t)job.mask[row]};
    if (!job.window || job.positions[row] < job.window) return r;
    const int64_t oldest = job.positions[row] - job.window + 1;
    r.from = oldest;
    // In the tree, which is part of this batch, positions go by depth.
    const long first = job.starts[segment], offset = first - job.write_at[first];
    for (uint64_t bits = r.tree; bits; bits &= bits - 1) {
        const int j = __builtin_ctzll(bits);
        if (job.positions[r.to + j + offset] < oldest) r.tree &= ~(1ull << j);
    }
    return r;
}

// Running state of one query: its largest score so far, the sum of its weights per lane, and the weighted values.
struct Query {
    const float* q;
    Reach reach;
    uint64_t bits;    // of the block at hand
    float largest;
    float total[16];
};

// q . k for sixteen entries, eight in a row at each of two places.
INLINE V scores16(const float* q, const float* k0, const float* k1, long dim) {
#if defined(__AVX512F__)
    V part[16];
    UNROLL for (int j = 0; j < 16; j++) part[j] = zero();
    long d = 0;
    for (; d + 16 <= dim; d += 16) {
        const V value = load(q + d);
        UNROLL for (int j = 0; j < 16; j++) part[j] = fma(value, load((j < 8 ? k0 : k1) + (j % 8) * dim + d), part[j]);
    }
    if (d < dim) {
        const V value = load_low8(q + d);
        UNROLL for (int j = 0; j < 16; j++)
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
            UNROLL for (int j = 0; j < 4; j++) part[j] = fma(value, load(k + j * dim + d), part[j]);
        }
        if (d < dim) {
            const V value = load_low8(q + d);
            UNROLL for (int j = 0; j < 4; j++) part[j] = fma(value, load_low8(k + j * dim + d), part[j]);
        }
        sums4(part, result + 4 * group);
    }
    return load(result);
#endif
}

// sum += weights[p] * values of entry p for the entries in `bits`, ascending; `lanes` vectors from dimension `d` on.
template <int LANES> static void add_values(
    const float* weights, uint64_t bits, const float* const* values, long dim, long d, float* sum) {
    V c[LANES];
    UNROLL for (int i = 0; i < LANES; i++) c[i] = load(sum + d + 16 * i);
    if (bits == ~0ull) {
        for (int half = 0; half < BLOCK / HALF; half++) {
            const float* row = values[half] + d;
            for (int j = 0; j < HALF; j++, row += dim) {
                const V weight = splat(weights[HALF * half + j]);
                UNROLL for (int i = 0; i < LANES; i++) c[i] = fma(weight, load(row + 16 * i), c[i]);
            }
        }
    } else {
        for (; bits; bits &= bits - 1) {
            const int p = __builtin_ctzll(bits);
            const float* row = values[p / HALF] + p % HALF * dim + d;
            const V weight = splat(weights[p]);
            UNROLL for (int i = 0; i < LANES; i++) c[i] = fma(weight, load(row + 16 * i), c[i]);
        }
    }
    UNROLL for (int i = 0; i < LANES; i++) store(sum + d + 16 * i, c[i]);
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

// Turn a block's scores into weights under the query's running maximum; rescales what was summed before.
static void soften(Query& query, float* scores, float* sum, long padded) {
    const V low = splat(-1e30f);
    V top = low;
    for (int i = 0; i < 4; i++) top = larger(top, select((uint32_t)(query.bits >> (16 * i)) & 0xffff, load(scores + 16 * i), low));
    const float most = largest(top);
    V total = load(query.total);
    if (most > query.largest) {
        const V factor = exponential(splat(query.largest) - splat(most));
        for (long d = 0; d < padded; d += 16) store(sum + d, load(sum + d) * factor);
        total = total * factor;
        query.largest = most;
    }
    const V maximum = splat(query.largest);
    for (int i = 0; i < 4; i++) {
        const V weight =
            select((uint32_t)(query.bits >> (16 * i)) & 0xffff, exponential(load(scores + 16 * i) - maximum), zero());
        store(scores + 16 * i, weight);
        total = total + weight;
    }
    store(query.total, total);
}

INLINE long padded_dim(long dim) { return (dim + 15) / 16 * 16; }

static size_t attend_scratch(long rows, long heads_per_kv, long dim) {
    return (size_t)rows * heads_per_kv * (BLOCK + padded_dim(dim) + sizeof(Query) / sizeof(float) + 2);
}

struct Places {  // where the keys and values of a block's halves lie
    const float *keys[BLOCK / HALF], *values[BLOCK / HALF];
};

static Places find(const AttentionJob& job, long segment, long kv_head, long begin, long end) {
    Places places;
    const int32_t* table = job.tables + segment * job.table_width;
    for (long half = 0; half < BLOCK / HALF; half++) {
        long at = begin + half * HALF;
        if (at >= end) at = begin;  // not attended; any readable place will do
        const long page = table[at / job.page_size];
        const long offset = ((page * job.kv_heads + kv_head) * job.page_size + at % job.page_size) * job.dim;
        places.keys[half] = job.k_pages + offset;
        places.values[half] = job.v_pages + offset;
    }
    return places;
}

// Pages are too small for the hardware to see a stream in them, so what comes next is fetched by hand.
INLINE void fetch(const float* half, long dim) {
    for (long i = 0; i < HALF * dim; i += 16) __builtin_prefetch(half + i);
}

static void score_block(const AttentionJob& job, const Places& places, const Query& query, float* scores, int i) {
    V score = scores16(query.q, places.keys[2 * i], places.keys[2 * i + 1], job.dim) * splat(job.scale);
    if (job.softcap != 0) score = tangent(score / splat(job.softcap)) * splat(job.softcap);
    store(scores + 16 * i, score);
}

static void attend(const AttentionJob& job, long segment, long kv_head, long first, long last, float* scratch) {
    const long shared = job.heads / job.kv_heads, count = (last - first) * shared, padded = padded_dim(job.dim);
    float *scores = scratch, *sums = scores + count * BLOCK;
    Query* queries = (Query*)(((uintptr_t)(sums + count * padded) + 7) & ~(uintptr_t)7);
    long begin = job.visible[first], end = 0;
    for (long i = 0; i < count; i++) {
        const long row = first + i / shared, head = kv_head * shared + i % shared;
        queries[i] = {job.q + row * job.q_row + head * job.q_head, reach_of(job, segment, row), 0, -1e30f, {0}};
        if (queries[i].reach.from < begin) begin = queries[i].reach.from;
        if (queries[i].reach.end() > end) end = queries[i].reach.end();
    }
    memset(sums, 0, sizeof(float) * count * padded);
    begin = begin / BLOCK * BLOCK;
    Places places = find(job, segment, kv_head, begin, end), next = places;
    for (long at = begin; at < end; at += BLOCK, places = next) {
        if (at + BLOCK < end) next = find(job, segment, kv_head, at + BLOCK, end);
        for (long i = 0; i < count; i++) queries[i].bits = queries[i].reach.in_block(at);
        for (int part = 0; part < 4; part++) {
            for (int half = 2 * part; half < 2 * part + 2; half++) {
                fetch(places.values[half], job.dim);
                fetch(next.keys[half], job.dim);
            }
            for (long i = 0; i < count; i++)
                if (queries[i].bits >> (16 * part) & 0xffff)
                    score_block(job, places, queries[i], scores + i * BLOCK, part);
        }
        for (long i = 0; i < count; i++) {
            if (!queries[i].bits) continue;
            soften(queries[i], scores + i * BLOCK, sums + i * padded, padded);
            add_block(scores + i * BLOCK, queries[i].bits, places.values, job.dim, sums + i * padded);
        }
    }
    for (long i = 0; i < count; i++) {
        const long row = first + i / shared, head = kv_head * shared + i % shared;
        float* out = job.out + (row * job.heads + head) * job.dim;
        const float share = 1.0f / sum(load(queries[i].total));
        for (long d = 0; d < job.dim; d++) out[d] = sums[i * padded + d] * share;
    }
}

}  // namespace
