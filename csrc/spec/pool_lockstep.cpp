#include "spec/pool_lockstep.h"

#include <chrono>

namespace cospec {

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

API void cospec_pool_lockstep(const LockstepDrafter* drafters, long count, const SequenceSlice* slices,
    const int64_t* ids, float* logits, int64_t* valid, double* seconds) {
    for (long i = 0; i < count; i++) {
        const LockstepDrafter& drafter = drafters[i];
        if (!drafter.num_slices) continue;
        const double started = now();
        const BatchView view = {slices, ids, nullptr, drafter.num_slices};
        if (valid[i]) valid[i] = cospec_llama_score(drafter.model, drafter.cache, &view, logits);
        seconds[i] = now() - started;
        slices += drafter.num_slices, ids += drafter.num_tokens;
        logits += drafter.num_slices * drafter.cache->vocab_size;
    }
}

}  // namespace cospec
