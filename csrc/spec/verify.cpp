// Target distributions and acceptance methods: cospec.core.sampling and cospec.acceptance as one call for all requests
// of a step.
#include "spec/verify.h"

#include <math.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "ops/sampling.h"

namespace cospec {

namespace {

enum AcceptanceMethod { MATCH = 0, REJECTION = 1, BLOCK = 2 };

struct Draft {
    const int64_t *tokens, *parents;
    int64_t* path;
};

void normalize(double* probs, long vocab_size) {
    double sum = 0.0;
    for (long i = 0; i < vocab_size; i++) sum += probs[i];
    for (long i = 0; i < vocab_size; i++) probs[i] /= sum;
}

void drop_below(double* probs, long vocab_size, double min_prob) {
    for (long i = 0; i < vocab_size; i++) probs[i] = probs[i] < min_prob ? 0.0 : probs[i];
    normalize(probs, vocab_size);
}

// Equal probabilities are kept or dropped together, so the order of ties does not matter.
void truncate(const SamplingShape& sampling, long vocab_size, double* probs) {
    std::vector<double> heap;
    auto build_heap = [&] { heap.assign(probs, probs + vocab_size), std::make_heap(heap.begin(), heap.end()); };
    auto pop_largest = [&] {
        std::pop_heap(heap.begin(), heap.end());
        const double value = heap.back();
        return heap.pop_back(), value;
    };
    if (sampling.top_k > 0 && sampling.top_k < vocab_size) {
        build_heap();
        double min_prob = 0.0;
        for (long i = 0; i < sampling.top_k; i++) min_prob = pop_largest();
        drop_below(probs, vocab_size, min_prob);
    }
    if (sampling.top_p < 1.0) {
        build_heap();
        double min_prob = pop_largest();
        for (double sum = min_prob; sum < sampling.top_p && !heap.empty(); sum += min_prob) min_prob = pop_largest();
        drop_below(probs, vocab_size, min_prob);
    }
    if (sampling.min_p > 0.0)
        drop_below(probs, vocab_size, sampling.min_p * *std::max_element(probs, probs + vocab_size));
}

// The first index of the largest value. -1 where a value is NaN or the largest is infinite.
long argmax(const float* x, long count) { return kernels().argmax(x, count); }
long argmax(const double* x, long count) {
    long best = 0;
    bool has_nan = false;
    for (long i = 0; i < count; i++) {
        has_nan |= x[i] != x[i];
        if (x[i] > x[best]) best = i;
    }
    return has_nan || isinf(x[best]) ? -1 : best;
}

// Compute the target distribution of one row, [vocab_size].
// Returns false and a uniform distribution where the row holds NaN.
template <class T>
bool target_distribution(const T* logits, long vocab_size, const SamplingShape& sampling, double* out) {
    if (sampling.temperature > 0.0) {
        const double top_prob = softmax(logits, vocab_size, sampling.temperature, out);
        if (top_prob > 0.0) {
            truncate(sampling, vocab_size, out);
            return true;
        }
    } else {
        const long token = argmax(logits, vocab_size);
        if (token >= 0) {
            memset(out, 0, sizeof(double) * vocab_size);
            out[token] = 1.0;
            return true;
        }
    }
    std::fill(out, out + vocab_size, 1.0 / vocab_size);
    return false;
}

// Exclude the tokens whose bit is not set. `out` may be `logits`.
template <class T> void apply_mask(const uint32_t* mask, const T* logits, long vocab_size, T* out) {
    for (long i = 0; i < vocab_size; i++) out[i] = mask[i / 32] >> (i % 32) & 1 ? logits[i] : (T)-INFINITY;
}

struct Verifier {
    const LogitsSource& source;
    long vocab_size;
    const VerifyTask& task;
    const Draft& draft;
    double* target_probs;  // [num_nodes + 1, vocab_size]; rows are computed on first use
    double* scratch;       // [BLEND_SCRATCH_ROWS, vocab_size]
    double* row_logits;    // [vocab_size], the blended or masked logits of the latest row
    std::vector<bool> valid_rows;
    bool sample_failed = false;  // no weight was positive

