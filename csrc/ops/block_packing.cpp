// Packs the blocks of a GGUF file for the kernels. No weight is expanded to a float.
#include <math.h>
#include <string.h>

#include "ops/block_formats.h"
#include "ops/thread_pool.h"

namespace cospec {

namespace {

// One block of one output. Integers are unsigned, as the kernels store them.
struct Unpacked {
    uint16_t scale, minimum;
    uint8_t sub_scales[16], sub_minimums[8];
    uint8_t integers[256];
};

uint16_t half_at(const uint8_t* p) { return (uint16_t)(p[0] | p[1] << 8); }
uint16_t negated(uint16_t half) { return half ^ 0x8000; }

// The halves of 16 bytes: first 16 lower halves, then 16 upper halves.
void split_nibbles(const uint8_t* p, uint8_t* to) {
    for (int i = 0; i < 16; i++) to[i] = p[i] & 15, to[i + 16] = p[i] >> 4;
}
void add_fifth_bits(const uint8_t* p, uint8_t* to) {
    for (int i = 0; i < 32; i++) to[i] |= (p[i / 8] >> i % 8 & 1) << 4;
}

void unpack(Q8_0, const uint8_t* p, Unpacked& u) {
    u.scale = half_at(p);
    for (int i = 0; i < 32; i++) u.integers[i] = p[2 + i] ^ 0x80;
}
void unpack(Q4_0, const uint8_t* p, Unpacked& u) {
    u.scale = half_at(p);
    split_nibbles(p + 2, u.integers);
}
void unpack(Iq4Nl, const uint8_t* p, Unpacked& u) { unpack(Q4_0{}, p, u); }
void unpack(Q4_1, const uint8_t* p, Unpacked& u) {
    u.scale = half_at(p), u.minimum = negated(half_at(p + 2));
    split_nibbles(p + 4, u.integers);
}
void unpack(Q5_0, const uint8_t* p, Unpacked& u) {
    u.scale = half_at(p);
    split_nibbles(p + 6, u.integers);
    add_fifth_bits(p + 2, u.integers);
}
void unpack(Q5_1, const uint8_t* p, Unpacked& u) {
    u.scale = half_at(p), u.minimum = negated(half_at(p + 2));
    split_nibbles(p + 8, u.integers);
    add_fifth_bits(p + 4, u.integers);
}
// The scale is 2^(p[0] - 128) as bfloat16: the table holds twice the values.
void unpack(Mxfp4, const uint8_t* p, Unpacked& u) {
    u.scale = p[0] < 2 ? (uint16_t)(0x20 << p[0]) : (uint16_t)((p[0] - 1) << 7);
    split_nibbles(p + 1, u.integers);
}

// Eight scales and eight minimums of 6 bits in 12 bytes.
void unpack_sub_scales(const uint8_t* p, Unpacked& u) {
    for (int i = 0; i < 4; i++) {
        u.sub_scales[i] = p[i] & 63, u.sub_minimums[i] = p[i + 4] & 63;
        u.sub_scales[i + 4] = (p[i + 8] & 15) | p[i] >> 6 << 4;
        u.sub_minimums[i + 4] = p[i + 8] >> 4 | p[i + 4] >> 6 << 4;
    }
}
void unpack(Q4K, const uint8_t* p, Unpacked& u) {
    u.scale = half_at(p), u.minimum = half_at(p + 2);
    unpack_sub_scales(p + 4, u);
    for (int i = 0; i < 256; i++) u.integers[i] = p[16 + i / 64 * 32 + i % 32] >> i / 32 % 2 * 4 & 15;
}
void unpack(Q5K, const uint8_t* p, Unpacked& u) {
    u.scale = half_at(p), u.minimum = half_at(p + 2);
    unpack_sub_scales(p + 4, u);
    for (int i = 0; i < 256; i++)
        u.integers[i] = (p[48 + i / 64 * 32 + i % 32] >> i / 32 % 2 * 4 & 15) | (p[16 + i % 32] >> i / 32 & 1) << 4;
}
void unpack(Q6K, const uint8_t* p, Unpacked& u) {
    const uint8_t *low = p, *high = p + 128;
    u.scale = half_at(p + 208);
    memcpy(u.sub_scales, p + 192, 16);
    for (int i = 0; i < 256; i++) {
        const int half = i / 128, quarter = i / 32 % 4;
        const int four = low[64 * half + i % 64] >> (quarter / 2 * 4) & 15;
        u.integers[i] = (uint8_t)(four | (high[32 * half + i % 32] >> 2 * quarter & 3) << 4);
    }
}

// Write the block of output `o` of a panel.
template <class F> void insert(const Unpacked& u, int o, uint8_t* block) {
    typedef Layout<F> L;
    memcpy(block + 2 * o, &u.scale, 2);
    if (F::MINIMUMS) memcpy(block + 64 + 2 * o, &u.minimum, 2);
    for (int g = 0; g < F::INPUTS / 32; g++) {
        uint8_t* group = block + L::HEAD + g * L::GROUP;
        if (F::SUB_SCALES) {
            group[o] = u.sub_scales[F::SUB == 16 ? 2 * g : g];
            group[BLOCK_PANEL + o] = F::SUB == 16 ? u.sub_scales[2 * g + 1] : u.sub_minimums[g];
        }
        uint8_t* high = group + L::SUB_SCALES + o / HALF_PANEL * L::HALF + o % HALF_PANEL * 4;
        uint8_t* low = high + L::HIGH;
        for (int i = 0; i < 32; i++) {
            const int integer = u.integers[32 * g + i], quad = i / 4, byte = i % 4;
            if (F::LOW == 8) {
                low[64 * quad + byte] = (uint8_t)integer;
                continue;
            }
            low[64 * (quad / 2) + byte] |= (integer & 15) << quad % 2 * 4;
            if (F::HIGH) {
                constexpr int quads = F::HIGH ? 8 / F::HIGH : 1;  // of a byte
                high[64 * (quad / quads) + byte] |= (integer >> 4) << quad % quads * F::HIGH;
            }
        }
    }
}

template <class F> void pack_panels(const uint8_t* from, long outputs, long inputs, uint8_t* to, const Team& team) {
    typedef Layout<F> L;
    const long blocks = L::blocks(inputs), panels = (outputs + BLOCK_PANEL - 1) / BLOCK_PANEL;
    Unpacked unpacked = {};
    for (long panel = team.begin(panels); panel < team.end(panels); panel++) {
        uint8_t* packed = to + panel * L::panel_bytes(inputs);
        memset(packed, 0, L::panel_bytes(inputs));
        const long first = panel * BLOCK_PANEL;
        for (long o = 0; o < BLOCK_PANEL && first + o < outputs; o++)
            for (long b = 0; b < blocks; b++) {
                unpack(F{}, from + ((first + o) * blocks + b) * F::SOURCE, unpacked);
                insert<F>(unpacked, (int)o, packed + b * L::BLOCK);
            }
    }
}

float float_of(uint16_t bits, ScaleType type) {
    if (type == BFLOAT16) {
        const uint32_t word = (uint32_t)bits << 16;
        float value;
        memcpy(&value, &word, 4);
        return value;
    }
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float size = exponent ? ldexpf((float)(1024 + fraction), exponent - 25) : ldexpf((float)fraction, -24);
    return bits & 0x8000 ? -size : size;
}

template <class F> float value_of(const Unpacked& u, int i, float scale, float minimum) {
    const int integer = u.integers[i];
    if constexpr (F::TABLE) return scale * (float)(F::VALUES[integer] - F::OFFSET);
    if (F::SUB_SCALES && F::MINIMUMS)
        return scale * (float)u.sub_scales[i / 32] * (float)integer - minimum * (float)u.sub_minimums[i / 32];
    if (F::SUB_SCALES) return scale * (float)(int8_t)u.sub_scales[i / F::SUB] * (float)(integer - F::OFFSET);
    return F::MINIMUMS ? scale * (float)integer - minimum : scale * (float)(integer - F::OFFSET);
}

template <class F> void dequantize(const uint8_t* from, long inputs, float* y) {
    Unpacked unpacked = {};
    for (long begin = 0; begin < inputs; begin += F::INPUTS, from += F::SOURCE) {
        unpack(F{}, from, unpacked);
        const float scale = float_of(unpacked.scale, F::SCALE), minimum = float_of(unpacked.minimum, FLOAT16);
        for (int i = 0; i < F::INPUTS && begin + i < inputs; i++)
            y[begin + i] = value_of<F>(unpacked, i, scale, minimum);
    }
}

}  // namespace

void dequantize_row(int format, const uint8_t* from, long inputs, float* y) {
    switch (format) {
#define FORMAT(name, id, Block) \
    case id: dequantize<Block>(from, inputs, y); break;
        BLOCK_FORMATS(FORMAT)
#undef FORMAT
    }
}

long file_row_bytes(int format, long inputs) {
    switch (format) {
#define FORMAT(name, id, Block) \
    case id: return Layout<Block>::blocks(inputs) * Block::SOURCE;
        BLOCK_FORMATS(FORMAT)
#undef FORMAT
    }
    return 0;
}

size_t packed_block_bytes(int format, long outputs, long inputs) {
    const long panels = (outputs + BLOCK_PANEL - 1) / BLOCK_PANEL;
    switch (format) {
#define FORMAT(name, id, Block) \
    case id: return panels * Layout<Block>::panel_bytes(inputs);
        BLOCK_FORMATS(FORMAT)
#undef FORMAT
    }
    return 0;
}

void pack_blocks(int format, const uint8_t* from, long outputs, long inputs, uint8_t* to) {
    in_parallel(outputs * inputs < 65536 ? 1 : num_threads(), [&](const Team& team) {
        switch (format) {
#define FORMAT(name, id, Block) \
    case id: pack_panels<Block>(from, outputs, inputs, to, team); break;
            BLOCK_FORMATS(FORMAT)
#undef FORMAT
        }
    });
}

}  // namespace cospec
