// The law of rows of logits, and drafts judged by it: what cospec.sampling and cospec.rules do, as one call for all
// sequences of a round.
#include "judge.h"

#include <math.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "draws.h"

namespace {

enum Rule { MATCH = 0, REJECTION = 1, BLOCK = 2 };

struct Draft {
    const int64_t *tokens, *parents;
    int64_t* path;
};

void renormalise(double* probs, long vocab) {
    double sum = 0.0;
    for (long i = 0; i < vocab; i++) sum += probs[i];
    for (long i = 0; i < vocab; i++) probs[i] /= sum;
}

void keep_above(double* probs, long vocab, double least) {
    for (long i = 0; i < vocab; i++) probs[i] = probs[i] < least ? 0.0 : probs[i];
    renormalise(probs, vocab);
}

// Equal probabilities are kept or dropped together, so that no order of ties matters.
void truncate(const Shape& shape, long vocab, double* probs) {
    std::vector<double> heap;
    auto likeliest_first = [&] { heap.assign(probs, probs + vocab), std::make_heap(heap.begin(), heap.end()); };
    auto next = [&] {
        std::pop_heap(heap.begin(), heap.end());
        const double value = heap.back();
        return heap.pop_back(), value;
    };
    if (shape.top_k > 0 && shape.top_k < vocab) {
        likeliest_first();
        double least = 0.0;
        for (long i = 0; i < shape.top_k; i++) least = next();
        keep_above(probs, vocab, least);
    }
    if (shape.top_p < 1.0) {
        likeliest_first();
        double least = next();
        for (double sum = least; sum < shape.top_p && !heap.empty(); sum += least) least = next();
        keep_above(probs, vocab, least);
    }
    if (shape.min_p > 0.0) keep_above(probs, vocab, shape.min_p * *std::max_element(probs, probs + vocab));
}

// The first of the largest; -1 where there is something that is no number, or the largest is infinite.
long argmax(const float* x, long count) { return kernels().argmax(x, count); }
long argmax(const double* x, long count) {
    long best = 0;
    bool odd = false;
    for (long i = 0; i < count; i++) {
        odd |= x[i] != x[i];
        if (x[i] > x[best]) best = i;
    }
    return odd || isinf(x[best]) ? -1 : best;
}

// The law of one row, [vocab]; false, and any law, where the row is not made of numbers.
template <class T> bool law_of(const T* logits, long vocab, const Shape& shape, double* out) {
    if (shape.temperature > 0.0) {
        const double most = softmax(logits, vocab, shape.temperature, out);
        if (most > 0.0) {
            truncate(shape, vocab, out);
            return true;
        }
    } else {
        const long token = argmax(logits, vocab);
        if (token >= 0) {
            memset(out, 0, sizeof(double) * vocab);
            out[token] = 1.0;
            return true;
        }
    }
    std::fill(out, out + vocab, 1.0 / vocab);
    return false;
}

struct Judge {
    const Source& source;
    long vocab;
    const Case& c;
    const Draft& draft;
    double* laws;     // [nodes + 1, vocab], filled as far as rows are looked at
    double* spare;    // [vocab]
    double* blended;  // [vocab], of the row that was looked at last
    std::vector<bool> numbers;
    bool lost = false;  // no weight of a draw was positive

    double* law(long row) const { return laws + row * vocab; }

    // What `use` makes of the row's logits, counted from the case's first; only its own logits are single precision.
    template <class Use> auto with(long row, Use use) const {
        if (source.form == OWN) return use(source.row(0, c.row + row));
        blend_row(source, c.row + row, blended, spare);
        return use((const double*)blended);
    }

    const double* read(long row) {
        numbers[row] = with(row, [&](auto* logits) { return law_of(logits, vocab, c.asked.shape, law(row)); });
        return law(row);
    }

    long likeliest(long row) const {
        return with(row, [&](auto* logits) { return argmax(logits, vocab); });
    }

    long draw(const double* weights, uint64_t position, Purpose purpose) {
        const uint64_t base = purpose == TARGET ? 0 : c.base;  // the target's noise is the same in every round
        const long token = race(weights, vocab, {{c.asked.seed, purpose}, {0, 0, position, base}});
        lost |= token < 0;
        return token;
    }

    // The target's own token behind `accepted` nodes; -1 where the law is not known.
    long own(long row, long accepted) {
        if (row >= c.count) return -1;
        if (c.asked.shape.temperature > 0.0) return draw(read(row), c.base + accepted, TARGET);
        const long token = likeliest(row);
        numbers[row] = token >= 0;
        return token < 0 ? 0 : token;
    }

