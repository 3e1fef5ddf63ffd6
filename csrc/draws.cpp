#include "draws.h"

#include <string.h>

#include "ops.h"

int team_for(long rows) { return rows > 1 ? pool_threads() : 1; }

namespace {

// Between two calls from outside the other threads may sleep, and waking them takes as long as some rows.
constexpr long WORTH_WAKING = 12;
int woken_for(long rows) { return rows >= WORTH_WAKING ? pool_threads() : 1; }

}  // namespace

// For each row of logits [rows, vocab] the softmax at its temperature, in double precision.
API void cospec_softmax(const float* logits, long rows, long vocab, const double* temperatures, double* out) {
    in_parallel(woken_for(rows), [&](const Team& team) {
        for (long row = team.begin(rows); row < team.end(rows); row++)
            softmax(logits + row * vocab, vocab, temperatures[row], out + row * vocab);
    });
}

// The same for rows in double precision.
API void cospec_softmax64(const double* logits, long rows, long vocab, const double* temperatures, double* out) {
    in_parallel(woken_for(rows), [&](const Team& team) {
        for (long row = team.begin(rows); row < team.end(rows); row++)
            softmax(logits + row * vocab, vocab, temperatures[row], out + row * vocab);
    });
}

// For each row of weights [rows, vocab] the winner of its race; streams [rows] of key (2 words) and counter (4 words).
API void cospec_race(const double* weights, long rows, long vocab, const uint64_t* streams, int64_t* winners) {
    in_parallel(woken_for(rows), [&](const Team& team) {
        for (long row = team.begin(rows); row < team.end(rows); row++) {
            Stream stream;
            memcpy(&stream, streams + 6 * row, sizeof stream);
            winners[row] = race(weights + row * vocab, vocab, stream);
        }
    });
}
