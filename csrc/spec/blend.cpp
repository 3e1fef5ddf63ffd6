// Blended logits of several models, in double precision.
#include "spec/blend.h"

#include <math.h>

#include <vector>

#include "ops/ops.h"
#include "ops/sampling.h"

namespace cospec {

namespace {

void mix_distributions(const LogitsSource& s, long row, double* out, double* scratch) {
    softmax(s.row(0, row), s.vocab_size, 1.0, out);
    for (long i = 0; i < s.vocab_size; i++) out[i] *= s.weights[0];
    for (long m = 1; m < s.num_models; m++) {
        softmax(s.row(m, row), s.vocab_size, 1.0, scratch);
        for (long i = 0; i < s.vocab_size; i++) out[i] += s.weights[m] * scratch[i];
    }
    logarithm(out, s.vocab_size);
}

template <class T> T max_of(const T* x, long count) {
    T maximum = x[0];
    for (long i = 1; i < count; i++) maximum = x[i] > maximum ? x[i] : maximum;
    return maximum;
}

void add_logits(const LogitsSource& s, long row, double* out, double* scratch) {
    const float* first = s.row(0, row);
    for (long i = 0; i < s.vocab_size; i++) out[i] = s.weights[0] * first[i];
    for (long m = 1; m < s.num_models; m++) {
        const float* other = s.row(m, row);
        for (long i = 0; i < s.vocab_size; i++) out[i] += s.weights[m] * other[i];
    }
    if (s.plausibility_cutoff > -INFINITY) {
        const double cutoff = max_of(first, s.vocab_size) + s.plausibility_cutoff;
        for (long i = 0; i < s.vocab_size; i++) out[i] = first[i] < cutoff ? -INFINITY : out[i];
    }
    double top_log_prob = softmax(out, s.vocab_size, 1.0, scratch);
    logarithm(&top_log_prob, 1);
    const double log_normalizer = max_of(out, s.vocab_size) - top_log_prob;
    for (long i = 0; i < s.vocab_size; i++) out[i] -= log_normalizer;
}

}  // namespace

void blend_row(const LogitsSource& source, long row, double* out, double* scratch) {
    if (source.form == MIXTURE) return mix_distributions(source, row, out, scratch);
    if (source.form == LINEAR) return add_logits(source, row, out, scratch);
    const AdaptiveParams& params = *(const AdaptiveParams*)source.weights;
    const double divergence =
        kernels().adapt(source.row(0, row), source.row(1, row), params, source.vocab_size, out, scratch);
    if (source.divergences) source.divergences[row] = divergence;
}

// Blend `rows` rows. out: [rows, vocab_size].
API void cospec_blend(const LogitsSource* source, long rows, double* out) {
    in_parallel(threads_for(rows), [&](const Team& team) {
        std::vector<double> scratch(BLEND_SCRATCH_ROWS * source->vocab_size);
        for (long row = team.begin(rows); row < team.end(rows); row++)
            blend_row(*source, row, out + row * source->vocab_size, scratch.data());
    });
}

}  // namespace cospec
