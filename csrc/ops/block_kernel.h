// Products of weights in blocks of integers. Inputs are rounded to integers per row and 32 inputs.
//
// The contract: an output is one chain of fused multiply-adds over the blocks, in ascending order of inputs.
// A step adds integer sum * (weight scale * input scale); of formats with minimums, another step follows and adds
// - minimum * (input scale * sum of the input integers). The integer sums are exact.
// So results are equal for every number of rows, threads and every instruction set.
// Tiles of AMX would gain little: the float steps after each 32 inputs stay. So the vector instructions multiply there.
#pragma once
#include <utility>

#include "ops/integer_sums.h"
#include "ops/linear_kernel.h"

namespace cospec {

namespace {

// BLOCK_ROWS: most rows of a tile. CALL_HALVES: halves of a panel that a tile takes. TILE_HALVES: halves whose integer
// sums are in registers together, and share the inputs. DEPTH_BYTES: of a panel, which several tiles read in turn.
#if defined(__AVX512F__)
// All sums stay in registers.
#if defined(__AVX512VNNI__)
constexpr int BLOCK_ROWS = 6;
#else
constexpr int BLOCK_ROWS = 4;
#endif
constexpr int TILE_HALVES = 2, CALL_HALVES = 2;
constexpr long DEPTH_BYTES = 1 << 30;
#elif defined(__AVX2__)
constexpr int BLOCK_ROWS = 4;
constexpr int TILE_HALVES = 1, CALL_HALVES = 2;
constexpr long DEPTH_BYTES = 12288;  // they stay in L1 with the inputs
#else
constexpr int BLOCK_ROWS = 1;  // without wide registers there is nothing to share, and the compiler takes minutes
constexpr int TILE_HALVES = 1, CALL_HALVES = 1;
constexpr long DEPTH_BYTES = 1 << 30;
#endif
constexpr long BLOCK_PREFETCH = 4096;  // bytes ahead of the loads, where a panel is read once
constexpr long BLOCK_CHUNK = 256;      // most rows of a chunk

// Call f with 0, 1, ... N - 1 as constants.
template <int N, class F> INLINE void for_constants(F&& f) {
    if constexpr (N > 0) {
        for_constants<N - 1>(f);
        f(std::integral_constant<int, N - 1>{});
    }
}

// Rows of rounded inputs: integers, and for each 32 inputs the scale. A padded row ends with zeros. Rows of a tile are
// interleaved, so that a tile reads one stream: [inputs / 32, rows of the tile, ...].
struct RoundedInputs {
    int8_t* integers;  // [32], as the sums take them: at most two bytes each
    float* scales;
    int32_t* starts;  // [32 / SUB], where sums of integers start
    float* sums;      // scale * sum of integers
    // The inputs from so many times 32 inputs of a row on.
    template <class F> RoundedInputs from(long place) const {
        return {integers + 32 * PartSums<F>::INPUT_BYTES * place, scales + place, starts + 32 / F::SUB * place,
            sums + place};
    }
    static constexpr long padded(long inputs) { return (inputs + 255) / 256 * 256; }
    // Floats of a padded row.
    static constexpr long row_floats(long inputs) { return inputs / 2 + inputs / 32 + inputs / 16 + inputs / 32; }
};

INLINE uint32_t bits_of(float x) {
    uint32_t word;
    memcpy(&word, &x, 4);
    return word;
}

// Round 32 inputs to integers from -127 to 127, ties to even. Returns the scale: NaN where an input is not finite.
static float round_32(const float* x, int8_t* to) {
    uint32_t largest = 0;
    for (int i = 0; i < 32; i++) {
        const uint32_t size = bits_of(x[i]) & 0x7fffffffu;  // ordered like the numbers; NaN and infinity come last
        largest = size > largest ? size : largest;
    }
    float magnitude;
    memcpy(&magnitude, &largest, 4);
    const bool finite = largest < 0x7f800000u;
    const float factor = finite && magnitude >= 1e-30f ? 127.0f / magnitude : 0.0f;
    for (int i = 0; i < 32; i++)  // the last bit of the sum is 1
        to[i] = (int8_t)(bits_of((finite ? x[i] : 0.0f) * factor + 12582912.0f) - 0x4b400000u);
    return finite ? (factor ? magnitude / 127.0f : 0.0f) : __builtin_nanf("");
}

template <class F> INLINE void round_block(const float* x, const RoundedInputs& to) {
    typedef PartSums<F> Sums;
    int8_t integers[32];
    *to.scales = round_32(x, integers);
    int32_t sum = 0;
    for (int i = 0; i < 32; i++) sum += integers[i];
    *to.sums = *to.scales * (float)sum;
    for (int part = 0; part < 32 / F::SUB; part++) to.starts[part] = Sums::start(integers + F::SUB * part);
    Sums::arrange(integers, to.integers);
}

// Round one of the rows of a tile, with its inputs in the order of the weight.
template <class F> static void round_row(const Linear& l, const float* x, RoundedInputs to, long row, long rows) {
    to = to.from<F>(row);
    for (long i = 0; i < RoundedInputs::padded(l.inputs); i += 32, to = to.from<F>(rows)) {
        if (!l.order && i + 32 <= l.inputs) {
            round_block<F>(x + i, to);
            continue;
        }
        float padded[32] = {};
        for (long j = i; j < i + 32 && j < l.inputs; j++) padded[j - i] = x[l.order ? l.order[j] : j];
        round_block<F>(padded, to);
    }
}

// Words 2 PAIR and 2 PAIR + 1 of a half panel's 32 inputs.
template <class F, int PAIR> INLINE void load_pair(const uint8_t* half, Bytes* w) {
    const uint8_t* low = half + Layout<F>::HIGH;
    if constexpr (F::LOW == 8) {
        w[0] = load_bytes(low + 128 * PAIR), w[1] = load_bytes(low + 128 * PAIR + 64);
    } else {
        const Bytes both = load_bytes(low + 64 * PAIR);
        w[0] = shifted<0>(both, 15), w[1] = shifted<4>(both, 15);
        if constexpr (F::HIGH > 0) {
            constexpr int quads = 8 / F::HIGH, mask = ((1 << F::HIGH) - 1) << 4, at = 2 * PAIR % quads * F::HIGH;
            const Bytes high = load_bytes(half + 64 * (2 * PAIR / quads));
            w[0] = w[0] | shifted<at - 4>(high, mask), w[1] = w[1] | shifted<at + F::HIGH - 4>(high, mask);
        }
        if constexpr (F::TABLE) w[0] = lookup(F::VALUES, w[0]), w[1] = lookup(F::VALUES, w[1]);
    }
}

template <class F> INLINE V load_scales(const uint8_t* p) {
    if constexpr (F::SCALE == FLOAT16)
        return from_half((const uint16_t*)p);
    else
        return from_bf16((const uint16_t*)p);
}

// Rows of inputs against blocks of a panel. Blocks are read several times where the rows take several tiles. Then each
// reading prefetches its share of the next blocks, so that memory is busy all the time.
template <class F> struct BlockTile {
    const uint8_t* block;
    long blocks;
    RoundedInputs x;
    float* sums;     // [rows, PANEL]
    bool continued;  // from the sums of earlier blocks
    int reading, readings;

    const uint8_t* ahead() const {
        const long bytes = blocks * Layout<F>::BLOCK;
        return block + (readings == 1 ? BLOCK_PREFETCH : bytes * (readings + reading) / readings);
    }
    // Bytes that each 32 inputs prefetch.
    long share() const { return (Layout<F>::BLOCK / (F::INPUTS / 32) / readings + 63) / 64 * 64; }
};

// The scale of a group's part, and the negative minimum, for one half of a panel.
template <class F, int PART> INLINE void part_scales(const uint8_t* group, int half, V& scale, V& minimum) {
    const uint8_t* sub = group + HALF_PANEL * half;
    if constexpr (F::SUB_SCALES && F::MINIMUMS) {
        scale = scale * widen_uint8(sub);
        minimum = minimum * widen_uint8(sub + BLOCK_PANEL);
    } else if constexpr (F::SUB_SCALES) {
        scale = scale * from_int8((const int8_t*)sub + BLOCK_PANEL * PART);
    }
}

// total + the integer sums of a part of a group, with scales and minimums
template <class F> INLINE V add_part(V total, Ints sums, V scale, V minimum, float x_scale, float x_sum) {
    total = fma(to_float(sums), scale * splat(x_scale), total);
    if constexpr (F::MINIMUMS) total = fma(minimum, splat(x_sum), total);
    return total;
}

// The integer sums of a part of 32 inputs, for each row and half.
template <class F, int PART, int ROWS>
INLINE void part_sums(const uint8_t* half, const RoundedInputs& x, Ints (&sums)[ROWS][TILE_HALVES]) {
    typedef PartSums<F> Sums;
    for_constants<F::SUB / 8 / Sums::PAIRS>([&](auto run) __attribute__((always_inline)) {
        constexpr int RUN = decltype(run)::value;
        Ints later[ROWS][TILE_HALVES];
        auto& own = RUN == 0 ? sums : later;
        UNROLL_FOR (int r = 0; r < ROWS; r++)
            UNROLL_FOR (int h = 0; h < TILE_HALVES; h++)
                own[r][h] = splat_int(RUN == 0 ? x.starts[32 / F::SUB * r + PART] : 0);
        for_constants<Sums::PAIRS>([&](auto i) __attribute__((always_inline)) {
            constexpr int PAIR = PART * F::SUB / 8 + RUN * Sums::PAIRS + decltype(i)::value;
            Bytes w[TILE_HALVES][2];
            UNROLL_FOR (int h = 0; h < TILE_HALVES; h++) load_pair<F, PAIR>(half + Layout<F>::HALF * h, w[h]);
            Sums::template add<PAIR>(own, w, x.integers);
        });
        UNROLL_FOR (int r = 0; r < ROWS; r++)
            UNROLL_FOR (int h = 0; h < TILE_HALVES; h++) {
                Sums::end(own[r][h]);
                if constexpr (RUN > 0) sums[r][h] = sums[r][h] + own[r][h];
            }
    });
}

// Not inlined: GCC then keeps the integer sums in registers.
template <class F, int ROWS, int HALVES>
static __attribute__((noinline)) void block_tile(const BlockTile<F>& t, int first) {
    typedef Layout<F> L;
    // Bytes go to L2: with prefetches to L1 or none, one row of 8 bits read 0.7 to 0.9 of what plain loads read.
    // Half bytes go to L1: with prefetches to L2, some numbers of rows were slower (AMD EPYC).
    constexpr int LEVEL = F::LOW == 8 ? 2 : 3;
    V total[HALVES][ROWS];
    UNROLL_FOR (int h = 0; h < HALVES; h++)
        UNROLL_FOR (int r = 0; r < ROWS; r++)
            total[h][r] = t.continued ? load(t.sums + r * PANEL + 16 * (first + h)) : zero();
    const uint8_t *block = t.block, *ahead = t.ahead();
    const long share = t.share();
    RoundedInputs x = t.x;
    for (long b = 0; b < t.blocks; b++, block += L::BLOCK) {
        V scales[HALVES], minimums[HALVES];
        UNROLL_FOR (int h = 0; h < HALVES; h++) {
            scales[h] = load_scales<F>(block + 32 * (first + h));
            if constexpr (F::MINIMUMS) minimums[h] = zero() - load_scales<F>(block + 64 + 32 * (first + h));
        }
        const uint8_t* group = block + L::HEAD;
        for (int g = 0; g < F::INPUTS / 32; g++, group += L::GROUP) {
            for (long line = 0; line < share; line += 64) __builtin_prefetch(ahead + line, 0, LEVEL);
            ahead += share;
            UNROLL_FOR (int half = 0; half < HALVES; half += TILE_HALVES) {
                for_constants<32 / F::SUB>([&](auto part) __attribute__((always_inline)) {
                    constexpr int PART = decltype(part)::value;
                    Ints sums[ROWS][TILE_HALVES];
                    part_sums<F, PART, ROWS>(group + L::SUB_SCALES + L::HALF * (first + half), x, sums);
                    UNROLL_FOR (int h = 0; h < TILE_HALVES; h++) {
                        V own = scales[half + h], own_minimum = minimums[half + h];
                        part_scales<F, PART>(group, first + half + h, own, own_minimum);
                        UNROLL_FOR (int r = 0; r < ROWS; r++)
                            total[half + h][r] =
                                add_part<F>(total[half + h][r], sums[r][h], own, own_minimum, x.scales[r], x.sums[r]);
                    }
                });
            }
            x = x.from<F>(ROWS);
        }
    }
    UNROLL_FOR (int h = 0; h < HALVES; h++)
        UNROLL_FOR (int r = 0; r < ROWS; r++) store(t.sums + r * PANEL + 16 * (first + h), total[h][r]);
}

template <class F, int ROWS> static void block_tiles(const BlockTile<F>& t) {
    for (int first = 0; first < 2; first += CALL_HALVES) block_tile<F, ROWS, CALL_HALVES>(t, first);
}

template <class F> static void block_group(const BlockTile<F>& t, int rows) {
    switch (rows) {
#define CASE(n)                                              \
    case n:                                                  \
        if constexpr (n <= BLOCK_ROWS) block_tiles<F, n>(t); \
        break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#undef CASE
    }
}

static long block_chunk_rows(long rows) { return rows < BLOCK_CHUNK ? rows : BLOCK_CHUNK; }

static size_t block_scratch(long rows, long inputs) {
    const long padded = RoundedInputs::padded(inputs);
    return (size_t)block_chunk_rows(rows) * (PANEL + RoundedInputs::row_floats(padded));
}

// A thread's shares of the panels, for a chunk of rows.
template <class F>
static void block_chunk(const LinearParams& params, long first, long rows, const Team& team, float* scratch) {
    const Linear& l = *params.linear;
    const long padded = RoundedInputs::padded(l.inputs), groups = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    float* sums = scratch;
    float* scales = sums + rows * PANEL;
    float* x_sums = scales + rows * padded / 32;
    int32_t* starts = (int32_t*)(x_sums + rows * padded / 32);
    const RoundedInputs x = {(int8_t*)(starts + rows * padded / 16), scales, starts, x_sums};
    const auto start = [&](long g) { return rows * g / groups; };
    for (long g = 0; g < groups; g++)
        for (long r = start(g); r < start(g + 1); r++)
            round_row<F>(l, params.x + (first + r) * params.x_row, x.from<F>(start(g) * padded / 32), r - start(g),
                start(g + 1) - start(g));
    const long step = params.epilogue == SWIGLU ? 2 : 1;
    const long panel_bytes = Layout<F>::panel_bytes(l.inputs), units = (l.outputs + 31) / 32 / step;
    const long blocks = Layout<F>::blocks(l.inputs), depth = groups > 1 ? DEPTH_BYTES / Layout<F>::BLOCK + 1 : blocks;
    team.share(units, least_share(step * panel_bytes), [&](long from, long to) {
        for (long panel = from * step; panel < to * step; panel += step) {
            for (long own = 0; own < step; own++) {
                const uint8_t* packed = (const uint8_t*)l.weight + (panel + own) * panel_bytes;
                for (long block = 0; block < blocks; block += depth)
                    for (long g = 0; g < groups; g++) {
                        const long count = start(g + 1) - start(g);
                        const long place = start(g) * padded + count * F::INPUTS * block;
                        block_group<F>({packed + Layout<F>::BLOCK * block,
                                           blocks - block < depth ? blocks - block : depth, x.from<F>(place / 32),
                                           sums + start(g) * PANEL + 32 * own, block > 0, (int)g, (int)groups},
                            (int)count);
                    }
            }
            write_outputs(params, sums, first, rows, 32 * panel, 2);
        }
    });
}

template <class F> static void block_shares(const LinearParams& params, const Team& team, float* scratch) {
    for (long first = 0; first < params.rows; first += BLOCK_CHUNK)
        block_chunk<F>(params, first, block_chunk_rows(params.rows - first), team, scratch);
}

}  // namespace

}  // namespace cospec
