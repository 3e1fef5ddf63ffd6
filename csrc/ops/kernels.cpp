// The kernel table of one instruction set. COSPEC_ISA names the set; the file is compiled once for each.
#include "ops/kernels.h"
#include "ops/adaptive_kernel.h"
#if defined(__AMX_BF16__)
#include "ops/amx_bf16.h"
#endif
#include "ops/attention_kernel.h"
#include "ops/block_kernel.h"
#include "ops/linear_kernel.h"
#include "ops/row_kernel.h"
#include "ops/sampling_kernel.h"

namespace cospec {

namespace {

void linear(const LinearParams& params, const Team& team, float* scratch) {
    switch (params.linear->format) {
#define FORMAT(name, id, Element, inputs_per_word, scaled, Kernel) \
    case id: linear_shares<Kernel>(params, team, scratch); break;
        WEIGHT_FORMATS(FORMAT)
#undef FORMAT
#define FORMAT(name, id, Block) \
    case id: block_shares<Block>(params, team, scratch); break;
        BLOCK_FORMATS(FORMAT)
#undef FORMAT
    }
}

size_t linear_scratch(long rows, long inputs) {
    size_t most = panel_scratch(rows, inputs);
    const auto fit = [&](size_t floats) { most = floats > most ? floats : most; };
    fit(block_scratch(rows, inputs));
#if defined(__AMX_BF16__)
    fit(amx_scratch(rows, inputs));
#endif
    return most;
}

}  // namespace

#define JOIN(a, b) a##b
#define TABLE(isa) JOIN(kernels_, isa)
#define TEXT(isa) #isa
#define NAME(isa) TEXT(isa)

extern const Kernels TABLE(COSPEC_ISA) = {NAME(COSPEC_ISA), linear, linear_scratch, attend, merge_spans, attend_scratch,
    rms_norm, apply_rotary, bf16_to_float, fp16_to_float, argmax, softmax<float>, softmax<double>, logarithm,
    weighted_sum, exponential_sample, first_uniform, residual, adapt};

}  // namespace cospec
