// The target's distribution, moved towards the drafter's at tokens that are not key (DSD eq. 7 and 8, corrected).
// cospec.ensemble.blends.adaptive is the same in Python.
#pragma once
#include "ops/sampling_kernel.h"

namespace cospec {

namespace {

template <class T> INLINE T number_at(const double* x) { return read<T>(x); }
template <class T> INLINE T number_at(const float* x) {
    if constexpr (sizeof(T) == sizeof(double))
        return *x;
    else
        return to_double(x);
}
INLINE double choose(bool which, double yes, double no) { return which ? yes : no; }
// A comparison gives a vector of the compiler's own 64-bit type, which on macOS is not `I`.
template <class Mask> INLINE D choose(Mask which, D yes, D no) { return select((I)which, yes, no); }
template <class T> INLINE T magnitude(T x) { return choose(x > -x, x, -x); }

// Call `visit(i, type)` for all of [0, n): for a register of numbers from i on, and for single numbers at the end.
template <class Visit> INLINE void for_numbers(long n, Visit visit) {
    long i = 0;
    for (; i + LANES <= n; i += LANES)
        UNROLL_FOR (int j = 0; j < REGISTERS; j++) visit(i + j * WIDE, D{});
    for (; i < n; i++) visit(i, 0.0);
}

template <class Term> INLINE double sum_of(long n, Term term) {
    D part[REGISTERS] = {};
    long i = 0;
    for (; i + LANES <= n; i += LANES)
        UNROLL_FOR (int j = 0; j < REGISTERS; j++) part[j] += term(i + j * WIDE, D{});
    double sum = total(part);
    for (; i < n; i++) sum += term(i, 0.0);
    return sum;
}

static double log_of(double x) { return logarithm(&x, 1), x; }

// One model's distribution. log p(x) = logits[x] - log_normalizer.
struct ModelRow {
    const float* logits;
    double* probs;
    double log_normalizer;
    bool valid;

    ModelRow(const float* logits, long vocab, double* probs)
        : logits(logits),
          probs(probs) {
        const double top_prob = softmax(logits, vocab, 1.0, probs);
        valid = top_prob > 0.0;
        log_normalizer = max_of(logits, vocab) - log_of(top_prob);
    }

    double entropy(long vocab) const {
        return log_normalizer - sum_of(vocab, [&](long i, auto type) {
            typedef decltype(type) T;
            const T p = number_at<T>(probs + i);
            return choose(p > T{}, p * number_at<T>(logits + i), T{});
        });
    }
};

// Half of sum |scale p - q|.
static double total_variation(const double* p, double scale, const double* q, long vocab) {
    return 0.5 * sum_of(vocab, [&](long i, auto type) {
        typedef decltype(type) T;
        return magnitude(scale * number_at<T>(p + i) - number_at<T>(q + i));
    });
}

static bool all_key(const AdaptiveParams& params, const ModelRow& target, const ModelRow& drafter, long vocab) {
    const double overlap = sum_of(vocab, [&](long i, auto type) {
        typedef decltype(type) T;
        const T t = number_at<T>(target.probs + i), d = number_at<T>(drafter.probs + i);
        return choose(t < d, t, d);
    });
    return overlap < params.lambda3 || drafter.entropy(vocab) > params.lambda1 * target.entropy(vocab);
}

// out: log P_d - log P_t, 0 for key tokens. moved: P_d, P_t for key tokens: the blend at exponent 1 before its division
// by the returned sum.
static double compute_tilt(const AdaptiveParams& params, const ModelRow& target, const ModelRow& drafter, long vocab,
    double* out, double* moved) {
    const double shift = target.log_normalizer - drafter.log_normalizer;
    return sum_of(vocab, [&](long i, auto type) {
        typedef decltype(type) T;
        const T t = number_at<T>(target.probs + i), d = number_at<T>(drafter.probs + i);
        const T own = number_at<T>(target.logits + i);
        const auto key = (magnitude(t - d) > T{} + params.lambda2) | (own == T{} - INFINITY);
        const T kept = choose(key, t, d);
        write(out + i, choose(key, T{}, number_at<T>(drafter.logits + i) - own + shift));
        write(moved + i, kept);
        return kept;
    });
}

// Write log-probabilities, [vocab]; all NaN where a row holds NaN. Returns the total variation from the target.
static double adapt(const float* target_logits, const float* drafter_logits, const AdaptiveParams& params, long vocab,
    double* out, double* scratch) {
    const ModelRow target(target_logits, vocab, scratch), drafter(drafter_logits, vocab, scratch + vocab);
    if (!target.valid || !drafter.valid) {
        for (long i = 0; i < vocab; i++) out[i] = NAN;
        return 0.0;
    }
    double divergence = 0.0, exponent = 0.0, log_sum = 0.0;
    double *tilt = out, *moved = scratch + 2 * vocab;
    if (!all_key(params, target, drafter, vocab)) {
        const double sum = compute_tilt(params, target, drafter, vocab, tilt, moved);
        exponent = 1.0, log_sum = log_of(sum);
        divergence = total_variation(moved, 1.0 / sum, target.probs, vocab);
        double *row = drafter.probs, *probs = moved;  // neither is read again
        for (long step = 1; divergence > params.max_divergence; step++) {
            exponent *= params.shortfall * params.max_divergence / divergence;
            if (step >= params.search_steps) {
                exponent = divergence = log_sum = 0.0;
                break;
            }
            for_numbers(vocab, [&](long i, auto type) {
                typedef decltype(type) T;
                write(row + i,
                    number_at<T>(target.logits + i) - target.log_normalizer + exponent * number_at<T>(tilt + i));
            });
            log_sum = max_of(row, vocab) - log_of(softmax(row, vocab, 1.0, probs));
            divergence = total_variation(probs, 1.0, target.probs, vocab);
        }
    }
    const double log_normalizer = target.log_normalizer + log_sum;
    for_numbers(vocab, [&](long i, auto type) {
        typedef decltype(type) T;
        const T moves = exponent > 0.0 ? exponent * number_at<T>(tilt + i) : T{};
        write(out + i, number_at<T>(target.logits + i) - log_normalizer + moves);
    });
    return divergence;
}

}  // namespace

}  // namespace cospec
