// Combiners of complete drafts: the union as a tree, and the majority vote as a chain.
#include "spec/pool_batch.h"

namespace cospec {

namespace {

// drafters/pool/combiners/union.py. Returns the number of distinct nodes.
long build_union(const RequestView& request) {
    const PoolBatch& b = request.b;
    TreeBuilder tree;
    std::vector<long> node_of;
    std::vector<double> path_weight;
    for (long m : request.drafters()) {
        node_of.assign(1, -1), path_weight.assign(1, request.weight(m));
        const long begin = request.draft_begin(m), end = begin + request.draft_nodes(m);
        for (long i = begin; i < end; i++) {
            const double confidence = request.calibrated(m, request.raw_confidence(i));
            const long parent = b.parents[i] + 1;
            const long node = tree.add_node(node_of[parent], b.tokens[i], m, 0.0, confidence);
            tree.confidence[node] = std::max(tree.confidence[node], confidence);
            node_of.push_back(node);
            path_weight.push_back(path_weight[parent] * confidence);
            tree.scores[node] += path_weight.back();
        }
    }
    tree.write(b, request.index, request.task.max_nodes);
    return tree.tokens.size();
}

// drafters/pool/combiners/vote.py
void vote(const RequestView& request) {
    const PoolBatch& b = request.b;
    const long limit = std::min(request.task.max_nodes, request.task.depth), out = request.index * b.tree_capacity;
    std::vector<long> drafters = request.drafters();
    auto length = [&](long m) { return std::min(limit, request.draft_nodes(m)); };
    auto token = [&](long m, long position) { return b.tokens[request.draft_begin(m) + position]; };
    auto confidence_of = [&](long m, long position) {
        return request.calibrated(m, request.raw_confidence(request.draft_begin(m) + position));
    };
    long position = 0;
    auto append = [&](int64_t chosen, long owner, double confidence) {
        b.out_tokens[out + position] = chosen, b.out_parents[out + position] = position - 1;
        b.out_owners[out + position] = owner, b.out_confidence[out + position] = confidence;
        position++;
    };
    while (drafters.size() > 1) {
        int64_t chosen = -1;
        double max_votes = -1.0, confidence = -1.0;
        for (long m : drafters) {
            double votes = 0.0;
            for (long other : drafters)
                if (token(other, position) == token(m, position)) votes += request.weight(other);
            if (votes > max_votes) max_votes = votes, chosen = token(m, position);
        }
        auto disagrees = [&](long m) { return token(m, position) != chosen; };
        drafters.erase(std::remove_if(drafters.begin(), drafters.end(), disagrees), drafters.end());
        for (long m : drafters) confidence = std::max(confidence, confidence_of(m, position));
        append(chosen, drafters[0], confidence);
        auto exhausted = [&](long m) { return length(m) <= position; };
        drafters.erase(std::remove_if(drafters.begin(), drafters.end(), exhausted), drafters.end());
    }
    for (long m : drafters)  // the last drafter left continues alone
        while (position < length(m)) append(token(m, position), m, confidence_of(m, position));
    b.num_nodes[request.index] = position;
}

}  // namespace

// novelty: [2] (sampled, greedy) moving averages of the share of distinct nodes, updated here; or null.
API void cospec_pool_union(const PoolBatch* b, double* novelty) {
    for (long r = 0; r < b->num_requests; r++) {
        const RequestView request = {*b, r};
        long num_proposed = 0;
        for (long m = 0; m < b->num_drafters; m++) num_proposed += request.draft_nodes(m);
        const long num_distinct = build_union(request);
        if (!novelty || !num_proposed) continue;
        double* rate = novelty + (b->tasks[r].greedy ? 1 : 0);
        *rate += NOVELTY_RATE * ((double)num_distinct / num_proposed - *rate);
    }
}

API void cospec_pool_vote(const PoolBatch* b) {
    for (long r = 0; r < b->num_requests; r++) vote({*b, r});
}

}  // namespace cospec
