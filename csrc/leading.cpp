// Spines that several drafters are led along: what each says at a step, and what becomes of it in a tree or a mixture.
#include <string.h>

#include "guesses.h"
#include "together.h"

namespace {

constexpr uint64_t TARGET = 0;  // Purpose in draws.py

// What one drafter says at a position; `node` of its whole draft, or -1.
struct Voice {
    long member;
    int64_t token;
    double raw, sure;
    long node;
};

// combiners/fuse.py, from the first step to the last that was heard; the tree is written when no more will be.
struct Fusion {
    const Row& row;
    Growing tree = {};
    std::vector<Voice> tails = {};
    std::vector<long> leaves = {}, follows = std::vector<long>(row.members, -1);
    long node = -1, length = 0;
    double chance = 1.0;

    std::vector<Voice> voices(long step) const {
        const Board& b = row.b;
        std::vector<Voice> found;
        for (long m = 0; m < row.members; m++) {
            const long at = 2 * row.place(step, m);
            if (b.guessed[at] >= 0)
                found.push_back({m, b.guessed[at], b.chances[at], row.trust(m, b.chances[at]), -1});
        }
        for (long m = 0; m < row.members; m++)
            for (long i = 0; follows[m] > -2 && i < row.nodes(m); i++) {
                const long at = row.begin(m) + i;
                if (b.parents[at] == follows[m])
                    found.push_back({m, b.tokens[at], row.raw(at), row.trust(m, row.raw(at)), i});
            }
        return found;
    }
    // Whether the spine goes on.
    bool advance(long step) {
        const Board& b = row.b;
        const std::vector<Voice> heard = voices(step);
        if (heard.empty()) return false;
        const Voice* best = &heard[0];
        for (const Voice& rival : heard)
            if (rival.sure > best->sure ||
                (rival.sure == best->sure && row.weight(rival.member) > row.weight(best->member)))
                best = &rival;
        if (chance * best->sure < row.seat.threshold) return false;
        const long parent = node;
        const double before = chance;
        node = tree.put(parent, best->token, best->member, before * best->sure, best->sure);
        for (const Voice& voice : heard)
            if (voice.token != best->token) {
                const double sure = std::min(voice.sure, 1.0 - best->sure);
                const long leaf = tree.put(parent, voice.token, voice.member, before * sure, sure);
                if (voice.node >= 0) tails.push_back(voice), leaves.push_back(leaf);
            }
        const long at = 2 * row.place(step, best->member) + 1;
        if (best->node < 0 && b.guessed[at] >= 0) {
            const double sure = std::min(row.trust(best->member, b.chances[at], 1), 1.0 - best->sure);
            tree.put(parent, b.guessed[at], best->member, before * sure, sure);
        }
        b.spine[row.r * b.depth + length++] = best->token;
        chance *= best->sure;
        follow(heard, best->token);
        return length < std::min(row.seat.depth, row.seat.nodes) && tree.outranked(node) < row.seat.nodes;
    }
    // Whole drafts that go elsewhere are left.
    void follow(const std::vector<Voice>& heard, int64_t token) {
        follows.assign(row.members, -2);
        for (const Voice& voice : heard)
            if (voice.node >= 0 && voice.token == token && follows[voice.member] == -2) follows[voice.member] = voice.node;
    }
    void finish() {
        const Board& b = row.b;
        for (size_t i = 0; i < tails.size(); i++) {
            const long m = tails[i].member, begin = row.begin(m);
            std::vector<long> place(row.nodes(m), -1);
            place[tails[i].node] = leaves[i];
            for (long n = tails[i].node + 1; n < row.nodes(m); n++) {
                const long above = b.parents[begin + n], parent = above < 0 ? -1 : place[above];
                if (parent < 0) continue;
                const double sure = row.trust(m, row.raw(begin + n));
                place[n] = tree.put(parent, b.tokens[begin + n], m, tree.scores[parent] * sure, sure);
            }
        }
        tree.write(b, row.r, row.seat.nodes);
    }
};

void fuse(const Row& row) {
    const Board& b = row.b;
    Fusion fusion{row};
    bool going = b.going[row.r];
    // Replayed from the beginning, which is cheaper than keeping a tree between calls.
    for (long step = 0; step < b.steps; step++)
        if (!fusion.advance(step)) {
            going = false;
            break;
        }
    b.length[row.r] = fusion.length;
    b.going[row.r] = going;
    if (!going) fusion.finish();
}

Stream stream_of(const Row& row, long ahead) {
    const Seat& seat = row.seat;
    // As draws.py keys it: the target's own noise knows of no round.
    return {{seat.seed, seat.purpose}, {0, 0, (uint64_t)(seat.base + ahead), seat.purpose == TARGET ? 0 : (uint64_t)seat.base}};
}

// combiners/mix.py: the voices at the present step; a whole draft is one while the spine goes its way.
struct Mixture {
    const Row& row;
    const long step;

