// A pool's own work, for all sequences of a round at once: weights, trees, chains, and what is learned from a commit.
// The files of cospec.drafters named at each part do the same in Python, in the same order of operations: same bits.
#include "together.h"

#include "ops.h"

namespace {

// routing/standing.py
constexpr double LEARNING_RATE = 0.3, LOOK_RATE = 1.5, MEMORY = 0.98, PRIOR_TOKENS = 4.0, RATE_EDGE = 0.02;

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

// routing/choice.py, Choice.heaviest and heaviest_share; weights become those of who takes part
void choose(const Row& row, uint64_t free_ones, double share) {
    const long n = row.members, most = row.seat.most - 1;
    const uint64_t able = row.seat.able;
    double *weights = row.b.weights + row.r * n, *idle = row.seat.standing + IDLE * n;
    std::vector<long> chosen, order;
    for (long m = 0; m < n; m++)
        if (able >> m & 1) (free_ones >> m & 1 ? chosen : order).push_back(m);
    std::stable_sort(order.begin(), order.end(), [&](long a, long c) { return weights[a] > weights[c]; });
    double wanted = 0.0, held = 0.0, total = 0.0;
    for (long m : order) wanted += weights[m];
    wanted *= share;
    const long taken = most < 0 ? (long)order.size() : std::min((long)order.size(), std::max(1L, most));
    for (long i = 0; i < taken; i++) {
        chosen.push_back(order[i]);
        held += weights[order[i]];
        if (most < 0 && held >= wanted) break;
    }
    std::vector<double> kept(n, 0.0);
    for (long m : chosen) total += weights[m];
    for (long m : chosen) kept[m] = weights[m] / total;
    for (long m = 0; m < n; m++) idle[m] = kept[m] > 0.0 ? 0.0 : idle[m] + 1.0, weights[m] = kept[m];
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

void weigh(const Board& b) {
    for (long r = 0; r < b.rows; r++) estimate({b, r});
    if (!b.guessed) return;
    std::fill(b.guessed, b.guessed + 2 * b.depth * b.members * b.rows, -1);
    std::fill(b.going, b.going + b.rows, 1);
}

}  // namespace

// The weights [R, M] of all drafters and what the odds of their guesses are multiplied by.
API void cospec_pool_weigh(const Board* b) { weigh(*b); }

// Who takes part: of those that are able, `free_ones`, and the heaviest others that hold a share of their weight, or as
// many as are asked for. How many tokens each drafts, given [M, R]: all the way, or what `allot` says where there is
// novelty [2], of requests that draw and greedy ones.
API void cospec_pool_choose(const Board* b, uint64_t free_ones, uint64_t silent, double share, const double* novelty,
                            int64_t* given) {
    weigh(*b);
    for (long r = 0; r < b->rows; r++) {
        const Row row = {*b, r};
        choose(row, free_ones, share);
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
        const long told = b->first[(r + 1) * b->members] - b->first[r * b->members], found = unite({*b, r});
        double* kind = novelty + (b->seats[r].greedy ? 1 : 0);
        if (novelty && told) *kind += NOVELTY_RATE * ((double)found / told - *kind);
    }
}

API void cospec_pool_elect(const Board* b) {
    for (long r = 0; r < b->rows; r++) elect({*b, r});
}
