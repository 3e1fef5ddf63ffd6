// Sampling of tokens from rows of logits, by the kernels of this processor.
#pragma once
#include "ops/dispatch.h"

namespace cospec {

inline double softmax(const float* logits, long vocab, double temperature, double* out) {
    return kernels().softmax(logits, vocab, temperature, out);
}
inline double softmax(const double* logits, long vocab, double temperature, double* out) {
    return kernels().softmax64(logits, vocab, temperature, out);
}
inline void logarithm(double* x, long count) { kernels().logarithm(x, count); }
inline long exponential_sample(const double* weights, long vocab, const RandomStream& stream) {
    return kernels().exponential_sample(weights, vocab, stream);
}
// The number of threads that so many rows are worth.
int threads_for(long rows);

}  // namespace cospec
