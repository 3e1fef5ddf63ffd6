// A pool's own work, for all sequences of a round at once: weights, trees, chains, and what is learned from a commit.
// The files of cospec.drafters named at each part do the same in Python, in the same order of operations: same bits.
#include "together.h"

#include "dispatch.h"

namespace {

// routing/standing.py
constexpr double LEARNING_RATE = 0.3, LOOK_RATE = 1.5, PRIOR_TOKENS = 4.0, RATE_EDGE = 0.02;
// routing/hedge.py
constexpr double SHARE = 0.8, PATIENCE = 16.0;
// routing/explore.py
constexpr double ALPHA = 0.3, BETA = 0.8, TAU = 2.0;
constexpr uint64_t ROUTE = 4;  // Purpose in draws.py

// routing/standing.py, Standing.estimate
void estimate(const Row& row) {
    const Board& b = row.b;
    const long n = b.members;
    const double *s = row.seat.standing, *prior = b.prior;
    double *weights = b.weights + row.r * n, *odds = b.odds + row.r * n;
    double best = -1.0, most_seen = 0.0, most = 0.0, top = -1.0;
    for (long m = 0; m < n; m++) {
        weights[m] = (s[HITS * n + m] + PRIOR_TOKENS * prior[m]) / (s[SEEN * n + m] + PRIOR_TOKENS);
        const double rate = weights[m] < RATE_EDGE ? RATE_EDGE : weights[m] > 1.0 - RATE_EDGE ? 1.0 - RATE_EDGE : weights[m];
        odds[m] = rate / (1.0 - rate) / prior[n + m];
        best = std::max(best, weights[m]);
        most_seen = std::max(most_seen, s[SEEN * n + m]);
        most = std::max(most, s[LOOKED * n + m]);
    }
    const double scale = LEARNING_RATE * (most_seen + PRIOR_TOKENS);
    for (long m = 0; m < n; m++) weights[m] = scale * (weights[m] - best);
    if (most > 0.0) {
        auto mean = [&](long m) { return s[LOOKED * n + m] > 0.0 ? s[CHANCE * n + m] / s[LOOKED * n + m] : -1.0; };
        for (long m = 0; m < n; m++) top = std::max(top, mean(m));
        for (long m = 0; m < n; m++)
            if (mean(m) >= 0.0) weights[m] += LOOK_RATE * most * (mean(m) - top);
        const double gain = *std::max_element(weights, weights + n);
        for (long m = 0; m < n; m++) weights[m] -= gain;
    }
    double total = 0.0;
    for (long m = 0; m < n; m++) total += weights[m] = exp(weights[m]);
    for (long m = 0; m < n; m++) weights[m] /= total;
}

// Drafters by what they are worth, the best first.
std::vector<long> ranked(std::vector<long> some, const double* worth) {
    std::stable_sort(some.begin(), some.end(), [&](long a, long c) { return worth[a] > worth[c]; });
    return some;
}

// routing/choice.py, Choice.heaviest; order: the heaviest first
std::vector<long> heaviest(const Row& row, const std::vector<long>& order, double share) {
    const long most = row.seat.most - 1, count = order.size();
    if (most >= 0) return {order.begin(), order.begin() + std::min(count, std::max(1L, most))};
    double wanted = 0.0, held = 0.0;
    for (long m : order) wanted += row.weight(m);
    wanted *= share;
    for (long i = 0; i < count; i++)
        if ((held += row.weight(order[i])) >= wanted) return {order.begin(), order.begin() + i + 1};
    return order;
}

// routing/hedge.py
std::vector<long> hedge(const Row& row, const std::vector<long>& order, uint64_t silent) {
    std::vector<long> chosen = heaviest(row, order, SHARE), overdue;
    for (long m : order)
        if (silent >> m & 1 && row.own(IDLE)[m] >= PATIENCE && std::find(chosen.begin(), chosen.end(), m) == chosen.end())
            overdue.push_back(m);
    const long most = row.seat.most > 0 ? std::max(1L, (long)row.seat.most - 1) : (long)order.size();
    chosen.resize(std::min((long)chosen.size(), std::max(0L, most - (long)overdue.size())));
    overdue.resize(std::min((long)overdue.size(), most));
    chosen.insert(chosen.end(), overdue.begin(), overdue.end());
    return chosen;
}

// routing/explore.py
std::vector<long> explore(const Row& row, std::vector<long> able) {
    const uint64_t base = row.seat.base;
    const Stream stream = {{row.seat.seed, ROUTE}, {base, 0, 0, base}};
    const long most = row.seat.most > 0 ? row.seat.most - 1 : ((long)able.size() + 1) / 2;
    const long count = std::min(std::max(1L, most), (long)able.size());
    if (kernels().uniform(stream, 0) < (row.own(ACCEPTED)[0] >= TAU ? BETA : ALPHA)) {
        able = ranked(able, row.own(SCORE));
        able.resize(count);
        return able;
    }
    std::vector<long> chosen;
    for (long i = 1; i <= count; i++) {
        const long left = able.size();
        const double uniform = kernels().uniform(stream, i);
        long place = 0;
        while (place < left - 1 && !(uniform < (double)(place + 1) / left)) place++;
        chosen.push_back(able[place]);
        able.erase(able.begin() + place);
    }
    return chosen;
}

// pool/readable.py, Staff.route; weights become those of who takes part
void choose(const Row& row, uint64_t free_ones, uint64_t silent, Way way) {
    const long n = row.members;
    double *weights = row.b.weights + row.r * n, *idle = row.own(IDLE), total = 0.0;
    std::vector<long> chosen, priced, some;
    for (long m = 0; m < n; m++)
        if (row.seat.able >> m & 1) (free_ones >> m & 1 ? chosen : priced).push_back(m);
    if (!priced.empty()) {
        const std::vector<long> order = ranked(priced, weights);
        some = way == EXPLORE ? explore(row, priced) : way == HEDGE ? hedge(row, order, silent) : heaviest(row, order, 1.0 / 0.0);
    }
    chosen.insert(chosen.end(), some.begin(), some.end());
    std::vector<double> kept(n, 0.0);
    for (long m : chosen) total += weights[m];
    for (long m = 0; m < n; m++) idle[m] += 1.0;
    for (long m : chosen) kept[m] = weights[m] / total, idle[m] = 0.0;
    std::copy(kept.begin(), kept.end(), weights);
}

// combiners/union.py; how many tokens were new
long unite(const Row& row) {
    const Board& b = row.b;
    Growing tree;
    std::vector<long> place;
    std::vector<double> share;
    for (long m : row.drafters()) {
        place.assign(1, -1), share.assign(1, row.weight(m));
        for (long at = row.begin(m); at < row.begin(m) + row.nodes(m); at++) {
            const double sure = row.trust(m, row.raw(at));
            const long parent = b.parents[at] + 1, node = tree.put(place[parent], b.tokens[at], m, 0.0, sure);
            tree.confidence[node] = std::max(tree.confidence[node], sure);
            place.push_back(node);
            share.push_back(share[parent] * sure);
            tree.scores[node] += share.back();
        }
    }
    tree.write(b, row.r, row.seat.nodes);
    return tree.tokens.size();
}

// combiners/vote.py
void elect(const Row& row) {
    const Board& b = row.b;
    const long most = std::min(row.seat.nodes, row.seat.depth), out = row.r * b.room;
    std::vector<long> voters = row.drafters();
    auto length = [&](long m) { return std::min(most, row.nodes(m)); };
    auto token = [&](long m, long place) { return b.tokens[row.begin(m) + place]; };
    auto trust = [&](long m, long place) { return row.trust(m, row.raw(row.begin(m) + place)); };
    long place = 0;
    auto add = [&](int64_t chosen, long owner, double sure) {
        b.out_tokens[out + place] = chosen, b.out_parents[out + place] = place - 1;
        b.out_owners[out + place] = owner, b.out_confidence[out + place] = sure;
        place++;
    };
    while (voters.size() > 1) {
        int64_t chosen = -1;
        double most_votes = -1.0, sure = -1.0;
        for (long m : voters) {
            double votes = 0.0;
            for (long other : voters)
                if (token(other, place) == token(m, place)) votes += row.weight(other);
            if (votes > most_votes) most_votes = votes, chosen = token(m, place);
        }
        auto elsewhere = [&](long m) { return token(m, place) != chosen; };
        voters.erase(std::remove_if(voters.begin(), voters.end(), elsewhere), voters.end());
        for (long m : voters) sure = std::max(sure, trust(m, place));
        add(chosen, voters[0], sure);
        auto over = [&](long m) { return length(m) <= place; };
        voters.erase(std::remove_if(voters.begin(), voters.end(), over), voters.end());
    }
    for (long m : voters)  // one that nobody else goes along with any further
        while (place < length(m)) add(token(m, place), m, trust(m, place));
    b.count[row.r] = place;
}

// pool/readable.py, allot
void allot(const Row& row, uint64_t free_ones, uint64_t silent, double novelty, int64_t* all) {
    std::vector<int64_t> given(row.members);
    const long n = row.members, depth = std::min(row.seat.depth, row.seat.nodes);
    std::vector<std::pair<double, long>> offers;
    for (long m = 0; m < n; m++) {
        given[m] = 0;
        if (!(row.weight(m) > 0.0) || free_ones >> m & 1) continue;
        double value = row.weight(m);
        const double sure = row.trust(m, UNKNOWN);
        for (long j = 0; j < depth; j++) value *= sure, offers.push_back({-value, m});
    }
    std::sort(offers.begin(), offers.end());
    const long most = (long)ceil(row.seat.nodes / novelty);
    for (long i = 0; i < std::min((long)offers.size(), most); i++) given[offers[i].second]++;
    for (long m = 0; m < n; m++)
        if (row.weight(m) > 0.0) {
            if (free_ones >> m & 1) given[m] = depth;
            else if (silent >> m & 1) given[m] = std::max((int64_t)1, given[m]);
        }
    for (long m = 0; m < n; m++) all[m * row.b.rows + row.r] = given[m];
}

// What the round before has left is wiped away.
void clear(Board& b) {
    const long said = b.depth * b.members * b.rows;
    b.steps = 0;
    b.raw = nullptr;
    std::fill(b.count, b.count + b.rows, 0);
    std::fill(b.length, b.length + b.rows, 0);
    std::fill(b.going, b.going + b.rows, 1);
    std::fill(b.spans, b.spans + 2 * b.rows * b.members, 0);
    std::fill(b.guessed, b.guessed + 2 * said, -1);
    std::fill(b.q, b.q + said, nullptr);
}

}  // namespace

