// Combiners of lockstep drafters: fuse builds a tree around a main path, mix samples from a mixture of distributions.
#include <string.h>

#include "spec/candidates.h"
#include "spec/pool_batch.h"

namespace cospec {

namespace {

// One drafter's candidate at a position. `node` belongs to the drafter's complete draft; -1 for a lockstep drafter.
struct Candidate {
    long drafter;
    int64_t token;
    double raw_confidence, confidence;
    long node;
};

// drafters/pool/combiners/fuse.py, from the first step to the latest one. The tree is written when the main path ends.
struct FuseCombiner {
    static constexpr long DIVERGED = -2;  // the drafter's complete draft left the main path

    const RequestView& request;
    TreeBuilder tree = {};
    std::vector<Candidate> branches = {};
    std::vector<long> branch_leaves = {}, draft_nodes = std::vector<long>(request.num_drafters, -1);
    long node = -1, length = 0;
    double path_prob = 1.0;

    std::vector<Candidate> candidates_at(long step) const {
        const PoolBatch& b = request.b;
        std::vector<Candidate> found;
        for (long m = 0; m < request.num_drafters; m++) {
            const long at = 2 * request.offset(step, m);
            const double prob = b.candidate_probs[at];
            if (b.candidates[at] >= 0) found.push_back({m, b.candidates[at], prob, request.calibrated(m, prob), -1});
        }
        for (long m = 0; m < request.num_drafters; m++)
            for (long i = 0; draft_nodes[m] > DIVERGED && i < request.draft_nodes(m); i++) {
                const long at = request.draft_begin(m) + i;
                const double raw = b.raw_confidence[at];
                if (b.parents[at] == draft_nodes[m])
                    found.push_back({m, b.tokens[at], raw, request.calibrated(m, raw), i});
            }
        return found;
    }
    // Extend the main path by one token. Returns whether the main path goes on.
    bool extend(long step) {
        const PoolBatch& b = request.b;
        const std::vector<Candidate> candidates = candidates_at(step);
        if (candidates.empty()) return false;
        const Candidate* best = &candidates[0];
        for (const Candidate& other : candidates)
            if (other.confidence > best->confidence ||
                (other.confidence == best->confidence && request.weight(other.drafter) > request.weight(best->drafter)))
                best = &other;
        if (path_prob * best->confidence < request.task.threshold) return false;
        const long parent = node;
        const double parent_prob = path_prob;
        node = tree.add_node(parent, best->token, best->drafter, parent_prob * best->confidence, best->confidence);
        for (const Candidate& candidate : candidates)
            if (candidate.token != best->token) {
                const double confidence = std::min(candidate.confidence, 1.0 - best->confidence);
                const long leaf =
                    tree.add_node(parent, candidate.token, candidate.drafter, parent_prob * confidence, confidence);
                if (candidate.node >= 0) branches.push_back(candidate), branch_leaves.push_back(leaf);
            }
        const long second = 2 * request.offset(step, best->drafter) + 1;
        if (best->node < 0 && b.candidates[second] >= 0) {
            const double prob = b.candidate_probs[second];
            const double confidence = std::min(request.calibrated(best->drafter, prob, 1), 1.0 - best->confidence);
            tree.add_node(parent, b.candidates[second], best->drafter, parent_prob * confidence, confidence);
        }
        b.main_path[request.index * b.max_depth + length++] = best->token;
        path_prob *= best->confidence;
        follow_drafts(candidates, best->token);
        return length < std::min(request.task.depth, request.task.max_nodes) &&
               tree.rank_of(node) < request.task.max_nodes;
    }
    void follow_drafts(const std::vector<Candidate>& candidates, int64_t token) {
        draft_nodes.assign(request.num_drafters, DIVERGED);
        for (const Candidate& candidate : candidates)
            if (candidate.node >= 0 && candidate.token == token && draft_nodes[candidate.drafter] == DIVERGED)
                draft_nodes[candidate.drafter] = candidate.node;
    }
    // Add the rest of the complete drafts that branch off.
    void finish() {
        const PoolBatch& b = request.b;
        for (size_t i = 0; i < branches.size(); i++) {
            const long m = branches[i].drafter, begin = request.draft_begin(m);
            std::vector<long> node_of(request.draft_nodes(m), -1);
            node_of[branches[i].node] = branch_leaves[i];
            for (long n = branches[i].node + 1; n < request.draft_nodes(m); n++) {
                const long draft_parent = b.parents[begin + n], parent = draft_parent < 0 ? -1 : node_of[draft_parent];
                if (parent < 0) continue;
                const double confidence = request.calibrated(m, b.raw_confidence[begin + n]);
                const double score = tree.scores[parent] * confidence;
                node_of[n] = tree.add_node(parent, b.tokens[begin + n], m, score, confidence);
            }
        }
        tree.write(b, request.index, request.task.max_nodes);
    }
};

void fuse(const RequestView& request) {
    const PoolBatch& b = request.b;
    FuseCombiner combiner{request};
    bool active = b.active[request.index];
    // Replaying all steps costs less than a tree that is kept between calls.
    for (long step = 0; step < b.steps; step++)
        if (!combiner.extend(step)) {
            active = false;
            break;
        }
    b.path_len[request.index] = combiner.length;
    b.active[request.index] = active;
    if (!active) combiner.finish();
}

// drafters/pool/combiners/mix.py at the current step. A complete draft contributes while the main path agrees with it.
struct MixCombiner {
    const RequestView& request;
    const long step;

