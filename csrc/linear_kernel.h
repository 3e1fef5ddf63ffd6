// y[m, o] = sum over k of x[m, k] * w[o, k]: a single chain of fused multiply-adds over ascending k for each output.
//
// The chain is the contract: it is the same for every number of rows, threads and instruction set. Tiles differ only in
// which outputs they hold in registers at once, and where a chain is split over k it passes through memory unchanged.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace {

#if defined(__AVX512F__)
constexpr int GROUP = 12;  // most rows of a tile
constexpr int tile_width(int rows) { return rows <= 6 ? 4 : 2; }
#else
constexpr int GROUP = 6;
constexpr int tile_width(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
#endif
constexpr int PANEL = 64;       // outputs
constexpr long DEPTH = 96;     // inputs taken at once where a panel's share, and the next one, have to stay in L1
constexpr long AHEAD = 2048;   // bytes fetched ahead of use where a panel is gone over once

struct Fp32Weights {
    typedef float Word;
    static constexpr long words(long columns) { return columns; }
    INLINE V load16(const Word* row, int v) { return load(row + 16 * v); }
};
struct Bf16Weights {
    typedef uint32_t Word;
    static constexpr long words(long columns) { return columns / 2; }
    INLINE V load16(const Word* row, int v) { return v & 1 ? bf16_high(row + 8 * (v - 1)) : bf16_low(row + 8 * v); }
};
struct Int8Weights {
    typedef int8_t Word;
    static constexpr long words(long columns) { return columns; }
    INLINE V load16(const Word* row, int v) { return from_int8(row + 16 * v); }
};

// One panel (or half of one) against a group of rows.
template <class W> struct Block {
    const typename W::Word* weight;
    long weight_row;   // words from one input to the next
    const char* next;  // what will be read next: the tiles of a block fetch a part of it each
    const float* x;
    long x_row, x_input;  // floats from one row, one input, to the next
    long depth;
    float* sums;  // [rows, PANEL]
    bool first;   // chains start here
};

template <class W, int ROWS, int WIDTH, bool PACKED> static void tile(const Block<W>& b, int v0, int pass) {
    V c[ROWS][WIDTH];
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int v = 0; v < WIDTH; v++) c[r][v] = b.first ? zero() : load(b.sums + r * PANEL + 16 * (v0 + v));
    const typename W::Word* w = b.weight + (WIDTH == 1 ? 0 : W::words(16 * v0));
    const float* x = b.x;
    const long x_row = PACKED ? 1 : b.x_row, step = PACKED ? ROWS : 1;
    constexpr long share = W::words(16 * WIDTH) * sizeof(*w);
    const char* next = b.next + pass * b.depth * share;
    for (long k = 0; k < b.depth; k++, w += b.weight_row, x += step, next += share) {
        for (long line = 0; line < share; line += 64) __builtin_prefetch(next + line);
        V weight[WIDTH];
        UNROLL for (int v = 0; v < WIDTH; v++) weight[v] = W::load16(w, WIDTH == 1 ? v0 : v);
        UNROLL for (int r = 0; r < ROWS; r++) {
            V value = splat(x[r * x_row]);
            UNROLL for (int v = 0; v < WIDTH; v++) c[r][v] = fma(weight[v], value, c[r][v]);
        }
    }
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int v = 0; v < WIDTH; v++) store(b.sums + r * PANEL + 16 * (v0 + v), c[r][v]);
}

template <class W, int ROWS, bool PACKED> static void tiles(const Block<W>& b, int width) {
    constexpr int most = tile_width(ROWS);
    if constexpr (most == 1) {
        for (int v = 0; v < width; v += 2) {
            Block<W> pair = b;
            pair.weight += W::words(16 * v);
            pair.sums += 16 * v;
            tile<W, ROWS, 1, PACKED>(pair, 0, v);
            tile<W, ROWS, 1, PACKED>(pair, 1, v + 1);
        }
    } else if (width < most) {
        tile<W, ROWS, 2, PACKED>(b, 0, 0);
    } else {
        for (int v = 0; v < width; v += most) tile<W, ROWS, most, PACKED>(b, v, v / most);
    }
}

template <class W, bool PACKED> static void group(const Block<W>& b, int rows, int width) {
    switch (rows) {
#define CASE(n) case n: if constexpr (n <= GROUP) tiles<W, n, PACKED>(b, width); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
    }
}

// Rows of a chunk that is worked on at once: as many as leave room for them in L2.
static long chunk_rows(long rows, long inputs) {
    long most = 131072 / (inputs > 0 ? inputs : 1) / GROUP * GROUP;
    most = most < 2 * GROUP ? 2 * GROUP : most > 32 * GROUP ? 32 * GROUP : most;
    return rows < most ? rows : most;
}

static size_t linear_scratch(long rows, long inputs) {
    long chunk = chunk_rows(rows, inputs);
    return (size_t)chunk * PANEL + (rows > GROUP ? (size_t)chunk * inputs : 0);
}

INLINE long group_start(long rows, long groups, long g) { return rows * g / groups; }

