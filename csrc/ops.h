// Single operations over rows, and what the fused forward shares with them.
#pragma once
#include <stdlib.h>

#include <atomic>

#include "kernels.h"
#include "pool.h"

// What the library offers to its callers.
#define API extern "C" __attribute__((visibility("default")))

// Aligned memory that grows and never shrinks; its contents are lost when it grows.
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
Scratch& own_scratch();

Linear* linear_new(int kind, const void* weight, const float* scale, const float* bias, long outputs, long inputs);
void linear_free(Linear* linear);

// Rows of one segment that a task takes: enough to share keys and values, few enough for their state to stay in cache.
long attention_rows(const AttentionJob& job);
// Copy rows [first, last) of one head's new keys and values to their pages.
void write_cache(const AttentionJob& job, long segment, long kv_head, long first, long last);
// Take tasks (segment, rows, key-value head) from those that are left until there are none; `next` counts them.
void attend_all(const AttentionJob& job, std::atomic<long>& next);