    // The token of a complete draft at this step, -1 for none.
    int64_t draft_token(long drafter) const {
        const PoolBatch& b = request.b;
        const int64_t *draft = b.tokens + request.draft_begin(drafter),
                      *path = b.main_path + request.index * b.max_depth;
        return step < request.draft_nodes(drafter) && std::equal(path, path + step, draft) ? draft[step] : -1;
    }
    const double* q(long drafter) const { return request.b.q[request.offset(step, drafter)]; }
    int64_t candidate(long drafter) const { return request.b.candidates[2 * request.offset(step, drafter)]; }
    bool in_lockstep(long drafter) const { return q(drafter) || candidate(drafter) >= 0; }
    int64_t token(long drafter) const { return in_lockstep(drafter) ? candidate(drafter) : draft_token(drafter); }
    double* mix_weights() const {
        return request.b.mix_weights + (request.index * request.b.max_depth + step) * request.num_drafters;
    }
    // Drafters that contribute at this step. Lockstep drafters come first, as in drafters/pool/lockstep.py.
    std::vector<long> contributors() const {
        std::vector<long> found;
        for (long m = 0; m < request.num_drafters; m++)
            if (in_lockstep(m)) found.push_back(m);
        for (long m = 0; m < request.num_drafters; m++)
            if (draft_token(m) >= 0) found.push_back(m);
        return found;
    }
    // Compute the mixture [vocab_size], its weights and its confidence. A path below the threshold ends.
    void mix(long vocab_size, double* mixture) const {
        const PoolBatch& b = request.b;
        const std::vector<long> drafters = contributors();
        if (drafters.empty()) {
            b.active[request.index] = 0;
            return;
        }
        std::vector<double> confidences;
        double total = 0.0, confidence = 0.0, *weights = mix_weights();
        std::fill(weights, weights + request.num_drafters, 0.0);
        for (long m : drafters) {
            const double raw = in_lockstep(m) ? b.candidate_probs[2 * request.offset(step, m)]
                                              : b.raw_confidence[request.draft_begin(m) + step];
            confidences.push_back(request.calibrated(m, raw));
            weights[m] = request.weight(m) * confidences.back();
            total += weights[m];
        }
        for (long m : drafters) weights[m] /= total;
        for (size_t i = 0; i < drafters.size(); i++) confidence += weights[drafters[i]] * confidences[i];
        double path_prob = 1.0;
        for (long i = 0; i < step; i++) path_prob *= b.out_confidence[request.index * b.tree_capacity + i];
        b.out_confidence[request.index * b.tree_capacity + step] = confidence;
        if (path_prob * confidence < request.task.threshold)
            b.active[request.index] = 0;
        else if (request.task.greedy)
            append_token(majority_token(drafters), drafters);
        else
            mix_distributions(drafters, vocab_size, mixture);
    }
    // The point mass with the most weight; the smallest token on ties.
    int64_t majority_token(const std::vector<long>& drafters) const {
        int64_t best = -1;
        double max_votes = -1.0;
        for (long m : drafters) {
            double votes = 0.0;
            for (long other : drafters)
                if (token(other) == token(m)) votes += mix_weights()[other];
            if (votes > max_votes || (votes == max_votes && token(m) < best)) max_votes = votes, best = token(m);
        }
        return best;
    }
    // Distributions come before point masses, see `contributors`.
    void mix_distributions(const std::vector<long>& drafters, long vocab_size, double* mixture) const {
        std::vector<const double*> distributions;
        std::vector<double> weights;
        for (long m : drafters)
            if (q(m)) distributions.push_back(q(m)), weights.push_back(mix_weights()[m]);
        kernels().weighted_sum(distributions.data(), weights.data(), distributions.size(), vocab_size, mixture);
        for (long m : drafters)
            if (!q(m)) mixture[draft_token(m)] += mix_weights()[m];
    }
    // Append a token to the main path. Its owner is the drafter with the largest part in the token's probability.
    void append_token(int64_t chosen, const std::vector<long>& drafters) const {
        const PoolBatch& b = request.b;
        long owner = -1;
        double max_part = -1.0;
        for (long m : drafters) {
            const double part = mix_weights()[m] * (q(m) ? q(m)[chosen] : token(m) == chosen ? 1.0 : 0.0);
            if (part > max_part) max_part = part, owner = m;
        }
        const long out = request.index * b.tree_capacity + step;
        b.main_path[request.index * b.max_depth + step] = chosen;
        b.out_tokens[out] = chosen, b.out_parents[out] = step - 1, b.out_owners[out] = owner;
        b.num_nodes[request.index] = b.path_len[request.index] = step + 1;
        b.active[request.index] = step + 1 < std::min(request.task.depth, request.task.max_nodes);
    }
};

// Call read(offset into [D, M, R], request, logits, row number, scratch [vocab_size]) for all rows of all drafters.
template <class F>
void for_each_row(const PoolBatch& b, const DrafterLogits* logits, long count, const int64_t* requests, F&& read) {
    struct Row {
        int64_t drafter;
        const float* logits;
        int64_t vocab_size;
    };
    std::vector<Row> rows;
    for (long n = 0; n < count; n++)
        for (long i = 0; i < logits[n].num_rows; i++)
            rows.push_back({logits[n].drafter, logits[n].logits + i * logits[n].vocab_size, logits[n].vocab_size});
    const long num_rows = rows.size();
    in_parallel(threads_for(num_rows), [&](const Team& team) {
        std::vector<double> scratch;
        for (long i = team.begin(num_rows); i < team.end(num_rows); i++) {
            const RequestView request = {b, requests[i]};
            scratch.resize(rows[i].vocab_size);
            read(request.offset(b.steps, rows[i].drafter), request, rows[i].logits, i, scratch);
        }
    });
}

// A request's mixture at the current step. Only the first `kept_steps` steps have room of their own.
double* mixture_row(const RequestView& request, double* mixtures, long vocab_size, long kept_steps) {
    const long step = std::min((long)request.b.steps, kept_steps - 1);
    return mixtures ? mixtures + (request.index * kept_steps + step) * vocab_size : nullptr;
}

}  // namespace

void pool_read_candidates(const PoolBatch& b, const DrafterLogits* logits, long count, const int64_t* requests) {
    auto read = [&](long offset, const RequestView& request, const float* row, long, std::vector<double>& scratch) {
        top_candidates(row, request.task.temperature, request.stream(b.steps), b.min_second_prob, scratch,
            b.candidates + 2 * offset, b.candidate_probs + 2 * offset);
    };
    for_each_row(b, logits, count, requests, read);
}

void pool_read_distributions(
    const PoolBatch& b, const DrafterLogits* logits, long count, const int64_t* requests, double* q) {
    auto read = [&](long offset, const RequestView& request, const float* row, long n, std::vector<double>& scratch) {
        const long vocab_size = scratch.size(), best = kernels().argmax(row, vocab_size);
        if (best < 0) return;
        const PoolRequest& task = request.task;
        double* probs = task.greedy ? scratch.data() : q + n * vocab_size;
        b.candidate_probs[2 * offset] = softmax(row, vocab_size, task.greedy ? 1.0 : task.temperature, probs);
        if (task.greedy)
            b.candidates[2 * offset] = best;
        else if (task.shares_stream)
            b.candidates[2 * offset] = exponential_sample(probs, vocab_size, request.stream(b.steps));
        if (!task.greedy) b.q[offset] = probs;
    };
    for_each_row(b, logits, count, requests, read);
}

void pool_fuse(const PoolBatch& b) {
    for (long r = 0; r < b.num_requests; r++)
        if (b.active[r]) fuse({b, r});
}

void pool_mix(const PoolBatch& b, long vocab_size, double* mixtures, long kept_steps) {
    in_parallel(mixtures ? threads_for(b.num_requests) : 1, [&](const Team& team) {
        for (long r = team.begin(b.num_requests); r < team.end(b.num_requests); r++) {
            const RequestView request = {b, r};
            double* mixture = mixture_row(request, mixtures, vocab_size, kept_steps);
            if (b.active[r]) MixCombiner{request, b.steps}.mix(vocab_size, mixture);
        }
    });
}

void pool_sample(const PoolBatch& b, long vocab_size, double* mixtures, long kept_steps) {
    in_parallel(threads_for(b.num_requests), [&](const Team& team) {
        for (long r = team.begin(b.num_requests); r < team.end(b.num_requests); r++) {
            const RequestView request = {b, r};
            if (!b.active[r] || request.task.greedy) continue;
            const MixCombiner combiner = {request, (long)b.steps};
            const double* mixture = mixture_row(request, mixtures, vocab_size, kept_steps);
            const long token = exponential_sample(mixture, vocab_size, request.stream(b.steps));
            combiner.append_token(token, combiner.contributors());
        }
    });
}

}  // namespace cospec
