// drafters/pool/lockstep.py as one call for all positions.
#include "spec/pool_lockstep.h"

#include <algorithm>
#include <chrono>
#include <vector>

namespace cospec {

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// A drafter's next input. Kept between calls, because fresh memory costs more than the data written to it.
struct NextInput {
    Scratch logits;
    std::vector<SequenceSlice> slices;
    std::vector<int64_t> ids, requests;
};
thread_local std::vector<NextInput> next_inputs;

struct LockstepDecoder {
    PoolBatch& b;
    const LockstepDrafter* drafters;
    const long count;
    const MixBuffers* mix;  // null: the fuse combiner
    int64_t* num_fed;       // [R]
    double* seconds;        // [count + 1]: the drafters' forwards, then reading and sampling
    double* distributions = mix ? mix->distributions : nullptr;
    std::vector<DrafterLogits> logits = {};
    std::vector<int64_t> requests = {};

    // Returns false where the library cannot lay out a drafter's batch.
    bool forward() {
        logits.clear(), requests.clear();
        for (long i = 0; i < count; i++) {
            NextInput& input = next_inputs[i];
            if (input.slices.empty()) continue;
            const double started = now();
            const long vocab_size = drafters[i].cache->vocab_size, rows = input.slices.size();
            const BatchView view = {input.slices.data(), input.ids.data(), nullptr, rows};
            float* out = input.logits.reserve(rows * vocab_size);
            if (!cospec_llama_score(drafters[i].model, drafters[i].cache, &view, out)) return false;
            logits.push_back({drafters[i].drafter, out, vocab_size, rows});
            requests.insert(requests.end(), input.requests.begin(), input.requests.end());
            seconds[i] += now() - started;
        }
        return true;
    }
    void read() {
        const double started = now();
        if (!mix) {
            pool_read_candidates(b, logits.data(), logits.size(), requests.data());
        } else {
            pool_read_distributions(b, logits.data(), logits.size(), requests.data(), distributions);
            if (mix->kept_steps > 1) distributions += (long)requests.size() * mix->vocab_size;
        }
        seconds[count] += now() - started;
    }
    void extend_paths() {
        if (!mix) {
            b.steps++;
            return pool_fuse(b);
        }
        pool_mix(b, mix->vocab_size, mix->mixtures, mix->kept_steps);
        const double started = now();
        if (mix->mixtures) pool_sample(b, mix->vocab_size, mix->mixtures, mix->kept_steps);
        seconds[count] += now() - started;
        b.steps++;
    }
    // Make the newest token of each active path the next input. Returns whether a path is active.
    bool feed() {
        bool any_active = false;
        for (long r = 0; r < b.num_requests; r++)
            if (b.active[r]) num_fed[r]++, any_active = true;
        for (long i = 0; i < count; i++) {
            NextInput& input = next_inputs[i];
            long kept = 0;
            input.ids.clear();
            for (size_t n = 0; n < input.slices.size(); n++) {
                const long r = input.requests[n];
                if (!b.active[r]) continue;
                const SequenceSlice& s = input.slices[n];
                input.slices[kept] = {s.start + s.num_tokens, 1, 0, 0, s.pages, s.num_pages};
                input.requests[kept++] = r;
                input.ids.push_back(b.main_path[r * b.max_depth + b.path_len[r] - 1]);
            }
            input.slices.resize(kept), input.requests.resize(kept);
        }
        return any_active;
    }
    bool run() {
        std::fill_n(b.candidates, 2 * b.max_depth * b.num_drafters * b.num_requests, -1);
        std::fill_n(b.active, b.num_requests, 1);
        if ((long)next_inputs.size() < count) next_inputs = std::vector<NextInput>(count);
        for (long i = 0; i < count; i++) {
            const LockstepDrafter& drafter = drafters[i];
            long num_tokens = 0;
            for (long n = 0; n < drafter.num_requests; n++) num_tokens += drafter.slices[n].num_tokens;
            next_inputs[i].slices.assign(drafter.slices, drafter.slices + drafter.num_requests);
            next_inputs[i].requests.assign(drafter.requests, drafter.requests + drafter.num_requests);
            next_inputs[i].ids.assign(drafter.ids, drafter.ids + num_tokens);
        }
        do {
            if (!forward()) return false;
            read();
            extend_paths();
        } while (feed());
        return true;
    }
};

}  // namespace

// num_fed: [R], how many tokens of each main path were fed. Returns 0 where the library cannot lay out a batch.
// Only the first batch can fail, because the pages have room for all later tokens.
API int cospec_pool_lockstep(PoolBatch* b, const LockstepDrafter* drafters, long count, const MixBuffers* mix,
    int64_t* num_fed, double* seconds) {
    return LockstepDecoder{*b, drafters, count, mix, num_fed, seconds}.run();
}

}  // namespace cospec
