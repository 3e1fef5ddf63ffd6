// Feedback to a pool after a commit (drafters/pool/state.py, drafters/pool/combiners/combine.py, calibration.py).
#include <math.h>

#include "spec/pool_batch.h"

namespace cospec {

namespace {

constexpr double DECAY = 0.98;  // drafters/pool/routing/weights.py

// drafters/pool/routing/explore.py
constexpr double EPSILON = 0.05, SCORE_RATE = 0.3;

// One drafter's part in one draft. `agreement`: the sum of eq. 2 of CoSine over the observed candidates.
struct Feedback {
    double hits, trials, num_proposed, num_observed, agreement;
};

// drafters/pool/routing/explore.py, one term of eq. 2
double agreement(double confidence, double accuracy) {
    const double c = std::min(std::max(confidence, EPSILON), 1.0 - EPSILON);
    const double d = std::min(std::max(accuracy, EPSILON), 1.0 - EPSILON);
    return c * d / (c * d + (1.0 - c) * (1.0 - d));
}

struct FeedbackCollector {
    const RequestView& request;
    const int64_t* committed;
    long count;

    void observe(Feedback& feedback, long drafter, double raw_confidence, double value, long rank = 0) const {
        double *hits = request.bins(rank, drafter), *trials = hits + BINS;
        const int bin = (int)(sqrt(raw_confidence) * (BINS - 1));
        if (trials[bin] >= MAX_TRIALS) hits[bin] /= 2, trials[bin] /= 2;
        hits[bin] += value;
        trials[bin] += 1.0;
        if (rank == 0) feedback.num_observed++, feedback.agreement += agreement(raw_confidence, value);
    }
    // Observe every node whose parent was committed. A position counts as a hit when any of its nodes is right.
    Feedback from_draft(long drafter) const {
        const PoolBatch& b = request.b;
        const long begin = request.draft_begin(drafter), num_nodes = request.draft_nodes(drafter);
        Feedback feedback = {};
        std::vector<long> depth(num_nodes + 1, 0);
        for (long i = 0; i < num_nodes; i++) {
            depth[i + 1] = depth[b.parents[begin + i] + 1] + 1;
            feedback.num_proposed = std::max(feedback.num_proposed, (double)depth[i + 1]);
        }
        long node = -1;
        for (long t = 0; t < count; t++) {
            long hit = -1;
            bool any = false;
            for (long i = node + 1; i < num_nodes; i++) {
                if (b.parents[begin + i] != node) continue;
                const bool same = b.tokens[begin + i] == committed[t];
                observe(feedback, drafter, request.raw_confidence(begin + i), same);
                any = true;
                if (same && hit < 0) hit = i;
            }
            if (!any) break;
            feedback.trials++;
            if (hit < 0) break;
            feedback.hits++;
            node = hit;
        }
        return feedback;
    }
    // Observe candidates up to the first committed token that differs from the main path.
    Feedback from_candidates(long drafter) const {
        const PoolBatch& b = request.b;
        const int64_t* path = b.main_path + request.index * b.max_depth;
        const long length = b.path_len[request.index];
        Feedback feedback = {};
        long matched = 0, num_steps = 0;
        while (matched < std::min(length, count) && path[matched] == committed[matched]) matched++;
        while (num_steps < std::min(length + 1, (long)b.max_depth) && has_candidate(num_steps, drafter)) num_steps++;
        feedback.num_proposed = num_steps;
        for (long t = 0; t < std::min({matched + 1, num_steps, count}); t++) {
            const long offset = request.offset(t, drafter);
            const int64_t token = b.candidates[2 * offset];  // -1: a distribution without a sampled token
            const double value = token < 0 ? b.q[offset][committed[t]] : token == committed[t];
            observe(feedback, drafter, b.candidate_probs[2 * offset], value);
            feedback.hits += value;
            feedback.trials++;
        }
        for (long t = 0; t < std::min({matched + 1, num_steps, count}); t++) {
            const long second = 2 * request.offset(t, drafter) + 1;
            const int64_t token = b.candidates[second];
            if (token >= 0) observe(feedback, drafter, b.candidate_probs[second], token == committed[t], 1);
        }
        return feedback;
    }
    bool has_candidate(long step, long drafter) const {
        const long offset = request.offset(step, drafter);
        return request.b.candidates[2 * offset] >= 0 || request.b.q[offset];
    }
};

}  // namespace

// Update statistics and calibrations. `update_scores`: routing `explore` is used.
// commits: [size] words. A commit is four items: the request's index, the number of accepted draft tokens,
// the number of committed tokens, and the committed tokens.
API void cospec_pool_feedback(const PoolBatch* b, const int64_t* commits, long size, long update_scores) {
    for (const int64_t* commit = commits; commit < commits + size; commit += 3 + commit[2]) {
        const RequestView request = {*b, commit[0]};
        const long num_committed = commit[2];
        const double decay = pow(DECAY, (double)num_committed);
        const FeedbackCollector collector = {request, commit + 3, num_committed};
        request.stat(ACCEPTED)[0] = commit[1];
        for (long m = 0; m < b->num_drafters; m++) {
            const Feedback feedback = request.draft_nodes(m) ? collector.from_draft(m)
                                      : b->max_depth         ? collector.from_candidates(m)
                                                             : Feedback{};
            request.stat(HITS)[m] = request.stat(HITS)[m] * decay + feedback.hits;
            request.stat(TRIALS)[m] = request.stat(TRIALS)[m] * decay + feedback.trials;
            if (!update_scores || feedback.num_observed == 0.0) continue;
            const double unobserved = std::max(0.0, feedback.num_proposed - feedback.num_observed);
            const double disagreement = unobserved * agreement(0.5, 0.0);
            const double mean =
                (feedback.agreement + disagreement) / std::max(feedback.num_proposed, feedback.num_observed);
            request.stat(SCORE)[m] += SCORE_RATE * (mean - request.stat(SCORE)[m]);
        }
    }
}

}  // namespace cospec
