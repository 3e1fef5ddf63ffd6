// Products with bf16 weights on AMX, whose order of sums differs from the order of ops/linear_kernel.h.
//
// The contract: inputs are rounded to bf16 and taken 32 at a time. Products of the even ones are a chain of fused
// multiply-adds from 0, products of the odd ones another, in ascending order. The sum of both is added to the output.
// Subnormal numbers count as 0. So results are equal for every number of rows and threads, and differ from those of
// other instruction sets.
#pragma once
#include <initializer_list>

#include "ops/linear_kernel.h"

namespace cospec {
namespace {

constexpr long TILE_ROWS = 16, TILE_WORDS = 16;  // of a tile of inputs; a word holds two inputs
constexpr long AMX_GROUP = 2 * TILE_ROWS;        // rows that share the tiles of a weight
constexpr long AMX_DEPTH = 128;                  // words of a column per pass, where several groups read a panel
constexpr long AMX_INPUT_BYTES = 1 << 20;        // most bytes of rounded inputs, which stay in L2
constexpr size_t SUMS_ROW = PANEL * sizeof(float);

static long padded_words(long inputs) { return (inputs + 2 * TILE_WORDS - 1) / (2 * TILE_WORDS) * TILE_WORDS; }

static long amx_chunk_rows(long rows, long inputs) {
    const long fitting = AMX_INPUT_BYTES / 4 / (padded_words(inputs) + 1) / AMX_GROUP * AMX_GROUP;
    const long most = fitting < AMX_GROUP ? AMX_GROUP : fitting;
    return rows < most ? rows : most;
}

static size_t amx_scratch(long rows, long inputs) {
    return (size_t)amx_chunk_rows(rows, inputs) * (PANEL + padded_words(inputs));
}

// Shapes of the eight tile registers.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, long its_rows) { rows[tile] = (uint8_t)its_rows, row_bytes[tile] = 64; }
};

// The compiler does not know that tiles are loaded from memory, and would drop or delay stores.
INLINE void finish_stores() { asm volatile("" ::: "memory"); }

// Up to 16 rows: tiles 0 to 3 are the sums of 16 outputs each, tile 4 the inputs, tiles 6 and 7 the weights in turn.
// Up to 32 rows: tiles 0 and 1 are sums of the first 16 rows, tiles 2 and 3 of the others, tiles 4 and 5 their inputs.
static void configure_tiles(long rows) {
    const long first = rows < TILE_ROWS ? rows : TILE_ROWS, others = rows > TILE_ROWS ? rows - TILE_ROWS : first;
    TileConfig config;
    for (int i : {0, 1, 4}) config.set(i, first);
    for (int i : {2, 3, 5}) config.set(i, others);
    for (int i : {6, 7}) config.set(i, TILE_WORDS);
    finish_stores();
    _tile_loadconfig(&config);
}

// Words of a panel against a group of rows.
struct AmxBlock {
    const uint32_t* weight;
    long columns;      // words from one step of the weight to the next
    const char* next;  // the next address to read; each step prefetches a part
    const uint32_t* x;
    long x_row;    // words between rows
    long depth;    // words of a column
    float* sums;   // [rows, PANEL]
    bool started;  // add to the sums

    void prefetch(long i, int v) const {
        const char* part = next + 4 * (i * columns + 16 * v);
        for (long k = 0; k < TILE_WORDS; k++) __builtin_prefetch(part + 4 * k * columns);
    }
};

// A tile of weights in memory. After the last word of a column follow zeros.
struct WeightTile {
    const uint32_t* words;
    long stride;  // bytes
    alignas(64) uint32_t padded[TILE_WORDS][16];