    // The token of a whole draft, -1 where it has none here.
    int64_t copied(long member) const {
        const Board& b = row.b;
        const int64_t *text = b.tokens + row.begin(member), *spine = b.spine + row.r * b.depth;
        return step < row.nodes(member) && std::equal(spine, spine + step, text) ? text[step] : -1;
    }
    const double* q(long member) const { return row.b.q[row.place(step, member)]; }
    int64_t said(long member) const { return row.b.guessed[2 * row.place(step, member)]; }
    bool led(long member) const { return q(member) || said(member) >= 0; }
    int64_t token(long member) const { return led(member) ? said(member) : copied(member); }
    double* shares() const { return row.b.shares + (row.r * row.b.depth + step) * row.members; }
    // Members that are heard: those led first, as `Line` hears them.
    std::vector<long> voices() const {
        std::vector<long> found;
        for (long m = 0; m < row.members; m++)
            if (led(m)) found.push_back(m);
        for (long m = 0; m < row.members; m++)
            if (copied(m) >= 0) found.push_back(m);
        return found;
    }
    // Everybody's share in the mixture [vocab], how likely its tokens are to be kept, and whether to go on by that.
    void weigh(long vocab, double* mixture) const {
        const Board& b = row.b;
        const std::vector<long> heard = voices();
        if (heard.empty()) {
            b.going[row.r] = 0;
            return;
        }
        std::vector<double> trusts;
        double total = 0.0, confidence = 0.0, *share = shares();
        std::fill(share, share + row.members, 0.0);
        for (long m : heard) {
            trusts.push_back(row.trust(m, led(m) ? b.chances[2 * row.place(step, m)] : row.raw(row.begin(m) + step)));
            share[m] = row.weight(m) * trusts.back();
            total += share[m];
        }
        for (long m : heard) share[m] /= total;
        for (size_t i = 0; i < heard.size(); i++) confidence += share[heard[i]] * trusts[i];
        double chance = 1.0;
        for (long i = 0; i < step; i++) chance *= b.out_confidence[row.r * b.room + i];
        b.out_confidence[row.r * b.room + step] = confidence;
        if (chance * confidence < row.seat.threshold)
            b.going[row.r] = 0;
        else if (row.seat.greedy)
            take(elected(heard), heard);
        else
            fill(heard, vocab, mixture);
    }
    // Of point masses the heaviest token, the lowest on ties.
    int64_t elected(const std::vector<long>& heard) const {
        int64_t best = -1;
        double most = -1.0;
        for (long m : heard) {
            double votes = 0.0;
            for (long other : heard)
                if (token(other) == token(m)) votes += shares()[other];
            if (votes > most || (votes == most && token(m) < best)) most = votes, best = token(m);
        }
        return best;
    }
    // Distributions come before point masses, see `voices`.
    void fill(const std::vector<long>& heard, long vocab, double* mixture) const {
        std::vector<const double*> laws;
        std::vector<double> parts;
        for (long m : heard)
            if (q(m)) laws.push_back(q(m)), parts.push_back(shares()[m]);
        kernels().weighted(laws.data(), parts.data(), laws.size(), vocab, mixture);
        for (long m : heard)
            if (!q(m)) mixture[copied(m)] += shares()[m];
    }
    // The spine has its token; it is said to come from the drafter with the largest part in it.
    void take(int64_t chosen, const std::vector<long>& heard) const {
        const Board& b = row.b;
        long owner = -1;
        double most = -1.0;
        for (long m : heard) {
            const double part = shares()[m] * (q(m) ? q(m)[chosen] : token(m) == chosen ? 1.0 : 0.0);
            if (part > most) most = part, owner = m;
        }
        const long at = row.r * b.room + step;
        b.spine[row.r * b.depth + step] = chosen;
        b.out_tokens[at] = chosen, b.out_parents[at] = step - 1, b.out_owners[at] = owner;
        b.count[row.r] = b.length[row.r] = step + 1;
        b.going[row.r] = step + 1 < std::min(row.seat.depth, row.seat.nodes);
    }
};

// `read(place of its word, row, logits, number, spare [vocab])` for all rows of all drafters.
template <class F> void each(const Board* b, const Rows* said, long count, const int64_t* places, F&& read) {
    struct One {
        int64_t member;
        const float* logits;
        int64_t vocab;
    };
    std::vector<One> all;
    for (long s = 0; s < count; s++)
        for (long i = 0; i < said[s].count; i++)
            all.push_back({said[s].member, said[s].logits + i * said[s].vocab, said[s].vocab});
    const long rows = all.size();
    in_parallel(team_for(rows), [&](const Team& team) {
        std::vector<double> spare;
        for (long i = team.begin(rows); i < team.end(rows); i++) {
            const Row row = {*b, places[i]};
            spare.resize(all[i].vocab);
            read(row.place(b->steps, all[i].member), row, all[i].logits, i, spare);
        }
    });
}

// That of a sequence at the present step, of which `kept` are kept.
double* mixture_of(const Row& row, double* mixtures, long vocab, long kept) {
    return mixtures ? mixtures + (row.r * kept + std::min((long)row.b.steps, kept - 1)) * vocab : nullptr;
}

}  // namespace

