// Target logits from one model, or from several models whose rows are blended.
#pragma once
#include <stdint.h>

namespace cospec {

enum BlendForm {
    SINGLE = 0,   // the first model's logits, unchanged
    MIXTURE = 1,  // log sum_m weights[m] softmax(logits[m])
    LINEAR = 2,   // log softmax(sum_m weights[m] logits[m])
    ADAPTIVE = 3  // the first model's distribution, moved towards the second's: ops/adaptive_kernel.h
};

struct LogitsSource {
    const float* const* logits;  // [num_models] pointers to [rows, vocab_size]
    const double* weights;       // [num_models]; of ADAPTIVE the fields of AdaptiveParams
    int64_t num_models, vocab_size, form;
    // LINEAR excludes tokens whose first-model logit is lower than the largest one plus this cutoff.
    double plausibility_cutoff;
    double* divergences;  // [rows]; ADAPTIVE writes each computed row's total variation from the first model
    const float* row(long model, long row) const { return logits[model] + row * vocab_size; }
};

constexpr long BLEND_SCRATCH_ROWS = 3;

// Compute one row of a blend in double precision, [vocab_size]. A row that holds NaN stays NaN.
// `scratch` has room for BLEND_SCRATCH_ROWS * vocab_size numbers.
void blend_row(const LogitsSource& source, long row, double* out, double* scratch);

}  // namespace cospec
