// What a pool learns when tokens are committed (pool/record.py, combiners/job.py, calibration.py).
#include <math.h>

#include "ops.h"
#include "together.h"

constexpr double MEMORY = 0.98;  // as in routing/standing.py

// One drafter's part in one draft. The lessons are pairs (confidence, value); `taught` counts those of all parts.
struct Judged {
    double hits, seen, proposed, lessons;
};

namespace {

struct Teacher {
    const Row& row;
    const int64_t* committed;
    long count;
    double* lessons;
    long taught = 0;

    void teach(long member, double raw, double value, long rank = 0) {
        double *hits = row.bins(rank, member), *seen = hits + BINS;
        const int place = (int)(sqrt(raw) * (BINS - 1));
        if (seen[place] >= MOST) hits[place] /= 2, seen[place] /= 2;
        hits[place] += value;
        seen[place] += 1.0;
        if (rank > 0) return;
        if (lessons) lessons[2 * taught] = raw, lessons[2 * taught + 1] = value;
        taught++;
    }
    // Every node whose parent was committed; a position is right when any of its nodes is.
    Judged whole(long member) {
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
                teach(member, row.raw(begin + i), same);
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
    Judged led(long member) {
        const Board& b = row.b;
        const int64_t* spine = b.spine + row.r * b.depth;
        const long length = b.length[row.r];
        Judged part = {};
        long agreed = 0, heard = 0;
        while (agreed < std::min(length, count) && spine[agreed] == committed[agreed]) agreed++;
        while (heard < std::min(length + 1, b.depth) && said(heard, member)) heard++;
        part.proposed = heard;
        for (long t = 0; t < std::min({agreed + 1, heard, count}); t++) {
            const long place = row.place(t, member);
            const int64_t token = b.guessed[2 * place];  // -1 where there is a distribution from which nothing was drawn
            const double value = token < 0 ? b.q[place][committed[t]] : token == committed[t];
            teach(member, b.chances[2 * place], value);
            part.hits += value;
            part.seen++;
        }
        for (long t = 0; t < std::min({agreed + 1, heard, count}); t++) {
            const long at = 2 * row.place(t, member) + 1;
            if (b.guessed[at] >= 0) teach(member, b.chances[at], b.guessed[at] == committed[t], 1);
        }
        return part;
    }
    bool said(long step, long member) const {
        const long place = row.place(step, member);
        return row.b.guessed[2 * place] >= 0 || (row.b.q && row.b.q[place]);
    }
};

}  // namespace

// commits: [count, 2], a row of the board and how many of the tokens are its own.
// parts: [count, M]; lessons: room for two numbers of every node and guess on the board. Both null where nobody asks.
API void cospec_pool_learn(const Board* b, const int64_t* commits, long count, const int64_t* tokens, Judged* parts,
                           double* lessons) {
    for (long c = 0; c < count; c++) {
        const Row row = {*b, commits[2 * c]};
        double* standing = row.seat.standing;
        const double kept = pow(MEMORY, (double)commits[2 * c + 1]);
        for (long m = 0; m < b->members; m++) standing[HITS * b->members + m] *= kept, standing[SEEN * b->members + m] *= kept;
        Teacher teacher = {row, tokens, (long)commits[2 * c + 1], lessons};
        for (long m = 0; m < b->members; m++) {
            const long before = teacher.taught;
            Judged part = row.nodes(m) ? teacher.whole(m) : b->depth ? teacher.led(m) : Judged{};
            part.lessons = teacher.taught - before;
            standing[HITS * b->members + m] += part.hits;
            standing[SEEN * b->members + m] += part.seen;
            if (parts) parts[c * b->members + m] = part;
        }
        if (lessons) lessons += 2 * teacher.taught;
        tokens += commits[2 * c + 1];
    }
}