// Who takes part: of those that are able, `free_ones`, and of the others whom the routing chooses. How many tokens each
// drafts, given [M, R]: all the way, or what `allot` says where there is novelty [2], of requests that draw and greedy ones.
API void cospec_pool_choose(Board* b, uint64_t free_ones, uint64_t silent, long way, const double* novelty,
                            int64_t* given) {
    clear(*b);
    for (long r = 0; r < b->rows; r++) {
        const Row row = {*b, r};
        estimate(row);
        choose(row, free_ones, silent, (Way)way);
        if (novelty)
            allot(row, free_ones, silent, novelty[row.seat.greedy ? 1 : 0], given);
        else
            for (long m = 0; m < b->members; m++)
                given[m * b->rows + r] = row.weight(m) > 0.0 ? std::min(row.seat.depth, row.seat.nodes) : 0;
    }
}

// novelty: [2], learns which share of the drafts was new; or null.
API void cospec_pool_unite(const Board* b, double* novelty) {
    for (long r = 0; r < b->rows; r++) {
        const Row row = {*b, r};
        long told = 0;
        for (long m = 0; m < b->members; m++) told += row.nodes(m);
        const long found = unite(row);
        double* kind = novelty + (b->seats[r].greedy ? 1 : 0);
        if (novelty && told) *kind += NOVELTY_RATE * ((double)found / told - *kind);
    }
}

API void cospec_pool_elect(const Board* b) {
    for (long r = 0; r < b->rows; r++) elect({*b, r});
}