    double* target_row(long row) const { return target_probs + row * vocab_size; }

    // Call `use` with the row's logits, counted from the task's first row. Blended logits are double precision.
    template <class Use> auto with_logits(long row, Use use) const {
        const uint32_t* mask = task.masks && row >= 0 ? task.masks + row * ((vocab_size + 31) / 32) : nullptr;
        if (source.form == SINGLE) {
            const float* logits = source.row(0, task.first_row + row);
            if (!mask) return use(logits);
            apply_mask(mask, logits, vocab_size, (float*)row_logits);
            return use((const float*)row_logits);
        }
        blend_row(source, task.first_row + row, row_logits, scratch);
        if (mask) apply_mask(mask, row_logits, vocab_size, row_logits);
        return use((const double*)row_logits);
    }

    const double* compute_target(long row) {
        valid_rows[row] = with_logits(row, [&](auto* logits) {
            return target_distribution(logits, vocab_size, task.params.sampling, target_row(row));
        });
        return target_row(row);
    }

    long argmax_token(long row) const {
        return with_logits(row, [&](auto* logits) { return argmax(logits, vocab_size); });
    }

    long sample(const double* weights, uint64_t position, StreamKind kind) {
        // A target stream does not depend on the step, so that drafts do not change the target's samples.
        const uint64_t base_len = kind == TARGET ? 0 : task.base_len;
        const long token =
            exponential_sample(weights, vocab_size, {{task.params.seed, kind}, {0, 0, position, base_len}});
        sample_failed |= token < 0;
        return token;
    }

    // The target's own token after `num_accepted` nodes. -1 where the task has no such row.
    long target_token(long row, long num_accepted) {
        if (row >= task.num_rows) return -1;
        if (task.params.sampling.temperature > 0.0)
            return sample(compute_target(row), task.base_len + num_accepted, TARGET);
        const long token = argmax_token(row);
        valid_rows[row] = token >= 0;
        return token < 0 ? 0 : token;
    }

    double uniform(long node) const {
        return kernels().uniform({{task.params.seed, ACCEPT}, {task.base_len, 0, 0, task.base_len}}, node);
    }

    double draft_prob(long node) const { return task.q ? task.q[node * vocab_size + draft.tokens[node]] : 1.0; }

    // Write the residual distribution max(0, scale p - q) at a node to `scratch`; returns its sum.
    double residual(long node, double scale) const {
        if (task.q) return kernels().residual(target_row(node), task.q + node * vocab_size, scale, vocab_size, scratch);
        std::fill(scratch, scratch + vocab_size, 0.0);
        scratch[draft.tokens[node]] = 1.0;
        return kernels().residual(target_row(node), scratch, scale, vocab_size, scratch);
    }

    // Where rounding leaves an empty residual, sample from the target distribution.
    long sample_residual(long node, double scale) {
        const double mass = residual(node, scale);
        return sample(mass > 0.0 ? scratch : target_row(node), task.base_len + node, RECOVER);
    }

    VerifyResult accept_prefix(long num_accepted, long token, bool bonus) const {
        for (long node = 0; node < num_accepted; node++) draft.path[node] = node;
        return {num_accepted, token, bonus};
    }

    VerifyResult match() {
        for (long node = -1, length = 0;; length++) {
            const long token = target_token(node + 1, length);
            long accepted_child = -1;
            bool has_child = false;
            for (long child = node + 1; child < task.num_nodes && accepted_child < 0; child++)
                if (draft.parents[child] == node) {
                    has_child = true;
                    if (draft.tokens[child] == token) accepted_child = child;
                }
            if (accepted_child < 0) return {length, token, !has_child && task.num_nodes > 0};
            draft.path[length] = node = accepted_child;
        }
    }

