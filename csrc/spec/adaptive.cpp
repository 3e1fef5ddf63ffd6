// The target's distribution, moved towards the drafter's at tokens that are not key (DSD eq. 7 and 8, corrected).
// cospec.ensemble.blends.adaptive is the same in Python.
#include <math.h>

#include <algorithm>

#include "ops/sampling.h"
#include "spec/blend.h"

namespace cospec {

namespace {

// One model's distribution. log p(x) = logits[x] - log_normalizer.
struct Distribution {
    const float* logits;
    double* probs;
    double log_normalizer;
    bool valid;

    Distribution(const float* logits, long vocab_size, double* probs)
        : logits(logits),
          probs(probs) {
        double log_top = softmax(logits, vocab_size, 1.0, probs);
        valid = log_top > 0.0;
        logarithm(&log_top, 1);
        log_normalizer = *std::max_element(logits, logits + vocab_size) - log_top;
    }

    double entropy(long vocab_size) const {
        double mean_logit = 0.0;
        for (long i = 0; i < vocab_size; i++) mean_logit += probs[i] > 0.0 ? probs[i] * logits[i] : 0.0;
        return log_normalizer - mean_logit;
    }
};

// Half of sum |p - q|.
double total_variation(const double* p, const double* q, long count) {
    double sum = 0.0;
    for (long i = 0; i < count; i++) sum += fabs(p[i] - q[i]);
    return sum / 2.0;
}

// Replace the drafter's probabilities by log P_d - log P_t, 0 for key tokens.
void compute_tilt(const AdaptiveParams& params, const Distribution& target, const Distribution& drafter, long count) {
    double overlap = 0.0;
    for (long i = 0; i < count; i++) overlap += std::min(target.probs[i], drafter.probs[i]);
    const bool all_key = overlap < params.lambda3 || drafter.entropy(count) > params.lambda1 * target.entropy(count);
    const double shift = target.log_normalizer - drafter.log_normalizer;
    for (long i = 0; i < count; i++) {
        const bool key =
            all_key || target.logits[i] == -INFINITY || fabs(target.probs[i] - drafter.probs[i]) > params.lambda2;
        drafter.probs[i] = key ? 0.0 : (double)drafter.logits[i] - target.logits[i] + shift;
    }
}

}  // namespace

void adapt_row(const LogitsSource& source, long row, double* out, double* scratch) {
    const AdaptiveParams& params = *(const AdaptiveParams*)source.weights;
    const long count = source.vocab_size;
    const Distribution target(source.row(0, row), count, scratch), drafter(source.row(1, row), count, scratch + count);
    if (!target.valid || !drafter.valid) {
        std::fill(out, out + count, NAN);
        return;
    }
    compute_tilt(params, target, drafter, count);
    const double* tilt = drafter.probs;
    double *probs = scratch + 2 * count, exponent = 1.0, divergence = 0.0;
    for (long step = 0;; step++) {
        if (step >= params.search_steps) exponent = 0.0;
        for (long i = 0; i < count; i++)
            out[i] = target.logits[i] - target.log_normalizer + (exponent > 0.0 ? exponent * tilt[i] : 0.0);
        if (exponent == 0.0) break;
        double log_top = softmax(out, count, 1.0, probs);
        const double distance = total_variation(target.probs, probs, count);
        if (distance <= params.max_divergence) {
            divergence = distance;
            logarithm(&log_top, 1);
            const double log_normalizer = *std::max_element(out, out + count) - log_top;
            for (long i = 0; i < count; i++) out[i] -= log_normalizer;
            break;
        }
        exponent *= params.shortfall * params.max_divergence / distance;
    }
    if (source.divergences) source.divergences[row] = divergence;
}

}  // namespace cospec
