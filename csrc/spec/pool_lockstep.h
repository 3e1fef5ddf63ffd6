// The forwards of several drafters of a pool at one position.
#pragma once
#include "model/input_batch.h"

namespace cospec {

// One drafter and its share of the slices.
struct LockstepDrafter {
    LlamaModel* model;
    const KVCacheView* cache;
    int64_t num_slices, num_tokens;
};

// Score every drafter's slices, drafter after drafter, with one row of logits [num_slices, vocab_size] per slice.
// slices, ids: of all drafters, in their order.
// valid: [count], becomes 0 where the library cannot lay out a drafter's batch. The rows of a drafter with 0 are not
// written.
// seconds: [count], the time of each forward.
API void cospec_pool_lockstep(const LockstepDrafter* drafters, long count, const SequenceSlice* slices,
    const int64_t* ids, float* logits, int64_t* valid, double* seconds);

}  // namespace cospec
