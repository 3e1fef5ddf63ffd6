// The products of queries with the keys of a block of cache entries, see ops/attention_kernel.h.
//
// A product's sum over lanes has the order of sum(), for every number of queries and every instruction set.
#pragma once
#include "ops/integer_simd.h"
#include "ops/kernels.h"
#include "ops/simd.h"

namespace cospec {

namespace {

constexpr long BLOCK = 64;
constexpr long HALF = 8;  // entries that are certain to be in one page
constexpr long HALVES = BLOCK / HALF;

INLINE V numbers16(Fp32Entry, const float* p) { return load(p); }
INLINE V numbers16(Bf16Entry, const uint16_t* p) { return from_bf16(p); }
INLINE V numbers16(Fp16Entry, const uint16_t* p) { return from_half(p); }
INLINE V numbers16(Int8Entry, const int8_t* p) { return from_int8(p); }

// Numbers d .. d + 15 of an entry, or the last eight numbers.
template <class E, bool WHOLE = true> INLINE V numbers(const uint8_t* entry, long d) {
    const typename E::Number* p = (const typename E::Number*)entry + d;
    if constexpr (WHOLE) return numbers16(E(), p);
    typename E::Number eight[16] = {};
    memcpy(eight, p, 8 * sizeof *p);
    return numbers16(E(), eight);
}

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

// A query and its state in the current span, see attention_state().
struct Query {
    const float* q;
    VisibleRange range;
    uint64_t bits;  // of the current block
    float *scores, *state;
};

constexpr float LOWEST = -1e30f;  // of a state without entries
constexpr long TOTAL = 16, SUMS = 32;

// Products of a tile: so many queries times so many entries, one register each.
#if defined(__AVX512F__)
constexpr int TILE = 16, TILE_QUERIES = 4;
INLINE void sum_tile(const V* part, float* r) { store(r, sums16(part)); }
#else
constexpr int TILE = 4, TILE_QUERIES = 2;
INLINE void sum_tile(const V* part, float* r) { sums4(part, r); }
#endif

// Fetch entries into the second cache. The hardware fetches only inside of a page of memory.
INLINE void fetch(const uint8_t* from, long bytes) {
    long at = 0;
    for (; at + 256 <= bytes; at += 256)
        UNROLL_FOR (int i = 0; i < 4; i++) __builtin_prefetch(from + at + 64 * i, 0, 2);
    for (; at < bytes; at += 64) __builtin_prefetch(from + at, 0, 2);
}

struct Halves {  // of a block, and the halves to fetch meanwhile, or null
    const uint8_t *const *at, *const *ahead;
};

// Scores of Q queries for the sixteen entries of part `part` of a block, which two halves hold.
template <class E, int Q> static void score_tile(const Query* queries, const Halves& keys, long dim, int part) {
    constexpr int N = TILE / Q;
    const long stride = entry_bytes<E>(dim);
    for (int first = 0; first < 16; first += N) {
        // A tile's entries lie in one half, or in both.
        constexpr int SHARE = N < HALF ? N : HALF;
        const long offset = first % HALF * stride;
        const uint8_t *const low = keys.at[first / HALF] + offset, *const high = keys.at[1];
        const auto entry = [&](int j) { return (j < HALF ? low : high - HALF * stride) + j * stride; };
        for (int half = 0; keys.ahead && half < N / SHARE; half++)
            fetch(keys.ahead[first / HALF + half] + offset, SHARE * stride);
        V product[TILE];
        UNROLL_FOR (int i = 0; i < TILE; i++) product[i] = zero();
        const auto add = [&](const V* q, int j, V key) {
            UNROLL_FOR (int i = 0; i < Q; i++) product[i * N + j] = fma(q[i], key, product[i * N + j]);
        };
        V q[Q];
        long d = 0;
        for (; d + 16 <= dim; d += 16) {
            UNROLL_FOR (int i = 0; i < Q; i++) q[i] = load(queries[i].q + d);
            UNROLL_FOR (int j = 0; j < N; j++) add(q, j, numbers<E>(entry(j), d));
        }
        if (d < dim) {
            UNROLL_FOR (int i = 0; i < Q; i++) q[i] = load_low8(queries[i].q + d);
            UNROLL_FOR (int j = 0; j < N; j++) add(q, j, numbers<E, false>(entry(j), d));
        }
        float sums[TILE];
        sum_tile(product, sums);
        for (int i = 0; i < Q; i++) memcpy(queries[i].scores + 16 * part + first, sums + i * N, N * sizeof(float));
    }
}

#if defined(__AVX512F__)
// Transposed keys: one register holds a number of sixteen entries, so that the sums over lanes need no shuffles. The
// transposition pays from so many queries on.
constexpr long MANY_QUERIES = 12;
constexpr long MAX_DIM = 256;
constexpr int ENTRIES = 32;  // side by side

INLINE void transpose16(V* rows) {
    __m512 t[16];
    UNROLL_FOR (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(rows[i].r, rows[i + 1].r);
        t[i + 1] = _mm512_unpackhi_ps(rows[i].r, rows[i + 1].r);
    }
    UNROLL_FOR (int i = 0; i < 16; i += 4) {
        const __m512d a = _mm512_castps_pd(t[i]), b = _mm512_castps_pd(t[i + 1]);
        const __m512d c = _mm512_castps_pd(t[i + 2]), d = _mm512_castps_pd(t[i + 3]);
        rows[i].r = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
        rows[i + 1].r = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
        rows[i + 2].r = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
        rows[i + 3].r = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
    }
    UNROLL_FOR (int i = 0; i < 4; i++) {
        const __m512 a = rows[i].r, b = rows[i + 4].r, c = rows[i + 8].r, d = rows[i + 12].r;
        const __m512 ab0 = _mm512_shuffle_f32x4(a, b, 0x88), ab1 = _mm512_shuffle_f32x4(a, b, 0xdd);
        const __m512 cd0 = _mm512_shuffle_f32x4(c, d, 0x88), cd1 = _mm512_shuffle_f32x4(c, d, 0xdd);
        t[i] = _mm512_shuffle_f32x4(ab0, cd0, 0x88);
        t[i + 8] = _mm512_shuffle_f32x4(ab0, cd0, 0xdd);
        t[i + 4] = _mm512_shuffle_f32x4(ab1, cd1, 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(ab1, cd1, 0xdd);
    }
    UNROLL_FOR (int i = 0; i < 16; i++) rows[i].r = t[i];
}

// keys [dim, ENTRIES] of two parts of a block, which four halves hold
template <class E> static void transpose_keys(const uint8_t* const* halves, long dim, float* keys) {
    const long stride = entry_bytes<E>(dim);
    for (int part = 0; part < 2; part++)
        for (long d = 0; d < dim; d += 16) {
            V rows[16];
            const auto entry = [&](int j) { return halves[2 * part + j / HALF] + j % HALF * stride; };
            if (d + 16 <= dim) {
                UNROLL_FOR (int j = 0; j < 16; j++) rows[j] = numbers<E>(entry(j), d);
            } else {
                for (int j = 0; j < 16; j++) rows[j] = numbers<E, false>(entry(j), d);
            }
            transpose16(rows);
            UNROLL_FOR (int i = 0; i < 16; i++)
                if (d + i < dim) store(keys + (d + i) * ENTRIES + 16 * part, rows[i]);
        }
}

// The sums of lanes `lane`, lane + STEP ... of the products, in the order of sum(). A lane's products are those of
// every sixteenth number.
template <int Q, int STEP>
INLINE void sum_lanes(const Query* queries, const float* keys, long dim, int lane, V* sums) {
    if constexpr (STEP == 16) {
        UNROLL_FOR (int i = 0; i < 2 * Q; i++) sums[i] = zero();
        for (long d = lane; d < dim; d += 16) {
            const V first = load(keys + d * ENTRIES), second = load(keys + d * ENTRIES + 16);
            UNROLL_FOR (int i = 0; i < Q; i++) {
                const V q = splat(queries[i].q[d]);
                sums[2 * i] = fma(q, first, sums[2 * i]);
                sums[2 * i + 1] = fma(q, second, sums[2 * i + 1]);
            }
        }
    } else {
        V others[2 * Q];
        sum_lanes<Q, 2 * STEP>(queries, keys, dim, lane, sums);
        sum_lanes<Q, 2 * STEP>(queries, keys, dim, lane + STEP, others);
        UNROLL_FOR (int i = 0; i < 2 * Q; i++) sums[i] = sums[i] + others[i];
    }
}

template <int Q> static void score_transposed(const Query* queries, const float* keys, long dim, int part) {
    V sums[2 * Q];
    sum_lanes<Q, 1>(queries, keys, dim, 0, sums);
    for (int i = 0; i < Q; i++) {
        store(queries[i].scores + 16 * part, sums[2 * i]);
        store(queries[i].scores + 16 * part + 16, sums[2 * i + 1]);
    }
}

// Scores of many queries for the parts `part` and part + 1 of a block: the bits of score_tile().
template <class E>
static void score_many(const Query* queries, long count, const Halves& keys, long dim, int part) {
    alignas(64) float transposed[MAX_DIM * ENTRIES];
    int fetched = 0;  // halves, one after the other between other work: few loads can wait at a time
    const auto fetch_half = [&] {
        if (keys.ahead && fetched < 4) fetch(keys.ahead[fetched++], HALF * entry_bytes<E>(dim));
    };
    fetch_half();
    transpose_keys<E>(keys.at, dim, transposed);
    long i = 0;
    for (; i + 4 <= count; i += 4) {
        fetch_half();
        score_transposed<4>(queries + i, transposed, dim, part);
    }
    static_assert(MANY_QUERIES >= 12, "all four halves are fetched");
    for (; i < count; i++) score_transposed<1>(queries + i, transposed, dim, part);
}

INLINE int parts_at_once(long queries) { return queries >= MANY_QUERIES ? 2 : 1; }
#else
INLINE int parts_at_once(long) { return 1; }
#endif

}  // namespace

}  // namespace cospec
