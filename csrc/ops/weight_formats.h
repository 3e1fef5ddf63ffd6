// The table of weight formats. All code that depends on the format expands this table.
#pragma once
#include <stdint.h>

namespace cospec {

// FORMAT(name, id, Element, inputs_per_word, scaled, Kernel)
//   name: of the kernel, as `kernel` in cospec.models.weights
//   Element: a weight in memory
//   inputs_per_word: inputs of an output that share a word of a panel
//   scaled: whether a second part holds one float32 scale per output
//   Kernel: layout and product, in ops/linear_kernel.h
#define WEIGHT_FORMATS(FORMAT)                            \
    FORMAT("fp32", FP32, float, 1, false, Fp32Weights)    \
    FORMAT("bf16", BF16, uint16_t, 2, false, Bf16Weights) \
    FORMAT("int8", INT8, int8_t, 1, true, Int8Weights)

#define FORMAT_ID(name, id, Element, inputs_per_word, scaled, Kernel) id,
enum WeightFormat { WEIGHT_FORMATS(FORMAT_ID) NUM_WEIGHT_FORMATS };
#undef FORMAT_ID

}  // namespace cospec
