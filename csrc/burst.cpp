// Rounds of the same sequences as one call: draft, score, judge, and again, as long as nothing between them has to be
// decided elsewhere. A round does what drafters/model.py, engine/verifier.py and drafters/following.py do.
#include <poll.h>
#include <string.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "judge.h"
#include "packing.h"

namespace {

// A sequence as the call finds it; those with the longest drafts come first.
struct Lane {
    int64_t depth;  // tokens to draft
    int64_t base;  // known tokens
    int64_t fed;   // of them in the drafter's cache; all but the last where nothing is drafted
    int64_t left;  // tokens that it may still write
    const int32_t* pages;
    int64_t page_count;
    const int32_t* own_pages;  // of the drafter
    int64_t own_page_count;
    const int64_t* stops;  // tokens that may end it
    int64_t stop_count;
    uint64_t noise;  // that the drafter draws with, see cospec.draws.Purpose
    const double* q;  // [depth, vocabulary], what a draft that came along was drawn from, or null
    Asked asked;
};

struct Burst {
    Llama* target;
    const Cache* cache;
    Llama* drafter;
    const Cache* own_cache;
    const Lane* lanes;
    const int64_t* tokens;  // known ones behind `fed`, lane after lane
    const int64_t* drafts;  // [count, depth], those that came along; null where they are made here
    int64_t count, drafting, depth, rounds;  // lanes, those that are drafted for, the longest draft
    double limit;  // seconds; no further round begins that would end later, by the mean of those before
    int64_t wake;  // a file descriptor: no further round begins once it can be read; less than 0: none
    // [rounds, count, 4 + depth]: drafted, accepted, the token after them, and whether that is a bonus, or -1 where the
    // law is not made of numbers; then what was drafted.
    int64_t* written;
    int64_t* fed;  // [count], of the drafter's cache in the end
    double* seconds;  // [rounds, 3]: drafting, scoring, judging
};

constexpr long HEAD = 4;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// A sequence as it is written.
struct Line {
    std::vector<int64_t> tokens;  // known ones behind `fed`
    int64_t base, left;
    long fed() const { return base - (long)tokens.size(); }
};

// Room that is kept between calls, since fresh memory costs more than what is written to it.
struct Room {
    Scratch logits, q;
    std::vector<Line> lines;
    std::vector<Segment> segments;
    std::vector<int64_t> ids, parents, depths, drafted, nodes, found;
    std::vector<double> temperatures;
    std::vector<uint64_t> streams;
    std::vector<Case> cases;
};
thread_local Room room;

struct Run {
    Burst& b;
    const long vocab = b.cache->vocabulary;
    double* q = nullptr;  // [drafting, depth, vocab]

    void open() {
        room.lines.resize(b.count);
        const int64_t* token = b.tokens;
        for (long i = 0; i < b.count; i++) {
            const Lane& lane = b.lanes[i];
            room.lines[i].tokens.assign(token, token + lane.base - lane.fed);
            room.lines[i].base = lane.base, room.lines[i].left = lane.left;
            token += lane.base - lane.fed;
        }
        room.depths.clear();
        for (long i = 0; i < b.drafting; i++) room.depths.push_back(b.lanes[i].depth);
        room.drafted.resize(b.count * b.depth);
        if (b.drafts) room.drafted.assign(b.drafts, b.drafts + b.count * b.depth);
    }

    bool draft() {
        bool draws = false;
        room.segments.clear(), room.ids.clear(), room.temperatures.clear(), room.streams.clear();
        for (long i = 0; i < b.drafting; i++) {
            const Lane& lane = b.lanes[i];
            const Line& line = room.lines[i];
            const uint64_t base = line.base, size = line.tokens.size();
            room.segments.push_back({line.fed(), (long)size, 0, (long)size - 1, lane.own_pages, lane.own_page_count});
            room.ids.insert(room.ids.end(), line.tokens.begin(), line.tokens.end());
            room.temperatures.push_back(lane.asked.shape.temperature);
            for (uint64_t word : {lane.asked.seed, lane.noise, (uint64_t)0, (uint64_t)0, base, lane.noise == TARGET ? 0 : base})
                room.streams.push_back(word);
            draws |= lane.asked.shape.temperature > 0.0;
        }
        q = draws ? (double*)room.q.reserve(2 * b.drafting * b.depth * vocab) : nullptr;
        std::fill(room.drafted.begin(), room.drafted.end(), -1);
        const Given given = {room.segments.data(), room.ids.data(), nullptr, b.drafting};
        const Rollout rollout = {room.temperatures.data(), room.streams.data(), room.depths.data(), b.depth, nullptr, 0, q,
                                 room.drafted.data(), nullptr};
        return cospec_llama_rollout(b.drafter, b.own_cache, &given, &rollout);
    }

