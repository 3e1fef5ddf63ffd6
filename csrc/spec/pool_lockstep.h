// Lockstep decoding of several native drafters along the same main paths.
#pragma once
#include "model/input_batch.h"
#include "spec/pool_batch.h"

namespace cospec {

// One drafter and its requests.
struct LockstepDrafter {
    int64_t drafter;
    LlamaModel* model;
    const KVCacheView* cache;
    const SequenceSlice* slices;  // [num_requests], the tokens to feed, with logits after the last one
    const int64_t* ids;           // tokens of the slices
    const int64_t* requests;      // [num_requests], indices into the batch
    int64_t num_requests;
};

// Buffers of the mix combiner. `distributions` holds all steps where mixtures are kept, otherwise one step.
struct MixBuffers {
    double* distributions;  // or null where no request samples
    double* mixtures;       // [R, kept_steps, vocab_size], or null where no request samples
    int64_t vocab_size, kept_steps;
};

}  // namespace cospec
