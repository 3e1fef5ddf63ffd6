// Emulates the tiles of AMX, and its products of bf16, on a processor with AVX-512 and its dot products of bf16.
//
// Ends the program where a use of tiles breaks the rules of the processor.
#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig tiles::configure
#define _tile_release tiles::release
#define _tile_zero tiles::zero
#define _tile_loadd tiles::load
#define _tile_stored tiles::store
#define _tile_dpbf16ps tiles::multiply

namespace tiles {

struct State {
    bool configured;
    int rows[8], columns[8];  // columns in bytes
    uint8_t data[8][16][64];
};
static thread_local State state;

static inline void require(bool right) {
    if (!right) abort();
}

static inline void configure(const void* from) {
    const uint8_t* bytes = (const uint8_t*)from;
    require(bytes[0] == 1);
    for (int i = 1; i < 16; i++) require(bytes[i] == 0);
    state.configured = true;
    for (int tile = 0; tile < 8; tile++) {
        uint16_t columns;
        memcpy(&columns, bytes + 16 + 2 * tile, 2);
        state.rows[tile] = bytes[48 + tile], state.columns[tile] = columns;
        require(state.rows[tile] <= 16 && columns <= 64 && !state.rows[tile] == !columns);
    }
    memset(state.data, 0, sizeof state.data);
}

static inline void release() { memset(&state, 0, sizeof state); }

static inline void zero(int tile) {
    require(state.configured && state.rows[tile] > 0);
    memset(state.data[tile], 0, sizeof state.data[tile]);
}

static inline void load(int tile, const void* from, long stride) {
    zero(tile);
    for (int row = 0; row < state.rows[tile]; row++)
        memcpy(state.data[tile][row], (const uint8_t*)from + row * stride, state.columns[tile]);
}

static inline void store(int tile, void* to, long stride) {
    require(state.configured && state.rows[tile] > 0);
    for (int row = 0; row < state.rows[tile]; row++)
        memcpy((uint8_t*)to + row * stride, state.data[tile][row], state.columns[tile]);
}

static inline float number(const uint8_t* bf16) {
    const uint32_t bits = (uint32_t)bf16[0] << 16 | (uint32_t)bf16[1] << 24;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// sums += inputs times weights: even and odd inputs are one chain each
static inline void multiply(int sums, int inputs, int weights) {
    require(state.configured && state.rows[sums] == state.rows[inputs] &&
            state.columns[sums] == state.columns[weights] && state.columns[inputs] == 4 * state.rows[weights] &&
            state.rows[sums] > 0 && state.rows[weights] > 0);
    for (int row = 0; row < state.rows[sums]; row++)
        for (int column = 0; column < state.columns[sums] / 4; column++) {
            float sum, chains[2] = {0, 0};
            memcpy(&sum, state.data[sums][row] + 4 * column, 4);
            for (int pair = 0; pair < state.rows[weights]; pair++)
                for (int i = 0; i < 2; i++)
                    chains[i] = fmaf(number(state.data[inputs][row] + 4 * pair + 2 * i),
                        number(state.data[weights][pair] + 4 * column + 2 * i), chains[i]);
            sum += chains[0] + chains[1];
            memcpy(state.data[sums][row] + 4 * column, &sum, 4);
        }
}

}  // namespace tiles