    // Tokens drafted for a lane, up to where the drafter's logits were no numbers.
    long nodes(long i) const {
        const int64_t* own = room.drafted.data() + i * b.depth;
        return std::find(own, own + b.lanes[i].depth, -1) - own;
    }

    bool score(float** logits) {
        long row = 0;
        for (auto* column : {&room.ids, &room.parents, &room.nodes}) column->clear();
        room.segments.clear(), room.cases.clear();
        for (long i = 0; i < b.count; i++) {
            const Lane& lane = b.lanes[i];
            const Line& line = room.lines[i];
            const long n = nodes(i), place = room.nodes.size();
            const int64_t* own = room.drafted.data() + i * b.depth;
            const bool drawn = q && lane.noise == DRAFT && lane.asked.shape.temperature > 0.0;
            room.segments.push_back({line.base - 1, 1 + n, n, 0, lane.pages, lane.page_count});
            room.ids.push_back(line.tokens.back());
            room.ids.insert(room.ids.end(), own, own + n);
            room.nodes.insert(room.nodes.end(), own, own + n);
            for (long node = 0; node < n; node++) room.parents.push_back(node - 1), room.nodes.push_back(node - 1);
            room.cases.push_back({row, row, n + 1, place, n, drawn ? q + i * b.depth * vocab : lane.q,
                                  (uint64_t)line.base, lane.asked});
            row += n + 1;
        }
        *logits = room.logits.reserve(row * vocab);
        const Given given = {room.segments.data(), room.ids.data(), room.parents.data(), b.count};
        return cospec_llama_score(b.target, b.cache, &given, *logits);
    }

    const Verdict* judge(const float* logits) {
        const double weight = 1.0;
        const Source source = {&logits, &weight, 1, vocab, OWN, 0.0};
        room.found.resize(b.count * sizeof(Verdict) / sizeof(int64_t) + room.nodes.size());
        cospec_judge(&source, room.cases.data(), b.count, room.nodes.data(), room.found.data());
        return (const Verdict*)room.found.data();
    }

    // Write what the round gave to a lane; whether another round could be like it.
    bool take(long i, const Verdict& v, int64_t* out) {
        const Lane& lane = b.lanes[i];
        Line& line = room.lines[i];
        const int64_t* own = room.drafted.data() + i * b.depth;
        const long n = nodes(i), kept = std::max(0L, std::min((long)v.path, n - 1));  // the last one was not fed
        const int64_t head[HEAD] = {n, v.path, v.token, v.broken ? -1 : v.bonus};
        memcpy(out, head, sizeof head);
        std::copy(own, own + n, out + HEAD);
        if (v.broken) return false;
        line.tokens.assign(own + kept, own + v.path);
        line.tokens.push_back(v.token);
        line.base += v.path + 1, line.left -= v.path + 1;
        const int64_t* end = lane.stops + lane.stop_count;
        bool stopped = std::find(lane.stops, end, v.token) != end;
        for (long node = 0; node < v.path; node++) stopped |= std::find(lane.stops, end, own[node]) != end;
        b.fed[i] = line.fed();
        return !stopped && line.left > lane.depth;
    }

    // Whether somebody has something to say that should not wait for further rounds.
    bool called() const {
        pollfd one = {(int)b.wake, POLLIN, 0};
        return b.wake >= 0 && poll(&one, 1, 0) > 0;
    }

    long run() {
        const double begun = now();
        open();
        for (long round = 0; round < b.rounds; round++) {
            const double started = now();
            if (round && ((started - begun) * (round + 1) > b.limit * round || called())) return round;
            if (b.drafting && !draft()) return round;
            const double drafted = now();
            float* logits;
            if (!score(&logits)) return round;
            const double scored = now();
            const Verdict* verdicts = judge(logits);
            double* spent = b.seconds + 3 * round;
            spent[0] = drafted - started, spent[1] = scored - drafted, spent[2] = now() - scored;
            int64_t* out = b.written + round * b.count * (HEAD + b.depth);
            bool alike = true;
            for (long i = 0; i < b.count; i++) alike &= take(i, verdicts[i], out + i * (HEAD + b.depth));
            if (!alike) return round + 1;
        }
        return b.rounds;
    }
};

}  // namespace

// How many rounds were run. Less than one where something is amiss with the batch; then nothing was done.
API long cospec_burst(Burst* burst) { return Run{*burst}.run(); }
