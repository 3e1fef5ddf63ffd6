// One round of a pool: R sequences, M drafters, D steps of a spine. See cospec.drafters.pool.compiled.
#pragma once
#include <math.h>
#include <stdint.h>

#include <algorithm>
#include <vector>

#include "ops.h"

// What a round asks for one sequence.
struct Seat {
    double* standing;        // [6, M] and one more, see `Evidence`
    int64_t greedy;          // whether it takes the likeliest tokens
    uint64_t seed, purpose;  // what its tokens are drawn with
    double heat;             // its temperature, of which 0 takes the likeliest token
    uint64_t able;           // drafters that may take part, as bits
    int64_t base;            // committed tokens
    int64_t most;            // one more than take part at most, or 0: the routing says
    int64_t depth, nodes;    // of the longest path, and in all
    double threshold;        // a spine ends where its chance falls below it
};

struct Board {
    int64_t rows, members, depth;
    int64_t room;   // nodes of the largest tree in the making, of one sequence
    int64_t steps;  // that everybody was heard at

    const Seat* seats;      // [R]
    const double* prior;    // [2, M]: rates, odds
    double* calibrations;   // [2, 2, M, 2, bins]: drawn or greedy; first or next best guess; drafter; hits, seen
    double* weights;        // [R, M], of those who take part, summing to 1; 0 for the others
    double* odds;           // [R, M]

    int64_t* spans;                   // [R, M, 2], where the whole draft of a drafter for a sequence begins, its nodes
    const int64_t *tokens, *parents;  // [T] of all whole drafts
    const double* raw;                // [T], their confidences, or null where nobody gives any

    // D is 0 where nobody is led.
    int64_t* guessed;  // [D, M, R, 2], tokens of drafters that are led, -1 for none
    double* chances;   // [D, M, R, 2], their confidences
    const double** q;  // [D, M, R], distributions, each null where there is none
    double* shares;    // [R, D, M], of the mixture

    int64_t* spine;   // [R, D]
    int64_t* length;  // [R], of the spine
    int64_t* going;   // [R]

    int64_t* count;  // [R], nodes of the draft
    int64_t *out_tokens, *out_parents, *out_owners;  // [R, room]
    double* out_confidence;                          // [R, room]
};

enum Evidence { HITS = 0, SEEN = 1, CHANCE = 2, LOOKED = 3, IDLE = 4, SCORE = 5, ACCEPTED = 6 };
// How drafters are chosen: drafters/routing.
enum Way { ALL = 0, HEDGE = 1, EXPLORE = 2 };

// drafters/calibration.py and pool/record.py
constexpr int BINS = 17;
constexpr double EDGE = 0.01, CALIBRATION_PRIOR = 8.0, MOST = 4096.0, UNKNOWN = 0.5, NOVELTY_RATE = 0.05;

// One sequence of a board.
struct Row {
    const Board& b;
    const long r, members = b.members;
    const Seat& seat = b.seats[r];

    double* own(Evidence kind) const { return seat.standing + kind * members; }

    double* bins(long rank, long member) const {
        return b.calibrations + (((seat.greedy ? 2 : 0) + rank) * members + member) * 2 * BINS;
    }
    double trust(long member, double raw, long rank = 0) const {
        const double* hits = bins(rank, member);
        const int place = (int)(sqrt(raw) * (BINS - 1));
        double chance = (hits[place] + CALIBRATION_PRIOR * raw) / (hits[BINS + place] + CALIBRATION_PRIOR);
        chance = chance < EDGE ? EDGE : chance > 1.0 - EDGE ? 1.0 - EDGE : chance;
        const double raised = chance * b.odds[r * members + member];
        return raised / (raised + 1.0 - chance);
    }
    double weight(long member) const { return b.weights[r * members + member]; }
    long begin(long member) const { return b.spans[2 * (r * members + member)]; }
    long nodes(long member) const { return b.spans[2 * (r * members + member) + 1]; }
    double raw(long at) const { return b.raw ? b.raw[at] : UNKNOWN; }
    long place(long step, long member) const { return (step * members + member) * b.rows + r; }
    // Those with a whole draft, the heaviest first.
    std::vector<long> drafters() const {
        std::vector<long> found;
        for (long m = 0; m < members; m++)
            if (nodes(m)) found.push_back(m);
        std::stable_sort(found.begin(), found.end(), [&](long a, long c) { return weight(a) > weight(c); });
        return found;
    }
};

// combiners/growing.py
struct Growing {
    std::vector<int64_t> tokens, parents, owners;
    std::vector<double> scores, confidence;

    long put(long parent, int64_t token, long owner, double score, double sure) {
        for (long i = 0; i < (long)tokens.size(); i++)
            if (parents[i] == parent && tokens[i] == token) return i;
        tokens.push_back(token), parents.push_back(parent), owners.push_back(owner);
        scores.push_back(score), confidence.push_back(sure);
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
    long outranked(long node) const {
        long found = 0;
        for (long i = 0; i < (long)scores.size(); i++)
            if (i != node) found += i < node ? scores[i] >= scores[node] : scores[i] > scores[node];
        return found;
    }
    void write(const Board& b, long row, long count) const {
        const std::vector<long> nodes = best(count);
        std::vector<long> place(tokens.size() + 1, -1);
        for (long i = 0; i < (long)nodes.size(); i++) place[nodes[i] + 1] = i;
        for (long i = 0; i < (long)nodes.size(); i++) {
            const long at = row * b.room + i, node = nodes[i];
            b.out_tokens[at] = tokens[node];
            b.out_parents[at] = place[parents[node] + 1];
            b.out_owners[at] = owners[node];
            b.out_confidence[at] = confidence[node];
        }
        b.count[row] = nodes.size();
    }
};

// What is read of one drafter at one position.
struct Rows {
    int64_t member;
    const float* logits;  // [count, vocab]
    int64_t vocab, count;
};

// See csrc/leading.cpp.
API void cospec_pool_hear(const Board* b, const Rows* said, long count, const int64_t* places);
API void cospec_pool_read(const Board* b, const Rows* said, long count, const int64_t* places, double* q);
API void cospec_pool_fuse(const Board* b);
API void cospec_pool_mix(const Board* b, long vocab, double* mixtures, long kept);
API void cospec_pool_draw(const Board* b, long vocab, double* mixtures, long kept, const int64_t* chosen);
