// Drafters that all run here, led along their spines as one call: what combiners/leading.py does position by position.
// Between two forwards of theirs nothing is left to be decided elsewhere, and nothing has to be laid out there.
#include <chrono>
#include <vector>

#include "packing.h"
#include "together.h"

// One drafter and the sequences that it takes.
struct Led {
    int64_t member;
    Llama* model;
    const Cache* cache;
    const Segment* segments;  // [count], what it has not fed yet, with logits behind the last token
    const int64_t *ids, *places;  // their tokens; [count], rows of the board
    int64_t count;
};

// What `mix` is made of. mixtures: [R, kept, vocab], or null where nobody draws; then there are no distributions either.
// Those are of all steps where mixtures are kept, otherwise of one.
struct Mixing {
    double *distributions, *mixtures;
    int64_t vocab, kept;
};

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// What a drafter is fed next. Kept between calls, as fresh memory costs more than what is written to it.
struct Ahead {
    Scratch logits;
    std::vector<Segment> segments;
    std::vector<int64_t> ids, places;
};
thread_local std::vector<Ahead> aheads;

struct Leading {
    Board& b;
    const Led* led;
    const long count;
    const Mixing* mixing;
    int64_t* fed;     // [R]
    double* seconds;  // [count + 1], of the drafters' forwards; of reading logits and drawing
    double* distributions = mixing ? mixing->distributions : nullptr;
    std::vector<Rows> said = {};
    std::vector<int64_t> places = {};

    // False where a drafter refuses its batch.
    bool forward() {
        said.clear(), places.clear();
        for (long i = 0; i < count; i++) {
            Ahead& own = aheads[i];
            if (own.segments.empty()) continue;
            const double started = now();
            const long vocab = led[i].cache->vocabulary, rows = own.segments.size();
            const Given given = {own.segments.data(), own.ids.data(), nullptr, rows};
            float* logits = own.logits.reserve(rows * vocab);
            if (!cospec_llama_score(led[i].model, led[i].cache, &given, logits)) return false;
            said.push_back({led[i].member, logits, vocab, rows});
            places.insert(places.end(), own.places.begin(), own.places.end());
            seconds[i] += now() - started;
        }
        return true;
    }
    void read() {
        const double started = now();
        if (!mixing) {
            cospec_pool_hear(&b, said.data(), said.size(), places.data());
        } else {
            cospec_pool_read(&b, said.data(), said.size(), places.data(), distributions);
            if (mixing->kept > 1) distributions += (long)places.size() * mixing->vocab;
        }
        seconds[count] += now() - started;
    }
    void advance() {
        if (!mixing) {
            b.steps++;
            return cospec_pool_fuse(&b);
        }
        cospec_pool_mix(&b, mixing->vocab, mixing->mixtures, mixing->kept);
        const double started = now();
        if (mixing->mixtures) cospec_pool_draw(&b, mixing->vocab, mixing->mixtures, mixing->kept, nullptr);
        seconds[count] += now() - started;
        b.steps++;
    }
    // The newest token of the spines that go on; whether there are any.
    bool feed() {
        bool any = false;
        for (long r = 0; r < b.rows; r++)
            if (b.going[r]) fed[r]++, any = true;
        for (long i = 0; i < count; i++) {
            Ahead& own = aheads[i];
            long kept = 0;
            own.ids.clear();
            for (size_t n = 0; n < own.segments.size(); n++) {
                const long r = own.places[n];
                if (!b.going[r]) continue;
                const Segment& s = own.segments[n];
                own.segments[kept] = {s.start + s.tokens, 1, 0, 0, s.pages, s.page_count};
                own.places[kept++] = r;
                own.ids.push_back(b.spine[r * b.depth + b.length[r] - 1]);
            }
            own.segments.resize(kept), own.places.resize(kept);
        }
        return any;
    }
    bool run() {
        if ((long)aheads.size() < count) aheads = std::vector<Ahead>(count);
        for (long i = 0; i < count; i++) {
            long tokens = 0;
            for (long n = 0; n < led[i].count; n++) tokens += led[i].segments[n].tokens;
            aheads[i].segments.assign(led[i].segments, led[i].segments + led[i].count);
            aheads[i].places.assign(led[i].places, led[i].places + led[i].count);
            aheads[i].ids.assign(led[i].ids, led[i].ids + tokens);
        }
        do {
            if (!forward()) return false;
            read();
            advance();
        } while (feed());
        return true;
    }
};

}  // namespace

// fed [R]: how many tokens of each spine were fed. False where a drafter refuses its batch: the first one, since there is
// room for all that follow.
API int cospec_pool_lead(Board* b, const Led* led, long count, const Mixing* mixing, int64_t* fed, double* seconds) {
    return Leading{*b, led, count, mixing, fed, seconds}.run();
}
