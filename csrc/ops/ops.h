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

// Rows of one sequence per task: enough to share keys and values, few enough for their state to stay in cache.
long attention_rows(const AttentionParams& params);
// Copy rows [first, last) of one head's new keys and values to their pages.
void write_cache(const AttentionParams& params, long sequence, long kv_head, long first, long last);
// Claim and run tasks (sequence, rows, key-value head) until none is left. `next` counts the claimed tasks.
void run_attention_tasks(const AttentionParams& params, std::atomic<long>& next);

}  // namespace cospec
