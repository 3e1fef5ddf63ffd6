// Weight formats of integers in blocks, and their packed layout. File blocks are those of GGUF.
//
// A weight [outputs, inputs] is packed in panels of 32 outputs. A panel holds one block after the other:
//   scales: uint16 [32]; of formats with minimums, minimums: uint16 [32] follow
//   for each 32 inputs of a block:
//     sub-scales: uint8 [2, 32], of formats with sub-scales
//     for each half of the panel (16 outputs):
//       high bits: uint8 [high_bits, 16, 4]
//       low bits: uint8 [low_bits, 16, 4]
// In a word [16, 4] each byte belongs to one output and to the inputs 4 i + byte of several quads i of inputs.
// With 4 low bits, word i holds quads 2 i (lower half of a byte) and 2 i + 1. A byte of high bits holds `high_bits`
// bits of quads 0, 1, 2 ... of its word, from the lowest bit up.
// All parts are multiples of 64 bytes, so a load never crosses a cache line.
//
// Integers are stored as unsigned numbers. The value of a weight is
//   scale * (integer - OFFSET), scale * table[integer], or scale * integer - minimum.
#pragma once
#include <stdint.h>

#include "ops/weight_formats.h"

namespace cospec {

constexpr int HALF_PANEL = 16, BLOCK_PANEL = 32;  // outputs

enum ScaleType { FLOAT16, BFLOAT16 };

// INPUTS: of a block. SOURCE: bytes of a block in the file. SUB: inputs that share a scale or sub-scale.
// LARGEST: the largest integer that products see. TABLE: integers are indices of a table.
struct PlainBlock {
    static constexpr int INPUTS = 32, SUB = 32;
    static constexpr int LOW = 4, HIGH = 0;
    static constexpr bool SUB_SCALES = false, MINIMUMS = false, TABLE = false;
    static constexpr ScaleType SCALE = FLOAT16;
};

struct Q8_0 : PlainBlock {
    static constexpr int SOURCE = 34, LOW = 8, OFFSET = 128, LARGEST = 255;
};
struct Q4_0 : PlainBlock {
    static constexpr int SOURCE = 18, OFFSET = 8, LARGEST = 15;
};
struct Q4_1 : PlainBlock {
    static constexpr int SOURCE = 20, OFFSET = 0, LARGEST = 15;
    static constexpr bool MINIMUMS = true;
};
struct Q5_0 : PlainBlock {
    static constexpr int SOURCE = 22, HIGH = 1, OFFSET = 16, LARGEST = 31;
};
struct Q5_1 : PlainBlock {
    static constexpr int SOURCE = 24, HIGH = 1, OFFSET = 0, LARGEST = 31;
    static constexpr bool MINIMUMS = true;
};
struct Iq4Nl : PlainBlock {
    static constexpr int SOURCE = 18, OFFSET = 128, LARGEST = 255;
    static constexpr bool TABLE = true;
    // Values of the 16 integers, plus OFFSET.
    static constexpr uint8_t VALUES[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
};
struct Mxfp4 : PlainBlock {
    static constexpr int SOURCE = 17, OFFSET = 12, LARGEST = 24;
    static constexpr bool TABLE = true;
    static constexpr ScaleType SCALE = BFLOAT16;
    // Twice the values of the 16 numbers of 4 bits, plus OFFSET.
    static constexpr uint8_t VALUES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
};

struct SuperBlock : PlainBlock {
    static constexpr int INPUTS = 256;
    static constexpr bool SUB_SCALES = true;
};
struct Q4K : SuperBlock {
    static constexpr int SOURCE = 144, OFFSET = 0, LARGEST = 15;
    static constexpr bool MINIMUMS = true;
};
struct Q5K : SuperBlock {
    static constexpr int SOURCE = 176, HIGH = 1, OFFSET = 0, LARGEST = 31;
    static constexpr bool MINIMUMS = true;
};
struct Q6K : SuperBlock {
    static constexpr int SOURCE = 210, HIGH = 2, SUB = 16, OFFSET = 32, LARGEST = 63;
};

// Places of the parts of a packed block, in bytes.
template <class F> struct Layout {
    static constexpr long HEAD = F::MINIMUMS ? 128 : 64, SUB_SCALES = F::SUB_SCALES ? 64 : 0;
    static constexpr long HIGH = 64 * F::HIGH, HALF = HIGH + 64 * F::LOW;  // of 32 inputs and 16 outputs
    static constexpr long GROUP = SUB_SCALES + 2 * HALF;                   // of 32 inputs
    static constexpr long BLOCK = HEAD + F::INPUTS / 32 * GROUP;
    static constexpr long blocks(long inputs) { return (inputs + F::INPUTS - 1) / F::INPUTS; }
    static constexpr long panel_bytes(long inputs) { return blocks(inputs) * BLOCK; }
};

// Pack rows of file blocks [outputs, blocks, SOURCE]; the calling thread starts the others.
void pack_blocks(int format, const uint8_t* from, long outputs, long inputs, uint8_t* to);
size_t packed_block_bytes(int format, long outputs, long inputs);
// The values of one row of file blocks, and its bytes; 0 where the format has no blocks.
void dequantize_row(int format, const uint8_t* from, long inputs, float* y);
long file_row_bytes(int format, long inputs);

}  // namespace cospec
