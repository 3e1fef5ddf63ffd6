// The tables of weight formats. All code that depends on the format expands these tables.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace cospec {

enum class Bf16 : uint16_t {};  // the bits of a number

// FORMAT(name, id, Element, inputs_per_word, scaled, Kernel)
//   name: of the kernel, as `kernel` in cospec.models.weights
//   Element: a weight in memory
//   inputs_per_word: inputs of an output that share a word of a panel
//   scaled: whether a second part holds one float32 scale per output
//   Kernel: layout and product, in ops/linear_kernel.h
#define WEIGHT_FORMATS(FORMAT)                            \
    FORMAT("fp32", FP32, float, 1, false, Fp32Weights)    \
    FORMAT("bf16", BF16, Bf16, 2, false, Bf16Weights)     \
    FORMAT("fp16", FP16, uint16_t, 1, false, Fp16Weights) \
    FORMAT("int8", INT8, int8_t, 1, true, Int8Weights)

// FORMAT(name, id, Block): integers in blocks, see ops/block_formats.h
#define BLOCK_FORMATS(FORMAT)             \
    FORMAT("q8_0", BLOCK_Q8_0, Q8_0)      \
    FORMAT("q4_0", BLOCK_Q4_0, Q4_0)      \
    FORMAT("q4_1", BLOCK_Q4_1, Q4_1)      \
    FORMAT("q5_0", BLOCK_Q5_0, Q5_0)      \
    FORMAT("q5_1", BLOCK_Q5_1, Q5_1)      \
    FORMAT("q4_k", BLOCK_Q4_K, Q4K)       \
    FORMAT("q5_k", BLOCK_Q5_K, Q5K)       \
    FORMAT("q6_k", BLOCK_Q6_K, Q6K)       \
    FORMAT("iq4_nl", BLOCK_IQ4_NL, Iq4Nl) \
    FORMAT("mxfp4", BLOCK_MXFP4, Mxfp4)

#define FORMAT_ID(name, id, ...) id,
enum WeightFormat { WEIGHT_FORMATS(FORMAT_ID) BLOCK_FORMATS(FORMAT_ID) NUM_WEIGHT_FORMATS };
#undef FORMAT_ID

}  // namespace cospec
