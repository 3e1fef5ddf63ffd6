// What a drafter says at a position, from rows of logits: its token, the next best one, and how sure it is of either.
#include "guesses.h"

#include <math.h>
#include <string.h>

#include "dispatch.h"
#include "ops.h"

namespace {

constexpr double LEAST = 1e-3;  // a less likely token is not worth a place as next best

double likeliest(const std::vector<double>& q, int64_t* token) {
    long best = 0;
    for (long i = 1; i < (long)q.size(); i++)
        if (q[i] > q[best]) best = i;
    *token = q[best] > 0.0 ? best : -1;
    return q[best];
}

}  // namespace

void guess(const float* row, double temperature, const Stream& stream, std::vector<double>& q, int64_t* tokens,
           double* chances) {
    const long vocab = (long)q.size();
    tokens[0] = kernels().argmax(row, vocab);
    tokens[1] = -1;
    chances[0] = chances[1] = 0.0;
    if (tokens[0] < 0) return;
    softmax(row, vocab, temperature > 0.0 ? temperature : 1.0, q.data());
    if (temperature > 0.0) tokens[0] = race(q.data(), vocab, stream);
    chances[0] = q[tokens[0]];
    q[tokens[0]] = 0.0;
    if (temperature > 0.0) {
        for (double& each : q) each = each < LEAST ? 0.0 : each;
        tokens[1] = race(q.data(), vocab, stream);
        chances[1] = tokens[1] < 0 ? 0.0 : q[tokens[1]];
    } else {
        chances[1] = likeliest(q, &tokens[1]);
    }
}

// For each row of logits [rows, vocab] two tokens and their probabilities, [rows, 2]: the likeliest ones, with their
// probabilities at temperature 1, where the temperature [rows] is 0; otherwise the winner of the race with the row's
// stream [rows, 6] and who wins it among the others.
API void cospec_guesses(const float* logits, long rows, long vocab, const double* temperatures, const uint64_t* streams,
                        int64_t* tokens, double* chances) {
    in_parallel(team_for(rows), [&](const Team& team) {
        std::vector<double> q(vocab);
        for (long r = team.begin(rows); r < team.end(rows); r++) {
            Stream stream;
            memcpy(&stream, streams + 6 * r, sizeof stream);
            guess(logits + r * vocab, temperatures[r], stream, q, tokens + 2 * r, chances + 2 * r);
        }
    });
}

// The probability of one token [rows] behind each row of logits [rows, vocab], at temperature 1.
API void cospec_chances(const float* logits, long rows, long vocab, const int64_t* tokens, double* chances) {
    in_parallel(team_for(rows), [&](const Team& team) {
        std::vector<double> q(vocab);
        for (long r = team.begin(rows); r < team.end(rows); r++) {
            softmax(logits + r * vocab, vocab, 1.0, q.data());
            chances[r] = q[tokens[r]];
        }
    });
}
