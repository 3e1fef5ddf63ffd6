// One step of a drafter pool: R requests, M drafters, main paths of at most D tokens.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "ops/ops.h"
#include "ops/sampling.h"

namespace cospec {

// What the pool is asked to draft for one request.
struct PoolRequest {
    int64_t greedy;
    int64_t shares_stream;  // the drafters sample with the target's random stream
    int64_t depth;          // tokens of the longest path
    int64_t max_nodes;      // nodes of the tree
    double temperature;     // 0 for greedy requests
    double threshold;       // a main path ends where its probability falls below this
};

struct PoolBatch {
    int64_t num_requests, num_drafters, max_depth;
    int64_t tree_capacity;  // nodes of the largest tree under construction
    int64_t steps;          // positions that were read so far

    // Constants of drafters/calibration.py, drafters/pool/state.py and drafters/pool/candidates.py.
    int64_t calibration_bins;
    double calibration_prior, min_prob, min_second_prob;

    const PoolRequest* requests;  // [R]
    const uint64_t* streams;      // [R, 6], random streams of the first position, see rng/random_streams.py
    const double*
        calibrations;       // [2, 2, M, 2, bins]: sampled or greedy; first or second candidate; drafter; hits, trials
    const double* weights;  // [R, M], sum to 1 over the drafters that take part; 0 for the others
    const double* odds;     // [R, M]

    const int64_t* spans;             // [R, M, 2], begin and number of nodes of a drafter's complete draft
    const int64_t *tokens, *parents;  // [T] of all complete drafts
    const double* raw_confidence;     // [T] of all complete drafts

    int64_t* candidates;      // [D, M, R, 2], candidate tokens of lockstep drafters, -1 for none
    double* candidate_probs;  // [D, M, R, 2]
    const double** q;         // [D, M, R], distributions, null for none
    double* mix_weights;      // [R, D, M]

    int64_t* main_path;  // [R, D]
    int64_t* path_len;   // [R]
    int64_t* active;     // [R], whether the main path goes on

    int64_t* num_nodes;                              // [R], nodes of the draft
    int64_t *out_tokens, *out_parents, *out_owners;  // [R, tree_capacity]
    double* out_confidence;                          // [R, tree_capacity]
};

// One request of a batch.
struct RequestView {
    const PoolBatch& b;
    const long index, num_drafters = b.num_drafters;
    const PoolRequest& task = b.requests[index];

    // The random stream of a position.
    RandomStream stream(long step) const {
        RandomStream found;
        memcpy(&found, b.streams + 6 * index, sizeof found);
        found.counter[2] += step;
        return found;
    }
    const double* bins(long rank, long drafter) const {
        return b.calibrations + (((task.greedy ? 2 : 0) + rank) * num_drafters + drafter) * 2 * b.calibration_bins;
    }
    // The probability of acceptance that belongs to a drafter's own confidence.
    double calibrated(long drafter, double confidence, long rank = 0) const {
        const double *hits = bins(rank, drafter), *trials = hits + b.calibration_bins, prior = b.calibration_prior;
        const int bin = (int)(sqrt(confidence) * (b.calibration_bins - 1));
        double prob = (hits[bin] + prior * confidence) / (trials[bin] + prior);
        prob = prob < b.min_prob ? b.min_prob : prob > 1.0 - b.min_prob ? 1.0 - b.min_prob : prob;
        const double scaled = prob * b.odds[index * num_drafters + drafter];
        return scaled / (scaled + 1.0 - prob);
    }
    double weight(long drafter) const { return b.weights[index * num_drafters + drafter]; }
    long draft_begin(long drafter) const { return b.spans[2 * (index * num_drafters + drafter)]; }
    long draft_nodes(long drafter) const { return b.spans[2 * (index * num_drafters + drafter) + 1]; }
    // Index into [D, M, R].
    long offset(long step, long drafter) const { return (step * num_drafters + drafter) * b.num_requests + index; }
};

// As drafters/pool/tree_builder.py.
struct TreeBuilder {
    std::vector<int64_t> tokens, parents, owners;
    std::vector<double> scores, confidence;

    long add_node(long parent, int64_t token, long owner, double score, double node_confidence) {
        for (long i = 0; i < (long)tokens.size(); i++)
            if (parents[i] == parent && tokens[i] == token) return i;
        tokens.push_back(token), parents.push_back(parent), owners.push_back(owner);
        scores.push_back(score), confidence.push_back(node_confidence);
        return (long)tokens.size() - 1;
    }
    std::vector<long> best(long count) const {
        const long n = tokens.size();
        std::vector<long> nodes(n);
        for (long i = 0; i < n; i++) nodes[i] = i;
        if (n <= count) return nodes;
        std::vector<double> capped(n);
        for (long i = 0; i < n; i++) capped[i] = parents[i] < 0 ? scores[i] : std::min(scores[i], capped[parents[i]]);
        std::stable_sort(nodes.begin(), nodes.end(), [&](long a, long c) { return capped[a] > capped[c]; });
        nodes.resize(std::max(0L, count));
        std::sort(nodes.begin(), nodes.end());
        return nodes;
    }
    // How many nodes rank before a node.
    long rank_of(long node) const {
        long rank = 0;
        for (long i = 0; i < (long)scores.size(); i++)
            if (i != node) rank += i < node ? scores[i] >= scores[node] : scores[i] > scores[node];
        return rank;
    }
    void write(const PoolBatch& b, long request, long count) const {
        const std::vector<long> nodes = best(count);
        std::vector<long> new_index(tokens.size() + 1, -1);
        for (long i = 0; i < (long)nodes.size(); i++) new_index[nodes[i] + 1] = i;
        for (long i = 0; i < (long)nodes.size(); i++) {
            const long out = request * b.tree_capacity + i, node = nodes[i];
            b.out_tokens[out] = tokens[node];
            b.out_parents[out] = new_index[parents[node] + 1];
            b.out_owners[out] = owners[node];
            b.out_confidence[out] = confidence[node];
        }
        b.num_nodes[request] = nodes.size();
    }
};

// One drafter's logits at one position.
struct DrafterLogits {
    int64_t drafter;
    const float* logits;  // [num_rows, vocab_size]
    int64_t vocab_size, num_rows;
};

// Read candidates at the current step. logits: [count]; requests: the request of each row of logits.
void pool_read_candidates(const PoolBatch& b, const DrafterLogits* logits, long count, const int64_t* requests);
// Read distributions at the current step into q [rows, vocab_size]. Greedy requests get a token instead.
// A token is also sampled where the drafter shares the target's random stream.
// The confidence is the largest probability, at temperature 1 for greedy requests.
void pool_read_distributions(
    const PoolBatch& b, const DrafterLogits* logits, long count, const int64_t* requests, double* q);
// Extend each main path by the most trusted candidate. A path that ends writes its tree.
void pool_fuse(const PoolBatch& b);
// Mix the distributions of active requests into mixtures [R, kept_steps, vocab_size].
// Greedy requests take the token with the most weight.
void pool_mix(const PoolBatch& b, long vocab_size, double* mixtures, long kept_steps);
// Append a token sampled from each mixture.
void pool_sample(const PoolBatch& b, long vocab_size, double* mixtures, long kept_steps);

}  // namespace cospec
