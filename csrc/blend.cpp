// A mixture of several models' distributions, in double precision.

#include <vector>

#include "draws.h"
#include "ops.h"

namespace {

// Of each row; `models` rows of logits lie at logits[m] + row * vocab.
struct Blend {
    const float* const* logits;
    const double* weights;
    long models, vocab;
    double* out;  // [rows, vocab]
};

// log sum_m weights[m] softmax(logits[m])
void mix(const Blend& b, long row, double* spare) {
    double* out = b.out + row * b.vocab;
    for (long m = 0; m < b.models; m++) {
        softmax(b.logits[m] + row * b.vocab, b.vocab, 1.0, m ? spare : out);
        if (m == 0)
            for (long i = 0; i < b.vocab; i++) out[i] *= b.weights[0];
        else
            for (long i = 0; i < b.vocab; i++) out[i] += b.weights[m] * spare[i];
    }
    logarithm(out, b.vocab);
}

}  // namespace

// logits [models] of [rows, vocab] each, to [rows, vocab]; rows that are no numbers stay so.
API void cospec_mix(const float* const* logits, const double* weights, long models, long rows, long vocab, double* out) {
    const Blend blend = {logits, weights, models, vocab, out};
    in_parallel(team_for(rows), [&](const Team& team) {
        std::vector<double> spare(vocab);
        for (long row = team.begin(rows); row < team.end(rows); row++) mix(blend, row, spare.data());
    });
}
