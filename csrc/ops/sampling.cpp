#include "ops/sampling.h"

#include <string.h>

#include "ops/ops.h"

namespace cospec {

int threads_for(long rows) { return rows > 1 ? num_threads() : 1; }

namespace {

// Workers may sleep between two calls from outside, and waking them takes as long as some rows.
constexpr long MIN_ROWS_TO_WAKE = 12;
int threads_for_call(long rows) { return rows >= MIN_ROWS_TO_WAKE ? num_threads() : 1; }

}  // namespace

// Compute the softmax of each row of logits [rows, vocab] at its temperature, in double precision.
API void cospec_softmax(const float* logits, long rows, long vocab, const double* temperatures, double* out) {
    in_parallel(threads_for_call(rows), [&](const Team& team) {
        for (long row = team.begin(rows); row < team.end(rows); row++)
            softmax(logits + row * vocab, vocab, temperatures[row], out + row * vocab);
    });
}

// The same for rows in double precision.
API void cospec_softmax64(const double* logits, long rows, long vocab, const double* temperatures, double* out) {
    in_parallel(threads_for_call(rows), [&](const Team& team) {
        for (long row = team.begin(rows); row < team.end(rows); row++)
            softmax(logits + row * vocab, vocab, temperatures[row], out + row * vocab);
    });
}

// Sample a token from each row of weights [rows, vocab]. streams [rows]: key (2 words) and counter (4 words).
API void cospec_exponential_sample(
    const double* weights, long rows, long vocab, const uint64_t* streams, int64_t* tokens) {
    in_parallel(threads_for_call(rows), [&](const Team& team) {
        for (long row = team.begin(rows); row < team.end(rows); row++) {
            RandomStream stream;
            memcpy(&stream, streams + 6 * row, sizeof stream);
            tokens[row] = exponential_sample(weights + row * vocab, vocab, stream);
        }
    });
}

}  // namespace cospec
