// Spines that several drafters are led along: what each says at a step, and what becomes of it in a tree or a mixture.
#include <string.h>

#include "guesses.h"
#include "ops.h"
#include "together.h"

namespace {

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
            const long at = 2 * row.seat(step, m);
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
        if (chance * best->sure < b.thresholds[row.r]) return false;
        const long parent = node;
        const double before = chance;
        node = tree.put(parent, best->token, best->member, before * best->sure, best->sure);
        for (const Voice& voice : heard)
            if (voice.token != best->token) {
                const double sure = std::min(voice.sure, 1.0 - best->sure);
                const long leaf = tree.put(parent, voice.token, voice.member, before * sure, sure);
                if (voice.node >= 0) tails.push_back(voice), leaves.push_back(leaf);
            }
        const long at = 2 * row.seat(step, best->member) + 1;
        if (best->node < 0 && b.guessed[at] >= 0) {
            const double sure = std::min(row.trust(best->member, b.chances[at], 1), 1.0 - best->sure);
            tree.put(parent, b.guessed[at], best->member, before * sure, sure);
        }
        b.spine[row.r * b.depth + length++] = best->token;
        chance *= best->sure;
        follow(heard, best->token);
        return length < std::min(b.depths[row.r], b.nodes[row.r]) && tree.outranked(node) < b.nodes[row.r];
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
        tree.write(b, row.r, b.nodes[row.r]);
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

// The first of the largest. The maximum is found in lanes, since one after the other would wait for each comparison.
long likeliest(const double* x, long count) {
    constexpr long LANES = 8;
    double most[LANES];
    std::fill(most, most + LANES, x[0]);
    for (long i = 0; i + LANES <= count; i += LANES)
        for (long k = 0; k < LANES; k++) most[k] = x[i + k] > most[k] ? x[i + k] : most[k];
    double top = *std::max_element(most, most + LANES);
    for (long i = count / LANES * LANES; i < count; i++) top = std::max(top, x[i]);
    return std::find(x, x + count, top) - x;
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
    const double* q(long member) const { return row.b.q ? row.b.q[row.seat(step, member)] : nullptr; }
    double* shares() const { return row.b.shares + (row.r * row.b.depth + step) * row.members; }
    // Members that are heard: those led first, as `Line` hears them.
    std::vector<long> voices() const {
        std::vector<long> found;
        for (long m = 0; m < row.members; m++)
            if (q(m)) found.push_back(m);
        for (long m = 0; m < row.members; m++)
            if (copied(m) >= 0) found.push_back(m);
        return found;
    }
    // The mixture, how likely its tokens are to be kept, and the likeliest one.
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
            trusts.push_back(row.trust(m, q(m) ? b.chances[2 * row.seat(step, m)] : row.raw(row.begin(m) + step)));
            share[m] = row.weight(m) * trusts.back();
            total += share[m];
        }
        for (long m : heard) share[m] /= total;
        bool empty = true;
        for (long m : heard) {
            if (const double* own = q(m)) {
                const double part = share[m];
                if (empty)
                    for (long i = 0; i < vocab; i++) mixture[i] = part * own[i];
                else
                    for (long i = 0; i < vocab; i++) mixture[i] += part * own[i];
            } else {
                if (empty) std::fill(mixture, mixture + vocab, 0.0);
                mixture[copied(m)] += share[m];
            }
            empty = false;
        }
        for (size_t i = 0; i < heard.size(); i++) confidence += share[heard[i]] * trusts[i];
        double chance = 1.0;
        for (long i = 0; i < step; i++) chance *= b.out_confidence[row.r * b.room + i];
        b.out_confidence[row.r * b.room + step] = confidence;
        if (chance * confidence < b.thresholds[row.r])
            b.going[row.r] = 0;
        else if (b.greedy[row.r])
            b.spine[row.r * b.depth + step] = likeliest(mixture, vocab);
    }
    // The spine has its token; it is said to come from the drafter with the largest part in it.
    void take() const {
        const Board& b = row.b;
        const int64_t token = b.spine[row.r * b.depth + step];
        const double* share = shares();
        long owner = -1;
        double most = -1.0;
        for (long m : voices()) {
            const double part = share[m] * (q(m) ? q(m)[token] : copied(m) == token ? 1.0 : 0.0);
            if (part > most) most = part, owner = m;
        }
        const long at = row.r * b.room + step;
        b.out_tokens[at] = token, b.out_parents[at] = step - 1, b.out_owners[at] = owner;
        b.count[row.r] = b.length[row.r] = step + 1;
        b.going[row.r] = step + 1 < std::min(b.depths[row.r], b.nodes[row.r]);
    }
};

Stream stream_of(const Board& b, long row) {
    Stream stream;
    memcpy(&stream, b.streams + 6 * row, sizeof stream);
    stream.counter[2] += b.steps;
    return stream;
}

}  // namespace

// What a drafter says at the present step: its rows of logits [count, vocab] are those of the sequences `places`.
API void cospec_pool_hear(const Board* b, long member, const float* logits, long vocab, const int64_t* places, long count) {
    in_parallel(team_for(count), [&](const Team& team) {
        std::vector<double> q(vocab);
        for (long i = team.begin(count); i < team.end(count); i++) {
            const long row = places[i], at = 2 * ((b->steps * b->members + member) * b->rows + row);
            guess(logits + i * vocab, b->heats[row], stream_of(*b, row), q, b->guessed + at, b->chances + at);
        }
    });
}

// The same as distributions: its law at each row, q [count, vocab], with its largest probability as confidence.
API void cospec_pool_read(const Board* b, long member, const float* logits, long vocab, const int64_t* places, long count,
                          double* q) {
    in_parallel(team_for(count), [&](const Team& team) {
        for (long i = team.begin(count); i < team.end(count); i++) {
            const long seat = (b->steps * b->members + member) * b->rows + places[i];
            const double heat = b->heats[places[i]];
            if (kernels().argmax(logits + i * vocab, vocab) < 0) continue;
            b->chances[2 * seat] = softmax(logits + i * vocab, vocab, heat > 0.0 ? heat : 1.0, q + i * vocab);
            b->q[seat] = q + i * vocab;
        }
    });
}

// Where spines end their trees are written.
API void cospec_pool_fuse(const Board* b) {
    for (long r = 0; r < b->rows; r++)
        if (b->going[r]) fuse({*b, r});
}

// mixtures: [R, vocab] at step b->steps, of those that go on.
API void cospec_pool_mix(const Board* b, long vocab, double* mixtures) {
    in_parallel(team_for(b->rows), [&](const Team& team) {
        for (long r = team.begin(b->rows); r < team.end(b->rows); r++)
            if (b->going[r]) Mixture{{*b, r}, b->steps}.weigh(vocab, mixtures + r * vocab);
    });
}

API void cospec_pool_take(const Board* b) {
    for (long r = 0; r < b->rows; r++)
        if (b->going[r]) Mixture{{*b, r}, b->steps}.take();
}
