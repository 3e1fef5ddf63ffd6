// Drawing tokens from rows of logits.
#pragma once
#include <stdint.h>

// Key and counter of the generator; word 2 of the counter is the token's position in its sequence.
struct Stream {
    uint64_t key[2], counter[4];
};

// The softmax of one row at a temperature, in double precision; returns its largest entry.
double softmax(const float* logits, long vocab, double temperature, double* out);
double softmax(const double* logits, long vocab, double temperature, double* out);
// The natural logarithm of each, in place; of 0 minus infinity. Not for subnormal numbers.
void logarithm(double* x, long count);
// The first token with the largest weight / exponential; -1 when no weight is positive.
long race(const double* weights, long vocab, const Stream& stream);
// Threads worth using for so many rows.
int team_for(long rows);