    inline __attribute__((always_inline)) void point(const AmxBlock& b, long i, int v) {
        words = b.weight + i * b.columns + 16 * v, stride = 4 * b.columns;
        if (b.depth - i >= TILE_WORDS) return;
        finish_stores();  // the tile before may be loaded from here too, and the compiler does not know of loads
        memset(padded, 0, sizeof padded);
        for (long k = 0; i + k < b.depth; k++) memcpy(padded[k], words + k * b.columns, 64);
        words = padded[0], stride = 64;
        finish_stores();
    }
};

// The instructions take the numbers of tiles as text, and no constants.
#define LOAD_SUMS(tile, row, v)                                         \
    if (b.started)                                                      \
        _tile_loadd(tile, b.sums + (row) * PANEL + 16 * (v), SUMS_ROW); \
    else                                                                \
        _tile_zero(tile)
#define STORE_SUMS(tile, row, v) _tile_stored(tile, b.sums + (row) * PANEL + 16 * (v), SUMS_ROW)
#define LOAD_WEIGHT(tile, v) \
    b.prefetch(i, v);        \
    weight.point(b, i, v);   \
    _tile_loadd(tile, weight.words, weight.stride)

// Up to 16 rows against `width` vectors of outputs, 2 or 4.
static void multiply_few(const AmxBlock& b, int width) {
    WeightTile weight;
    LOAD_SUMS(0, 0, 0);
    LOAD_SUMS(1, 0, 1);
    if (width == 4) {
        LOAD_SUMS(2, 0, 2);
        LOAD_SUMS(3, 0, 3);
    }
    for (long i = 0; i < b.depth; i += TILE_WORDS) {
        _tile_loadd(4, b.x + i, 4 * b.x_row);
        LOAD_WEIGHT(6, 0);
        _tile_dpbf16ps(0, 4, 6);
        LOAD_WEIGHT(7, 1);
        _tile_dpbf16ps(1, 4, 7);
        if (width == 4) {
            LOAD_WEIGHT(6, 2);
            _tile_dpbf16ps(2, 4, 6);
            LOAD_WEIGHT(7, 3);
            _tile_dpbf16ps(3, 4, 7);
        }
    }
    STORE_SUMS(0, 0, 0);
    STORE_SUMS(1, 0, 1);
    if (width == 4) {
        STORE_SUMS(2, 0, 2);
        STORE_SUMS(3, 0, 3);
    }
}

// 17 to 32 rows: each tile of weights and of inputs is multiplied twice.
static void multiply_many(const AmxBlock& b, int width) {
    WeightTile weight;
    for (int v = 0; v < width; v += 2) {
        LOAD_SUMS(0, 0, v);
        LOAD_SUMS(1, 0, v + 1);
        LOAD_SUMS(2, TILE_ROWS, v);
        LOAD_SUMS(3, TILE_ROWS, v + 1);
        for (long i = 0; i < b.depth; i += TILE_WORDS) {
            _tile_loadd(4, b.x + i, 4 * b.x_row);
            _tile_loadd(5, b.x + i + TILE_ROWS * b.x_row, 4 * b.x_row);
            LOAD_WEIGHT(6, v);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(2, 5, 6);
            LOAD_WEIGHT(7, v + 1);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
        STORE_SUMS(0, 0, v);
        STORE_SUMS(1, 0, v + 1);
        STORE_SUMS(2, TILE_ROWS, v);
        STORE_SUMS(3, TILE_ROWS, v + 1);
    }
}
#undef LOAD_SUMS
#undef STORE_SUMS
#undef LOAD_WEIGHT

// A thread's shares of the outputs, for a chunk of rows.
static void amx_chunk(const LinearParams& params, long first, long rows, const Team& team, float* scratch) {
    const long inputs = params.linear->inputs, words = (inputs + 1) / 2, x_row = padded_words(inputs);
    float* sums = scratch;
    uint32_t* x = (uint32_t*)(scratch + rows * PANEL);
    for (long r = 0; r < rows; r++) {
        Bf16Weights::round(params.x + (first + r) * params.x_row, inputs, x + r * x_row);
        memset(x + r * x_row + words, 0, 4 * (x_row - words));
    }
    const bool several = rows > AMX_GROUP;
    const long depth = several ? AMX_DEPTH : words;
    long configured = 0;  // rows
    share_outputs<uint32_t>(
        params, first, rows, team, sums, words, [&](const uint32_t* weight, long columns, int width) {
            for (long i = 0; i < words; i += depth) {
                AmxBlock b = {weight + i * columns, columns};
                b.x_row = x_row, b.depth = words - i < depth ? words - i : depth, b.started = i > 0;
                b.next = (const char*)(b.weight + (several ? b.depth * columns : 0)) + (several ? 0 : PREFETCH_BYTES);
                for (long row = 0; row < rows; row += AMX_GROUP) {
                    const long count = rows - row < AMX_GROUP ? rows - row : AMX_GROUP;
                    b.x = x + row * x_row + i, b.sums = sums + row * PANEL;
                    if (count != configured) configure_tiles(configured = count);
                    finish_stores();
                    if (count > TILE_ROWS)
                        multiply_many(b, width);
                    else
                        multiply_few(b, width);
                }
            }
            finish_stores();
        });
    if (configured) _tile_release();
}

template <> void linear_shares<Bf16Weights>(const LinearParams& params, const Team& team, float* scratch) {
    const long step = amx_chunk_rows(params.rows, params.linear->inputs);
    for (long first = 0; first < params.rows; first += step)
        amx_chunk(params, first, params.rows - first < step ? params.rows - first : step, team, scratch);
}

}  // namespace

}  // namespace cospec
