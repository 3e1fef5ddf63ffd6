// Drawing tokens from rows of logits, by the kernels of this processor.
#pragma once
#include "dispatch.h"

inline double softmax(const float* logits, long vocab, double temperature, double* out) {
    return kernels().softmax(logits, vocab, temperature, out);
}
inline double softmax(const double* logits, long vocab, double temperature, double* out) {
    return kernels().softmax64(logits, vocab, temperature, out);
}
inline void logarithm(double* x, long count) { kernels().logarithm(x, count); }
inline long race(const double* weights, long vocab, const Stream& stream) {
    return kernels().race(weights, vocab, stream);
}
// Threads worth using for so many rows.
int team_for(long rows);
