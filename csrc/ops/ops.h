// Single operations over rows, and helpers that the fused forward shares.
#pragma once
#include <stdlib.h>

#include <atomic>

#include "ops/kernels.h"
#include "ops/thread_pool.h"

namespace cospec {

// An exported C symbol. All other symbols are hidden.
#define API extern "C" __attribute__((visibility("default")))

// Aligned memory that grows and never shrinks. Growing discards its contents.
struct Scratch {
    float* data = nullptr;
    size_t size = 0;
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { free(data); }
    float* reserve(size_t floats);
};

// Scratch of this thread, for kernels.
Scratch& thread_scratch();

// Copy rows [first, last) of one head's new keys and values to their pages.
void write_cache(const AttentionParams& params, long sequence, long kv_head, long first, long last);
// Floats that threads need to share the contexts of a batch; 0 where the threads have enough tasks without.
size_t attention_states(const AttentionParams& params, int threads);
// The part of one thread in the attention of all rows. `next` counts claimed tasks, `states` holds attention_states().
void run_attention(const AttentionParams& params, const Team& team, std::atomic<long>& next, float* states);

}  // namespace cospec