// What drafters say at the present step: `said` [count] of their rows of logits, which are of the sequences `places`.
API void cospec_pool_hear(const Board* b, const Rows* said, long count, const int64_t* places) {
    each(b, said, count, places, [&](long place, const Row& row, const float* logits, long, std::vector<double>& spare) {
        guess(logits, row.seat.heat, stream_of(row, b->steps), spare, b->guessed + 2 * place, b->chances + 2 * place);
    });
}

// The same as laws: a token of greedy requests, otherwise q [rows, vocab], of which a token is drawn where that tells
// how right it was. The confidence is the largest probability, at temperature 1 for greedy requests.
API void cospec_pool_read(const Board* b, const Rows* said, long count, const int64_t* places, double* q) {
    each(b, said, count, places, [&](long place, const Row& row, const float* logits, long n, std::vector<double>& spare) {
        const long vocab = spare.size(), best = kernels().argmax(logits, vocab);
        if (best < 0) return;
        double* own = row.seat.greedy ? spare.data() : q + n * vocab;
        b->chances[2 * place] = softmax(logits, vocab, row.seat.greedy ? 1.0 : row.seat.heat, own);
        if (row.seat.greedy)
            b->guessed[2 * place] = best;
        else if (row.seat.purpose == TARGET)
            b->guessed[2 * place] = race(own, vocab, stream_of(row, b->steps));
        if (!row.seat.greedy) b->q[place] = own;
    });
}

// Where spines end their trees are written.
API void cospec_pool_fuse(const Board* b) {
    for (long r = 0; r < b->rows; r++)
        if (b->going[r]) fuse({*b, r});
}

// mixtures: [R, kept, vocab], of those that go on and draw; greedy ones take their token.
API void cospec_pool_mix(const Board* b, long vocab, double* mixtures, long kept) {
    in_parallel(mixtures ? team_for(b->rows) : 1, [&](const Team& team) {
        for (long r = team.begin(b->rows); r < team.end(b->rows); r++) {
            const Row row = {*b, r};
            if (b->going[r]) Mixture{row, b->steps}.weigh(vocab, mixture_of(row, mixtures, vocab, kept));
        }
    });
}

// Those that draw take a token of their mixtures, or what was `chosen` [R].
API void cospec_pool_draw(const Board* b, long vocab, double* mixtures, long kept, const int64_t* chosen) {
    in_parallel(team_for(b->rows), [&](const Team& team) {
        for (long r = team.begin(b->rows); r < team.end(b->rows); r++) {
            const Row row = {*b, r};
            if (!b->going[r] || row.seat.greedy) continue;
            const Mixture mixed = {row, b->steps};
            const double* mixture = mixture_of(row, mixtures, vocab, kept);
            mixed.take(chosen ? chosen[r] : race(mixture, vocab, stream_of(row, b->steps)), mixed.voices());
        }
    });
}
