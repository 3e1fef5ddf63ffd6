// Drafter weights and routing of a pool, for all requests of a step.
// The files of cospec.drafters named at each part compute the same bits in Python, in the same order of operations.
#include "ops/dispatch.h"
#include "spec/pool_batch.h"

namespace cospec {

namespace {

// drafters/pool/routing/weights.py
constexpr double LEARNING_RATE = 0.3, LIKELIHOOD_RATE = 1.5, PRIOR_TOKENS = 4.0, MIN_RATE = 0.02;
// drafters/pool/routing/hedge.py
constexpr double WEIGHT_SHARE = 0.8, PATIENCE = 16.0;
// drafters/pool/routing/explore.py
constexpr double ALPHA = 0.3, BETA = 0.8, TAU = 2.0;
constexpr uint64_t ROUTE = 4;  // StreamKind in core/rng.py

// drafters/pool/routing/weights.py, DrafterWeights.estimate
void estimate_weights(const RequestView& request) {
    const PoolBatch& b = request.b;
    const long n = b.num_drafters;
    const double *s = request.task.stats, *prior = b.prior;
    double *weights = b.weights + request.index * n, *odds = b.odds + request.index * n;
    double best_rate = -1.0, max_trials = 0.0, max_scored = 0.0, best_mean = -1.0;
    for (long m = 0; m < n; m++) {
        weights[m] = (s[HITS * n + m] + PRIOR_TOKENS * prior[m]) / (s[TRIALS * n + m] + PRIOR_TOKENS);
        const double rate = weights[m] < MIN_RATE         ? MIN_RATE
                            : weights[m] > 1.0 - MIN_RATE ? 1.0 - MIN_RATE
                                                          : weights[m];
        odds[m] = rate / (1.0 - rate) / prior[n + m];
        best_rate = std::max(best_rate, weights[m]);
        max_trials = std::max(max_trials, s[TRIALS * n + m]);
        max_scored = std::max(max_scored, s[SCORED * n + m]);
    }
    const double scale = LEARNING_RATE * (max_trials + PRIOR_TOKENS);
    for (long m = 0; m < n; m++) weights[m] = scale * (weights[m] - best_rate);
    if (max_scored > 0.0) {
        auto mean = [&](long m) { return s[SCORED * n + m] > 0.0 ? s[LIKELIHOOD * n + m] / s[SCORED * n + m] : -1.0; };
        for (long m = 0; m < n; m++) best_mean = std::max(best_mean, mean(m));
        for (long m = 0; m < n; m++)
            if (mean(m) >= 0.0) weights[m] += LIKELIHOOD_RATE * max_scored * (mean(m) - best_mean);
        const double max_weight = *std::max_element(weights, weights + n);
        for (long m = 0; m < n; m++) weights[m] -= max_weight;
    }
    double total = 0.0;
    for (long m = 0; m < n; m++) total += weights[m] = exp(weights[m]);
    for (long m = 0; m < n; m++) weights[m] /= total;
}

// Sort drafters by a value, the largest first.
std::vector<long> ranked(std::vector<long> drafters, const double* value) {
    std::stable_sort(drafters.begin(), drafters.end(), [&](long a, long c) { return value[a] > value[c]; });
    return drafters;
}

// drafters/pool/routing/selection.py, RoutingInput.heaviest. order: the largest weight first
std::vector<long> top_weighted(const RequestView& request, const std::vector<long>& order, double share) {
    const long limit = request.task.max_drafters - 1, count = order.size();
    if (limit >= 0) return {order.begin(), order.begin() + std::min(count, std::max(1L, limit))};
    double needed = 0.0, sum = 0.0;
    for (long m : order) needed += request.weight(m);
    needed *= share;
    for (long i = 0; i < count; i++)
        if ((sum += request.weight(order[i])) >= needed) return {order.begin(), order.begin() + i + 1};
    return order;
}

// drafters/pool/routing/hedge.py
std::vector<long> hedge(const RequestView& request, const std::vector<long>& order, uint64_t unscored) {
    std::vector<long> chosen = top_weighted(request, order, WEIGHT_SHARE), overdue;
    for (long m : order)
        if (unscored >> m & 1 && request.stat(IDLE)[m] >= PATIENCE &&
            std::find(chosen.begin(), chosen.end(), m) == chosen.end())
            overdue.push_back(m);
    const long max_drafters = request.task.max_drafters;
    const long limit = max_drafters > 0 ? std::max(1L, max_drafters - 1) : (long)order.size();
    chosen.resize(std::min((long)chosen.size(), std::max(0L, limit - (long)overdue.size())));
    overdue.resize(std::min((long)overdue.size(), limit));
    chosen.insert(chosen.end(), overdue.begin(), overdue.end());
    return chosen;
}

// drafters/pool/routing/explore.py
std::vector<long> explore(const RequestView& request, std::vector<long> eligible) {
    const uint64_t base_len = request.task.base_len;
    const RandomStream stream = {{request.task.seed, ROUTE}, {base_len, 0, 0, base_len}};
    const long limit = request.task.max_drafters > 0 ? request.task.max_drafters - 1 : ((long)eligible.size() + 1) / 2;
    const long count = std::min(std::max(1L, limit), (long)eligible.size());
    if (kernels().uniform(stream, 0) < (request.stat(ACCEPTED)[0] >= TAU ? BETA : ALPHA)) {
        eligible = ranked(eligible, request.stat(SCORE));
        eligible.resize(count);
        return eligible;
    }
    std::vector<long> chosen;
    for (long i = 1; i <= count; i++) {
        const long left = eligible.size();
        const double uniform = kernels().uniform(stream, i);
        long index = 0;
        while (index < left - 1 && !(uniform < (double)(index + 1) / left)) index++;
        chosen.push_back(eligible[index]);
        eligible.erase(eligible.begin() + index);
    }
    return chosen;
}

// drafters/pool/reference.py, PoolConfig.route. Weights become the normalized weights of the drafters that take part.
void route(const RequestView& request, uint64_t zero_cost, uint64_t unscored, Routing routing) {
    const long n = request.num_drafters;
    double *weights = request.b.weights + request.index * n, *idle = request.stat(IDLE), total = 0.0;
    std::vector<long> chosen, costly, routed;
    for (long m = 0; m < n; m++)
        if (request.task.eligible >> m & 1) (zero_cost >> m & 1 ? chosen : costly).push_back(m);
    if (!costly.empty()) {
        const std::vector<long> order = ranked(costly, weights);
        routed = routing == EXPLORE ? explore(request, costly)
                 : routing == HEDGE ? hedge(request, order, unscored)
                                    : top_weighted(request, order, INFINITY);
    }
    chosen.insert(chosen.end(), routed.begin(), routed.end());
    std::vector<double> normalized(n, 0.0);
    for (long m : chosen) total += weights[m];
    for (long m = 0; m < n; m++) idle[m] += 1.0;
    for (long m : chosen) normalized[m] = weights[m] / total, idle[m] = 0.0;
    std::copy(normalized.begin(), normalized.end(), weights);
}

// drafters/pool/reference.py, allot
void allocate_lengths(
    const RequestView& request, uint64_t zero_cost, uint64_t unscored, double novelty, int64_t* draft_lengths) {
    const long n = request.num_drafters, depth = std::min(request.task.depth, request.task.max_nodes);
    std::vector<int64_t> lengths(n);
    std::vector<std::pair<double, long>> marginal_values;
    for (long m = 0; m < n; m++) {
        lengths[m] = 0;
        if (!(request.weight(m) > 0.0) || zero_cost >> m & 1) continue;
        double value = request.weight(m);
        const double confidence = request.calibrated(m, UNKNOWN_CONFIDENCE);
        for (long j = 0; j < depth; j++) value *= confidence, marginal_values.push_back({-value, m});
    }
    std::sort(marginal_values.begin(), marginal_values.end());
    const long budget = (long)ceil(request.task.max_nodes / novelty);
    for (long i = 0; i < std::min((long)marginal_values.size(), budget); i++) lengths[marginal_values[i].second]++;
    for (long m = 0; m < n; m++)
        if (request.weight(m) > 0.0) {
            if (zero_cost >> m & 1)
                lengths[m] = depth;
            else if (unscored >> m & 1)
                lengths[m] = std::max((int64_t)1, lengths[m]);
        }
    for (long m = 0; m < n; m++) draft_lengths[m * request.b.num_requests + request.index] = lengths[m];
}

// Remove the results of the previous step.
void reset(PoolBatch& b) {
    const long cells = b.max_depth * b.num_drafters * b.num_requests;
    b.steps = 0;
    b.raw_confidence = nullptr;
    std::fill(b.num_nodes, b.num_nodes + b.num_requests, 0);
    std::fill(b.path_len, b.path_len + b.num_requests, 0);
    std::fill(b.active, b.active + b.num_requests, 1);
    std::fill(b.spans, b.spans + 2 * b.num_requests * b.num_drafters, 0);
    std::fill(b.candidates, b.candidates + 2 * cells, -1);
    std::fill(b.q, b.q + cells, nullptr);
}

}  // namespace

// Choose the drafters of each request and their draft lengths [M, R].
// All eligible `zero_cost` drafters take part; `routing` chooses among the others. `unscored`: drafters without
// likelihoods of known tokens. Both are bit sets. Lengths follow novelty [2] (sampled, greedy); null: the full depth.
API void cospec_pool_route(
    PoolBatch* b, uint64_t zero_cost, uint64_t unscored, long routing, const double* novelty, int64_t* draft_lengths) {
    reset(*b);
    for (long r = 0; r < b->num_requests; r++) {
        const RequestView request = {*b, r};
        estimate_weights(request);
        route(request, zero_cost, unscored, (Routing)routing);
        if (novelty)
            allocate_lengths(request, zero_cost, unscored, novelty[request.task.greedy ? 1 : 0], draft_lengths);
        else
            for (long m = 0; m < b->num_drafters; m++)
                draft_lengths[m * b->num_requests + r] =
                    request.weight(m) > 0.0 ? std::min(request.task.depth, request.task.max_nodes) : 0;
    }
}

}  // namespace cospec