// Interleave the rows of each group, so that a tile reads one stream.
static void pack_rows(const float* x, long x_row, long rows, long inputs, float* packed) {
    const long groups = (rows + GROUP - 1) / GROUP;
    for (long g = 0; g < groups; g++) {
        const long first = group_start(rows, groups, g), n = group_start(rows, groups, g + 1) - first;
        float* to = packed + first * inputs;
        for (long r = 0; r < n; r++)
            for (long k = 0; k < inputs; k++) to[k * n + r] = x[(first + r) * x_row + k];
    }
}

INLINE V finished(const Linear& l, V total, long column) {
    if (l.scale) total = total * load(l.scale + column);
    if (l.bias) total = total + load(l.bias + column);
    return total;
}

static void put(float* y, V value, long columns, bool add) {
    if (columns >= 16) {
        store(y, add ? load(y) + value : value);
        return;
    }
    float t[16];
    store(t, value);
    for (long i = 0; i < columns; i++) y[i] = add ? y[i] + t[i] : t[i];
}

// Scale, bias and what the job does with the results of `width` vectors from output `column` on.
static void finish(const LinearJob& job, const float* sums, long first, long rows, long column, int width) {
    const Linear& l = *job.linear;
    for (long r = 0; r < rows; r++) {
        const float* s = sums + r * PANEL;
        float* y = job.y + (first + r) * job.y_row;
        if (job.ending == GATE) {
            for (int v = 0; v < 2; v++) {
                const long to = column / 2 + 16 * v;
                if (to >= job.y_columns) break;
                V gate = finished(l, load(s + 16 * v), column + 16 * v);
                V input = finished(l, load(s + 32 + 16 * v), column + 32 + 16 * v);
                put(y + to, silu(gate) * input, job.y_columns - to, false);
            }
        } else {
            for (int v = 0; v < width; v++) {
                const long to = column + 16 * v;
                if (to >= job.y_columns) break;
                put(y + to, finished(l, load(s + 16 * v), to), job.y_columns - to, job.ending == ADD);
            }
        }
    }
}

template <class W> static void chunk(const LinearJob& job, long first, long rows, long from, long to, float* scratch) {
    const Linear& l = *job.linear;
    const long all = (l.outputs + 31) / 32, groups = (rows + GROUP - 1) / GROUP;
    const bool packed = rows > GROUP;
    float *sums = scratch, *rows_of = scratch + chunk_rows(job.rows, l.inputs) * PANEL;
    const float* x = job.x + first * job.x_row;
    if (packed) pack_rows(x, job.x_row, rows, l.inputs, rows_of);
    for (long u = from; u < to;) {  // in units of 32 outputs; a panel is two
        const long panel = u / 2, panel_units = all - 2 * panel < 2 ? 1 : 2;
        const int width = u % 2 == 0 && panel_units == 2 && u + 1 < to ? 4 : 2;
        Block<W> b;
        b.weight_row = W::words(32 * panel_units);
        const typename W::Word* weight =
            (const typename W::Word*)l.weight + W::words(PANEL) * panel * l.inputs + W::words(32) * (u % 2);
        // Tiles that go over a panel several times find it in L1 again.
        const bool several = packed || tile_width((int)rows) < width;
        const long depth = several ? DEPTH : l.inputs;
        for (long k = 0; k < l.inputs; k += depth) {
            b.weight = weight + k * b.weight_row;
            b.depth = l.inputs - k < depth ? l.inputs - k : depth;
            b.next = (const char*)(b.weight + (several ? b.depth * b.weight_row : 0)) + (several ? 0 : AHEAD);
            b.first = k == 0;
            for (long g = 0; g < groups; g++) {
                const long start = group_start(rows, groups, g), n = group_start(rows, groups, g + 1) - start;
                b.sums = sums + start * PANEL;
                b.x = packed ? rows_of + start * l.inputs + k * n : x + k;
                b.x_row = job.x_row;
                packed ? group<W, true>(b, (int)n, width) : group<W, false>(b, (int)n, width);
            }
        }
        finish(job, sums, first, rows, 32 * u, width);
        u += width / 2;
    }
}

template <class W> static void share(const LinearJob& job, int part, int parts, float* scratch) {
    const long unit = job.ending == GATE ? 2 : 1;  // gates and their inputs stay together
    const long units = (job.linear->outputs + 31) / 32 / unit;
    const long from = units * part / parts * unit, to = units * (part + 1) / parts * unit;
    if (from == to) return;
    const long step = chunk_rows(job.rows, job.linear->inputs);
    for (long first = 0; first < job.rows; first += step)
        chunk<W>(job, first, job.rows - first < step ? job.rows - first : step, from, to, scratch);
}

static void linear(const LinearJob& job, int part, int parts, float* scratch) {
    switch (job.linear->kind) {
        case FP32: share<Fp32Weights>(job, part, parts, scratch); break;
        case BF16: share<Bf16Weights>(job, part, parts, scratch); break;
        case INT8: share<Int8Weights>(job, part, parts, scratch); break;
    }
}

}  // namespace
