// What a pool learns when tokens are committed (pool/record.py, combiners/job.py, calibration.py).
#include <math.h>

#include "together.h"

constexpr double MEMORY = 0.98;  // as in routing/standing.py

// routing/explore.py
constexpr double EPSILON = 0.05, RATE = 0.3;

// One drafter's part in one draft; `agreed`: the sum of what eq. 2 of CoSine says of its `lessons`.
struct Judged {
    double hits, seen, proposed, lessons, agreed;
};

namespace {

// routing/explore.py, one term of eq. 2
double agreement(double confidence, double accuracy) {
    const double c = std::min(std::max(confidence, EPSILON), 1.0 - EPSILON);
    const double d = std::min(std::max(accuracy, EPSILON), 1.0 - EPSILON);
    return c * d / (c * d + (1.0 - c) * (1.0 - d));
}

struct Teacher {
    const Row& row;
    const int64_t* committed;
    long count;

    void teach(Judged& part, long member, double raw, double value, long rank = 0) const {
        double *hits = row.bins(rank, member), *seen = hits + BINS;
        const int place = (int)(sqrt(raw) * (BINS - 1));
        if (seen[place] >= MOST) hits[place] /= 2, seen[place] /= 2;
        hits[place] += value;
        seen[place] += 1.0;
        if (rank == 0) part.lessons++, part.agreed += agreement(raw, value);
    }
    // Every node whose parent was committed; a position is right when any of its nodes is.
    Judged whole(long member) const {
        const Board& b = row.b;
        const long begin = row.begin(member), nodes = row.nodes(member);
        Judged part = {};
        std::vector<long> depth(nodes + 1, 0);
        for (long i = 0; i < nodes; i++) {
            depth[i + 1] = depth[b.parents[begin + i] + 1] + 1;
            part.proposed = std::max(part.proposed, (double)depth[i + 1]);
        }
        long node = -1;
        for (long t = 0; t < count; t++) {
            long right = -1;
            bool any = false;
            for (long i = node + 1; i < nodes; i++) {
                if (b.parents[begin + i] != node) continue;
                const bool same = b.tokens[begin + i] == committed[t];
                teach(part, member, row.raw(begin + i), same);
                any = true;
                if (same && right < 0) right = i;
            }
            if (!any) break;
            part.seen++;
            if (right < 0) break;
            part.hits++;
            node = right;
        }
        return part;
    }
    // The guesses up to the first committed token that the spine has not.
    Judged led(long member) const {
        const Board& b = row.b;
        const int64_t* spine = b.spine + row.r * b.depth;
        const long length = b.length[row.r];
        Judged part = {};
        long agreed = 0, heard = 0;
        while (agreed < std::min(length, count) && spine[agreed] == committed[agreed]) agreed++;
        while (heard < std::min(length + 1, (long)b.depth) && said(heard, member)) heard++;
        part.proposed = heard;
        for (long t = 0; t < std::min({agreed + 1, heard, count}); t++) {
            const long place = row.place(t, member);
            const int64_t token = b.guessed[2 * place];  // -1 where there is a distribution from which nothing was drawn
            const double value = token < 0 ? b.q[place][committed[t]] : token == committed[t];
            teach(part, member, b.chances[2 * place], value);
            part.hits += value;
            part.seen++;
        }
        for (long t = 0; t < std::min({agreed + 1, heard, count}); t++) {
            const long at = 2 * row.place(t, member) + 1;
            if (b.guessed[at] >= 0) teach(part, member, b.chances[at], b.guessed[at] == committed[t], 1);
        }
        return part;
    }
    bool said(long step, long member) const {
        const long place = row.place(step, member);
        return row.b.guessed[2 * place] >= 0 || row.b.q[place];
    }
};

}  // namespace

// commits: [size], of each a row of the board, how many of its draft were accepted, how many tokens were committed, and
// those. `scores`: whether those of routing `explore` move.
API void cospec_pool_learn(const Board* b, const int64_t* commits, long size, long scores) {
    for (const int64_t* commit = commits; commit < commits + size; commit += 3 + commit[2]) {
        const Row row = {*b, commit[0]};
        const long own = commit[2];
        const double kept = pow(MEMORY, (double)own);
        const Teacher teacher = {row, commit + 3, own};
        row.own(ACCEPTED)[0] = commit[1];
        for (long m = 0; m < b->members; m++) {
            const Judged part = row.nodes(m) ? teacher.whole(m) : b->depth ? teacher.led(m) : Judged{};
            row.own(HITS)[m] = row.own(HITS)[m] * kept + part.hits;
            row.own(SEEN)[m] = row.own(SEEN)[m] * kept + part.seen;
            if (!scores || part.lessons == 0.0) continue;
            const double wrong = std::max(0.0, part.proposed - part.lessons) * agreement(0.5, 0.0);
            const double mean = (part.agreed + wrong) / std::max(part.proposed, part.lessons);
            row.own(SCORE)[m] += RATE * (mean - row.own(SCORE)[m]);
        }
    }
}
