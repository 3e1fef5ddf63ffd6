// y[m, o] = sum over k of x[m, k] * w[o, k], one chain of fused multiply-adds per output, in ascending order of k.
//
// The chain is the contract: results are equal for every number of rows, threads and every instruction set but AMX.
// Tiles differ only in which outputs are in registers together.
// A chain that is split over k passes through memory unchanged.
// With bf16 weights the inputs are rounded to bf16 and taken in pairs, the second of a pair first.
// Processors with a bf16 instruction use this order; two fused multiply-adds give the same bits elsewhere. Tiles of AMX
// have another order, see ops/amx_bf16.h.
#pragma once
#include "ops/integer_simd.h"
#include "ops/kernels.h"
#include "ops/simd.h"

namespace cospec {

namespace {

#if defined(__AVX512F__)
constexpr int GROUP = 12;  // most rows of a tile
constexpr int tile_width(int rows) { return rows <= 6 ? 4 : 2; }
#else
constexpr int GROUP = 6;
constexpr int tile_width(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
#endif
constexpr int PANEL = 64;              // outputs
constexpr long DEPTH = 48;             // words of a column per pass: a panel's part and the next one stay in L1
constexpr long PREFETCH_BYTES = 2048;  // prefetch distance where a panel is read once
constexpr long SHARE_BYTES = 1 << 16;  // least bytes of weights that a thread takes: some microseconds

// The least items of a thread's share, each of so many bytes.
constexpr long least_share(long item_bytes) { return (SHARE_BYTES + item_bytes - 1) / item_bytes; }

// Layout and product of one weight format. A word holds INPUTS inputs of one output, which take PARTS steps.
template <class T> struct OneInputPerWord {
    typedef T Word;
    typedef float Input;
    typedef V Weight;
    static constexpr int INPUTS = 1, PARTS = 1;
    INLINE V add(V weight, float x, V total) { return fma(weight, splat(x), total); }
};
struct Fp32Weights : OneInputPerWord<float> {
    INLINE V load16(const float* p, int) { return load(p); }
};
struct Fp16Weights : OneInputPerWord<uint16_t> {
    INLINE V load16(const uint16_t* p, int) { return from_half(p); }
};
struct Int8Weights : OneInputPerWord<int8_t> {
    INLINE V load16(const int8_t* p, int) { return from_int8(p); }
};

// Round to the nearest bf16, ties to even, as the upper half of a word. Subnormal numbers become 0, as in the
// instruction.
INLINE uint32_t round_bf16(float x) {
    uint32_t word;
    memcpy(&word, &x, 4);
    const uint32_t exponent = word & 0x7f800000u;
    const uint32_t nearest = word + 0x7fffu + (word >> 16 & 1);
    const uint32_t quiet = x != x ? word | 0x400000u : nearest;
    return (exponent ? quiet : word & 0x80000000u) & 0xffff0000u;
}

struct Bf16Weights {
    typedef uint32_t Word;  // input 2i in the lower half, 2i + 1 in the upper one
    static constexpr int INPUTS = 2;
#if defined(__AVX512BF16__)
    typedef uint32_t Input;
    typedef __m512i Weight;
    static constexpr int PARTS = 1;
    INLINE Weight load16(const Word* p, int) { return _mm512_loadu_si512(p); }
    INLINE V add(Weight weight, uint32_t x, V total) {
        return {_mm512_dpbf16_ps(total.r, (__m512bh)weight, (__m512bh)_mm512_set1_epi32((int)x))};
    }
    // Round a row of inputs, two inputs per word.
    static void round(const float* x, long inputs, Input* to) {
        long k = 0;
        for (; k + 32 <= inputs; k += 32)
            _mm512_storeu_si512(to + k / 2, (__m512i)_mm512_cvtne2ps_pbh(load(x + k + 16).r, load(x + k).r));
        for (; k < inputs; k += 2) to[k / 2] = round_bf16(x[k]) >> 16 | (k + 1 < inputs ? round_bf16(x[k + 1]) : 0);
    }
#else
    typedef float Input;
    typedef V Weight;
    static constexpr int PARTS = 2;
    INLINE V load16(const Word* p, int part) { return part ? bf16_low(p) : bf16_high(p); }
    INLINE V add(V weight, float x, V total) { return fma(weight, splat(x), total); }
    // Round a row of inputs. The loop has no branches, so that compilers vectorize it.
    static void round(const float* x, long inputs, Input* to) {
        for (long k = 0; k < inputs; k++) {
            const uint32_t word = round_bf16(x[k]);
            memcpy(to + k, &word, 4);
        }
        if (inputs % 2) to[inputs] = 0.0f;
    }
#endif
};

// Interleave rows, so that a tile reads one stream: to[k, r] = from[r, k]. Registers transpose squares of 4 x 4; where
// rows are no multiple of 4, the last squares write some rows again.
template <class T> static void interleave(const T* from, long row, long rows, long columns, T* to) {
    typedef uint32_t Four __attribute__((vector_size(16)));
#if defined(__clang__)  // GCC 11 lacks __builtin_shufflevector
#define SHUFFLE __builtin_shufflevector
#else
#define SHUFFLE(x, y, ...) __builtin_shuffle(x, y, Four{__VA_ARGS__})
#endif
    static_assert(sizeof(T) == 4, "a square has 4 words of 4 bytes per row");
    const long squares = rows < 4 ? 0 : columns / 4 * 4;
    for (long k = 0; k < squares; k += 4)
        for (long r = 0; r < rows; r += 4) {
            const long first = r + 4 <= rows ? r : rows - 4;
            Four a, b, c, d;
            memcpy(&a, from + first * row + k, 16);
            memcpy(&b, from + (first + 1) * row + k, 16);
            memcpy(&c, from + (first + 2) * row + k, 16);
            memcpy(&d, from + (first + 3) * row + k, 16);
            const Four ab_left = SHUFFLE(a, b, 0, 4, 1, 5), ab_right = SHUFFLE(a, b, 2, 6, 3, 7);
            const Four cd_left = SHUFFLE(c, d, 0, 4, 1, 5), cd_right = SHUFFLE(c, d, 2, 6, 3, 7);
            const Four columns_of_square[4] = {
                SHUFFLE(ab_left, cd_left, 0, 1, 4, 5),
                SHUFFLE(ab_left, cd_left, 2, 3, 6, 7),
                SHUFFLE(ab_right, cd_right, 0, 1, 4, 5),
                SHUFFLE(ab_right, cd_right, 2, 3, 6, 7),
            };
            UNROLL_FOR (int j = 0; j < 4; j++) memcpy(to + (k + j) * rows + first, columns_of_square + j, 16);
        }
#undef SHUFFLE
    for (long k = squares; k < columns; k++)
        for (long r = 0; r < rows; r++) to[k * rows + r] = from[r * row + k];
}

// One panel (or half of one) against a group of rows.
template <class W> struct Block {
    const typename W::Word* weight;
    long columns;      // words from one step of the weight to the next
    const char* next;  // the next address to read; each tile of a block prefetches a part
    const typename W::Input* x;
    long x_row;   // stride between rows that are not packed
    long depth;   // words of a column
    float* sums;  // [rows, PANEL]
    bool first;   // chains start here
};

template <class W, int ROWS, int WIDTH, bool PACKED> static void tile(const Block<W>& b, int v0, int pass) {
    V c[ROWS][WIDTH];
    UNROLL_FOR (int r = 0; r < ROWS; r++)
        UNROLL_FOR (int v = 0; v < WIDTH; v++) c[r][v] = b.first ? zero() : load(b.sums + r * PANEL + 16 * (v0 + v));
    const typename W::Word* w = b.weight + 16 * v0;
    const typename W::Input* x = b.x;
    const long x_row = PACKED ? 1 : b.x_row;
    constexpr long step = PACKED ? ROWS : 1, tile_bytes = 16 * WIDTH * sizeof(*w);
    const char* next = b.next + pass * b.depth * tile_bytes;
    for (long i = 0; i < b.depth; i++, w += b.columns, next += tile_bytes) {
        for (long line = 0; line < tile_bytes; line += 64) __builtin_prefetch(next + line);
        UNROLL_FOR (int part = 0; part < W::PARTS; part++) {
            const typename W::Input* input = x + (W::PARTS - 1 - part) * step;  // the second of a pair first
            typename W::Weight weight[WIDTH];
            UNROLL_FOR (int v = 0; v < WIDTH; v++) weight[v] = W::load16(w + 16 * v, part);
            UNROLL_FOR (int r = 0; r < ROWS; r++)
                UNROLL_FOR (int v = 0; v < WIDTH; v++) c[r][v] = W::add(weight[v], input[r * x_row], c[r][v]);
        }
        x += W::PARTS * step;
    }
    UNROLL_FOR (int r = 0; r < ROWS; r++)
        UNROLL_FOR (int v = 0; v < WIDTH; v++) store(b.sums + r * PANEL + 16 * (v0 + v), c[r][v]);
}

template <class W, int ROWS, bool PACKED> static void tiles(const Block<W>& b, int width) {
    constexpr int widest = tile_width(ROWS);
    if (width < widest)
        tile<W, ROWS, (widest < 2 ? 1 : 2), PACKED>(b, 0, 0);
    else
        for (int v = 0; v < width; v += widest) tile<W, ROWS, widest, PACKED>(b, v, v / widest);
}

template <class W, bool PACKED> static void group(const Block<W>& b, int rows, int width) {
    switch (rows) {
#define CASE(n)                                                  \
    case n:                                                      \
        if constexpr (n <= GROUP) tiles<W, n, PACKED>(b, width); \
        break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
    }
}

// Rows per chunk: as many as fit in L2 with their weights.
static long chunk_rows(long rows, long inputs) {
    long max_rows = 131072 / (inputs > 0 ? inputs : 1) / GROUP * GROUP;
    max_rows = max_rows < 2 * GROUP ? 2 * GROUP : max_rows > 32 * GROUP ? 32 * GROUP : max_rows;
    return rows < max_rows ? rows : max_rows;
}

static size_t panel_scratch(long rows, long inputs) {
    // Sums, rounded inputs of a group, interleaved inputs.
    return (size_t)chunk_rows(rows, inputs) * (PANEL + inputs + 1) + GROUP * (inputs + 1);
}

INLINE V scaled(const Linear& l, V total, long column) {
    if (l.scale) total = total * load(l.scale + column);
    if (l.bias) total = total + load(l.bias + column);
    return total;
}

static void write_columns(float* y, V value, long columns, bool add) {
    if (columns >= 16) {
        store(y, add ? load(y) + value : value);
        return;
    }
    float t[16];
    store(t, value);
    for (long i = 0; i < columns; i++) y[i] = add ? y[i] + t[i] : t[i];
}

// Apply scale, bias and epilogue to `width` vectors of sums from output `column` on.
static void write_outputs(
    const LinearParams& params, const float* sums, long first, long rows, long column, int width) {
    const Linear& l = *params.linear;
    for (long r = 0; r < rows; r++) {
        const float* s = sums + r * PANEL;
        float* y = params.y + (first + r) * params.y_row;
        if (params.epilogue == SWIGLU) {
            for (int v = 0; v < 2; v++) {
                const long to = column / 2 + 16 * v;
                if (to >= params.y_columns) break;
                V gate = scaled(l, load(s + 16 * v), column + 16 * v);
                V input = scaled(l, load(s + 32 + 16 * v), column + 32 + 16 * v);
                write_columns(y + to, silu(gate) * input, params.y_columns - to, false);
            }
        } else {
            for (int v = 0; v < width; v++) {
                const long to = column + 16 * v;
                if (to >= params.y_columns) break;
                write_columns(y + to, scaled(l, load(s + 16 * v), to), params.y_columns - to, params.epilogue == ADD);
            }
        }
    }
}

// Rows of inputs in the layout of the weight format.
template <class W> struct InputRows {
    const typename W::Input* first;
    long row;  // stride between rows
};

// Formats with one input per word read the inputs in place. Other formats read rounded inputs.
template <class W> static InputRows<W> input_rows(
    const LinearParams& params, long first, long rows, long columns, typename W::Input* rounded_inputs) {
    const float* x = params.x + first * params.x_row;
    if constexpr (W::INPUTS == 1) {
        return {x, params.x_row};
    } else {
        for (long r = 0; r < rows; r++)
            W::round(x + r * params.x_row, params.linear->inputs, rounded_inputs + r * columns);
        return {rounded_inputs, columns};
    }
}

// Share the outputs of a chunk of rows between threads, in units of 32 up to a panel of two.
// multiply(weight, columns, width): compute `width` vectors of sums, with the words of a weight whose steps are
// `columns` apart.
template <class Word, class F>
static void share_outputs(
    const LinearParams& params, long first, long rows, const Team& team, const float* sums, long words, F&& multiply) {
    const Linear& l = *params.linear;
    const long all = (l.outputs + 31) / 32;
    // Units from u on. Returns their number.
    const auto panel_units = [&](long u, long to) {
        const long panel = u / 2, units = all - 2 * panel < 2 ? 1 : 2;
        const int width = u % 2 == 0 && units == 2 && u + 1 < to ? 4 : 2;
        multiply((const Word*)l.weight + PANEL * panel * words + 32 * (u % 2), 32 * units, width);
        write_outputs(params, sums, first, rows, 32 * u, width);
        return width / 2;
    };
    const long gates = params.epilogue == SWIGLU ? 2 : 1;  // gates and their inputs stay together
    const long least = least_share(2 * 32 * words * sizeof(Word)) * 2 / gates;
    team.share(all / gates, least, [&](long from, long to) {
        for (long u = from * gates; u < to * gates;) u += panel_units(u, to * gates);
    });
}

// A thread's shares of the outputs, for a chunk of rows.
template <class W, bool PACKED>
static void chunk(const LinearParams& params, long first, long rows, const Team& team, float* scratch) {
    typedef typename W::Input Input;
    const Linear& l = *params.linear;
    const long groups = (rows + GROUP - 1) / GROUP;
    const long words = (l.inputs + W::INPUTS - 1) / W::INPUTS;  // of a column
    const long columns = words * W::PARTS, max_rows = chunk_rows(params.rows, l.inputs);
    float* sums = scratch;
    Input* rounded_inputs = (Input*)(scratch + max_rows * PANEL);  // of one group
    Input* packed = rounded_inputs + GROUP * (l.inputs + 1);
    const auto start = [&](long g) { return rows * g / groups; };
    InputRows<W> x = {nullptr, 0};
    if constexpr (PACKED)
        for (long g = 0; g < groups; g++) {  // a group's rounded inputs are still in the first cache
            const long n = start(g + 1) - start(g);
            const InputRows<W> group_rows = input_rows<W>(params, first + start(g), n, columns, rounded_inputs);
            interleave(group_rows.first, group_rows.row, n, columns, packed + start(g) * columns);
        }
    else
        x = input_rows<W>(params, first, rows, columns, rounded_inputs);
    typedef typename W::Word Word;
    share_outputs<Word>(
        params, first, rows, team, sums, words, [&](const Word* weight, long weight_columns, int width) {
            Block<W> b;
            b.columns = weight_columns;
            b.x_row = x.row;
            // Tiles that read a panel several times find it in L1.
            const bool several = groups > 1 || tile_width((int)rows) < width;
            const long depth = several ? DEPTH : words;
            for (long i = 0; i < words; i += depth) {
                b.weight = weight + i * b.columns;
                b.depth = words - i < depth ? words - i : depth;
                b.next = (const char*)(b.weight + (several ? b.depth * b.columns : 0)) + (several ? 0 : PREFETCH_BYTES);
                b.first = i == 0;
                for (long g = 0; g < groups; g++) {
                    const long n = start(g + 1) - start(g);
                    b.sums = sums + start(g) * PANEL;
                    if constexpr (PACKED)
                        b.x = packed + start(g) * columns + i * W::PARTS * n;
                    else
                        b.x = x.first + i * W::PARTS;
                    group<W, PACKED>(b, (int)n, width);
                }
            }
        });
}

template <class W> static void linear_shares(const LinearParams& params, const Team& team, float* scratch) {
    const long step = chunk_rows(params.rows, params.linear->inputs);
    for (long first = 0; first < params.rows; first += step) {
        const long rows = params.rows - first < step ? params.rows - first : step;
        if (rows <= GROUP)
            chunk<W, false>(params, first, rows, team, scratch);
        else
            chunk<W, true>(params, first, rows, team, scratch);
    }
}

}  // namespace

}  // namespace cospec