    double uniform(long node) const {
        return kernels().uniform({{c.asked.seed, ACCEPT}, {c.base, 0, 0, c.base}}, node);
    }

    double drawn_with(long node) const { return c.q ? c.q[node * vocab + draft.tokens[node]] : 1.0; }

    // What a draft token leaves of the law, into `spare`; returns its sum.
    double surplus(long node, double scale) const {
        if (c.q) return kernels().surplus(law(node), c.q + node * vocab, scale, vocab, spare);
        std::fill(spare, spare + vocab, 0.0);
        spare[draft.tokens[node]] = 1.0;
        return kernels().surplus(law(node), spare, scale, vocab, spare);
    }

    // The law itself where rounding leaves nothing of it.
    long recovered(long node, double scale) {
        const double left = surplus(node, scale);
        return draw(left > 0.0 ? spare : law(node), c.base + node, RECOVER);
    }

    Verdict chain(long kept, long token, bool bonus) const {
        for (long node = 0; node < kept; node++) draft.path[node] = node;
        return {kept, token, bonus};
    }

    Verdict match() {
        for (long node = -1, length = 0;; length++) {
            const long token = own(node + 1, length);
            long follower = -1;
            bool offered = false;
            for (long child = node + 1; child < c.nodes && follower < 0; child++)
                if (draft.parents[child] == node) {
                    offered = true;
                    if (draft.tokens[child] == token) follower = child;
                }
            if (follower < 0) return {length, token, !offered && c.nodes > 0};
            draft.path[length] = node = follower;
        }
    }

    Verdict rejection() {
        for (long node = 0; node < c.nodes; node++)
            if (!(uniform(node) * drawn_with(node) < read(node)[draft.tokens[node]]))
                return chain(node, recovered(node, 1.0), false);
        return chain(c.nodes, own(c.nodes, c.nodes), true);
    }

    Verdict block() {
        double weight = 1.0, kept_weight = 1.0;
        long kept = 0;
        read(0);
        for (long length = 1; length <= c.nodes; length++) {
            const long node = length - 1;
            weight = std::min(1.0, weight * law(node)[draft.tokens[node]] / drawn_with(node));
            if (weight == 0.0) break;  // no longer prefix can be kept
            double chance = weight;
            if (length < c.nodes) {
                read(length);
                const double mass = surplus(length, weight);
                chance = mass > 0.0 ? mass / (mass + (1.0 - weight)) : 0.0;
            }
            if (uniform(node) < chance) kept = length, kept_weight = weight;
        }
        if (kept == c.nodes) return chain(kept, own(kept, kept), true);
        return chain(kept, recovered(kept, kept_weight), false);
    }

    Verdict decide() {
        numbers.assign(c.count + 1, true);
        Verdict v = {0, -1, 0, 0};
        if (c.count > 0) v = c.nodes == 0 || c.asked.rule == MATCH ? match() : c.asked.rule == REJECTION ? rejection() : block();
        v.broken = lost || !numbers[0];
        for (long i = 0; i < v.path; i++) v.broken |= draft.path[i] + 1 < c.count && !numbers[draft.path[i] + 1];
        return v;
    }
};

// Numbers that a case has to look at, counted as often as they cost more than comparing one.
long work(const Case& c, const Source& source) {
    const long blending = source.form == OWN ? 0 : 6 * source.members;
    return c.count * source.vocab * (blending + (c.asked.shape.temperature > 0.0 ? 20 : 1));
}

constexpr long WORTH_SHARING = 250000;  // some fifty microseconds of work
constexpr long WORTH_WAKING = 1000000;  // threads that sleep take as long to come as this takes a single one

}  // namespace

API void cospec_judge(const Source* source, const Case* cases, long count, const int64_t* nodes, int64_t* found) {
    Verdict* verdicts = (Verdict*)found;
    int64_t* paths = found + count * sizeof(Verdict) / sizeof(int64_t);
    const long vocab = source->vocab;
    std::atomic<long> next{0};
    long all = 0;
    for (long i = 0; i < count; i++) all += work(cases[i], *source);
    in_parallel(all < (pool_awake() ? WORTH_SHARING : WORTH_WAKING) ? 1 : team_for(count), [&](const Team&) {
        for (long i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
            const Case& c = cases[i];
            const Draft draft = {nodes + c.place, nodes + c.place + c.nodes, paths + c.place};
            double* room = (double*)own_scratch().reserve(2 * (c.nodes + 3) * vocab);
            Judge judge{*source, vocab, c, draft, room + 2 * vocab, room, room + vocab, {}};
            verdicts[i] = judge.decide();
            for (long row = c.first; row < c.row; row++) verdicts[i].broken |= judge.likeliest(row - c.row) < 0;
        }
    });
}
