// The kernel table of one instruction set. COSPEC_ISA names the set; the file is compiled once for each.
#include "ops/kernels.h"
#include "ops/attention_kernel.h"
#include "ops/linear_kernel.h"
#include "ops/row_kernel.h"
#include "ops/sampling_kernel.h"

namespace cospec {

#define JOIN(a, b) a##b
#define TABLE(isa) JOIN(kernels_, isa)
#define TEXT(isa) #isa
#define NAME(isa) TEXT(isa)

extern const Kernels TABLE(COSPEC_ISA) = {NAME(COSPEC_ISA), linear, linear_scratch, attend, attend_scratch, rms_norm,
    apply_rotary, bf16_to_float, argmax, softmax<float>, softmax<double>, logarithm, weighted_sum, exponential_sample,
    first_uniform, residual};

}  // namespace cospec