    VerifyResult rejection() {
        for (long node = 0; node < task.num_nodes; node++)
            if (!(uniform(node) * draft_prob(node) < compute_target(node)[draft.tokens[node]]))
                return accept_prefix(node, sample_residual(node, 1.0), false);
        return accept_prefix(task.num_nodes, target_token(task.num_nodes, task.num_nodes), true);
    }

    VerifyResult block() {
        double weight = 1.0, accepted_weight = 1.0;
        long num_accepted = 0;
        compute_target(0);
        for (long length = 1; length <= task.num_nodes; length++) {
            const long node = length - 1;
            weight = std::min(1.0, weight * target_row(node)[draft.tokens[node]] / draft_prob(node));
            if (weight == 0.0) break;  // no longer prefix can be accepted
            double accept_prob = weight;
            if (length < task.num_nodes) {
                compute_target(length);
                const double mass = residual(length, weight);
                accept_prob = mass > 0.0 ? mass / (mass + (1.0 - weight)) : 0.0;
            }
            if (uniform(node) < accept_prob) num_accepted = length, accepted_weight = weight;
        }
        if (num_accepted == task.num_nodes)
            return accept_prefix(num_accepted, target_token(num_accepted, num_accepted), true);
        return accept_prefix(num_accepted, sample_residual(num_accepted, accepted_weight), false);
    }

    VerifyResult verify() {
        valid_rows.assign(task.num_rows + 1, true);
        VerifyResult result = {0, -1, 0, 0};
        if (task.num_rows > 0)
            result = task.num_nodes == 0 || task.params.method == MATCH ? match()
                     : task.params.method == REJECTION                  ? rejection()
                                                                        : block();
        result.invalid = sample_failed || !valid_rows[0];
        for (long i = 0; i < result.num_accepted; i++)
            result.invalid |= draft.path[i] + 1 < task.num_rows && !valid_rows[draft.path[i] + 1];
        return result;
    }
};

// Estimate the cost of a task in comparisons of one logit.
long cost(const VerifyTask& task, const LogitsSource& source) {
    const long blend_cost = source.form == SINGLE ? 0 : (source.form == ADAPTIVE ? 30 : 6) * source.num_models;
    return task.num_rows * source.vocab_size * (blend_cost + (task.params.sampling.temperature > 0.0 ? 20 : 1));
}

constexpr long MIN_COST_TO_SHARE = 250000;  // some fifty microseconds
constexpr long MIN_COST_TO_WAKE = 1000000;  // waking threads takes as long as this cost takes on one thread

}  // namespace

API void cospec_verify(
    const LogitsSource* source, const VerifyTask* tasks, long count, const int64_t* nodes, int64_t* results) {
    VerifyResult* verified = (VerifyResult*)results;
    int64_t* paths = results + count * sizeof(VerifyResult) / sizeof(int64_t);
    const long vocab_size = source->vocab_size;
    std::atomic<long> next{0};
    long total_cost = 0;
    for (long i = 0; i < count; i++) total_cost += cost(tasks[i], *source);
    const long min_cost = workers_awake() ? MIN_COST_TO_SHARE : MIN_COST_TO_WAKE;
    in_parallel(total_cost < min_cost ? 1 : threads_for(count), [&](const Team&) {
        for (long i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
            const VerifyTask& task = tasks[i];
            const int64_t* tokens = nodes + task.node_offset;
            const Draft draft = {tokens, tokens + task.num_nodes, paths + task.node_offset};
            double* buffer =
                (double*)thread_scratch().reserve(2 * (task.num_nodes + 2 + BLEND_SCRATCH_ROWS) * vocab_size);
            double* row_logits = buffer + BLEND_SCRATCH_ROWS * vocab_size;
            Verifier verifier{*source, vocab_size, task, draft, row_logits + vocab_size, buffer, row_logits, {}};
            verified[i] = verifier.verify();
            for (long row = task.check_row; row < task.first_row; row++)
                verified[i].invalid |= verifier.argmax_token(row - task.first_row) < 0;
        }
    });
}

}  // namespace cospec
