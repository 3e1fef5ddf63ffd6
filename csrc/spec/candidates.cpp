#include "spec/candidates.h"

#include <math.h>
#include <string.h>

#include "ops/dispatch.h"
#include "ops/ops.h"

namespace cospec {

namespace {

double most_likely(const std::vector<double>& q, int64_t* token) {
    long best = 0;
    for (long i = 1; i < (long)q.size(); i++)
        if (q[i] > q[best]) best = i;
    *token = q[best] > 0.0 ? best : -1;
    return q[best];
}

}  // namespace

void top_candidates(const float* row, double temperature, const RandomStream& stream, double min_second_prob,
    std::vector<double>& q, int64_t* tokens, double* probs) {
    const long vocab_size = (long)q.size();
    tokens[0] = kernels().argmax(row, vocab_size);
    tokens[1] = -1;
    probs[0] = probs[1] = 0.0;
    if (tokens[0] < 0) return;
    softmax(row, vocab_size, temperature > 0.0 ? temperature : 1.0, q.data());
    if (temperature > 0.0) tokens[0] = exponential_sample(q.data(), vocab_size, stream);
    probs[0] = q[tokens[0]];
    q[tokens[0]] = 0.0;
    if (temperature > 0.0) {
        for (double& each : q) each = each < min_second_prob ? 0.0 : each;
        tokens[1] = exponential_sample(q.data(), vocab_size, stream);
        probs[1] = tokens[1] < 0 ? 0.0 : q[tokens[1]];
    } else {
        probs[1] = most_likely(q, &tokens[1]);
    }
}

// Read two candidates from each row of logits [rows, vocab_size]. tokens and probs: [rows, 2].
// At temperature 0 the candidates are the two most likely tokens, with their probabilities at temperature 1.
// Otherwise the first is sampled with the row's stream [rows, 6], and the second among the other tokens with a
// probability of at least `min_second_prob`.
API void cospec_top_candidates(const float* logits, long rows, long vocab_size, const double* temperatures,
    const uint64_t* streams, double min_second_prob, int64_t* tokens, double* probs) {
    in_parallel(threads_for(rows), [&](const Team& team) {
        std::vector<double> q(vocab_size);
        for (long r = team.begin(rows); r < team.end(rows); r++) {
            RandomStream stream;
            memcpy(&stream, streams + 6 * r, sizeof stream);
            top_candidates(
                logits + r * vocab_size, temperatures[r], stream, min_second_prob, q, tokens + 2 * r, probs + 2 * r);
        }
    });
}

// Compute the probability of one token [rows] by each row of logits [rows, vocab_size], at temperature 1.
API void cospec_token_probs(const float* logits, long rows, long vocab_size, const int64_t* tokens, double* probs) {
    in_parallel(threads_for(rows), [&](const Team& team) {
        std::vector<double> q(vocab_size);
        for (long r = team.begin(rows); r < team.end(rows); r++) {
            softmax(logits + r * vocab_size, vocab_size, 1.0, q.data());
            probs[r] = q[tokens[r]];
        }
    });
}

}  // namespace cospec
