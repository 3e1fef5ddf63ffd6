// The kernels of one instruction set as a table, and the plain structs that they take.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "ops/cache_formats.h"
#include "ops/thread_pool.h"
#include "ops/weight_formats.h"

namespace cospec {

// A weight [outputs, inputs] in panels of 64 outputs. A panel holds, for each input, the weights of its outputs.
// The width of the last panel is a multiple of 32.
// In bf16 panels one 32-bit word holds two inputs' weights of an output, the earlier input in the lower half.
// bf16 panels pad an odd number of inputs with zeros.
// Weights in blocks have panels of 32 outputs, see ops/block_formats.h.
struct Linear {
    int format;
    long outputs, inputs;
    const void* weight;    // packed, aligned to 64 bytes; not owned
    float* scale;          // [outputs rounded up to 32] of scaled formats, or null
    float* bias;           // [outputs rounded up to 32], or null
    const int32_t* order;  // [inputs] of blocks that hold the inputs in another order, or null; not owned
};

enum Epilogue {
    STORE = 0,  // y = result
    ADD = 1,    // y += result
    SWIGLU = 2  // panels hold 32 gates, then their 32 inputs: y = silu(gate) * input, half as many as outputs
};

struct LinearParams {
    const Linear* linear;
    const float* x;  // [rows, inputs], stride `x_row`
    long x_row, rows;
    float* y;  // stride `y_row`
    long y_row, y_columns;
    Epilogue epilogue;
};

// Attention of rows over paged keys and values [pages, kv_heads, page_size], entries of a format of the KV cache.
struct AttentionParams {
    const float *q, *k, *v;  // new rows; strides in floats
    long q_row, q_head, k_row, k_head, v_row, v_head;
    void *k_pages, *v_pages;
    float* out;  // [rows, heads, dim]
    long cache_format, heads, kv_heads, dim, page_size, table_width;
    float scale, softcap;  // softcap 0: none
    long window;           // 0: none
    const int64_t* positions;
    const int32_t *visible, *tables, *starts, *write_at;
    const int64_t* mask;
    long num_sequences;
};

// Rows [first, last) of one sequence against key-value heads [first_head, last_head).
struct AttentionTask {
    long sequence, first_head, last_head, first, last;
    long span;     // the number of a span of the context, or ALL_SPANS
    float* state;  // where the states of a span go: attention_state() floats for each query; null with ALL_SPANS
    long num_queries(const AttentionParams& params) const {
        return (last_head - first_head) * (last - first) * (params.heads / params.kv_heads);
    }
};
constexpr long MAX_TASK_HEADS = 64;

// Each span of so many cache entries has a softmax of its own, and spans are merged in ascending order. So a result
// does not depend on the number of threads that share a context.
constexpr long SPAN = 256, ALL_SPANS = -1;
// Floats of one query's state: the largest score, the sum of weights per lane, and the weighted values.
constexpr long attention_state(long dim) { return 32 + (dim + 15) / 16 * 16; }

// Key and counter of the generator. Word 2 of the counter is the token's position in its sequence.
struct RandomStream {
    uint64_t key[2], counter[4];
};

// Of the blend `adaptive`.
struct AdaptiveParams {
    double max_divergence;           // no row is further from the target's, in total variation
    double lambda1;                  // every token is key where the drafter's entropy exceeds this many target's
    double lambda2;                  // a token is key where its probabilities differ by more
    double lambda3;                  // every token is key where the distributions overlap by less
    double search_steps, shortfall;  // of the search for the exponent
};

struct Kernels {
    const char* name;
    // Compute a thread's shares of a product. `scratch` holds linear_scratch() floats, for this thread alone.
    void (*linear)(const LinearParams&, const Team&, float* scratch);
    size_t (*linear_scratch)(long rows, long inputs);
    // Attend all spans and write the output, or one span and write the states. `scratch` holds attend_scratch() floats.
    void (*attend)(const AttentionParams&, const AttentionTask&, float* scratch);
    // Merge the states of all spans of a task, which lie one after another, and write the output.
    void (*merge_spans)(const AttentionParams&, const AttentionTask&, long spans);
    size_t (*attend_scratch)(long queries, long dim);
    void (*rms_norm)(const float* x, const float* weight, float eps, long n, float* y);
    void (*apply_rotary)(float* x, const float* cos, const float* sin, long dim);
    void (*bf16_to_float)(const uint16_t* bf16, long n, float* y);
    void (*fp16_to_float)(const uint16_t* fp16, long n, float* y);
    long (*argmax)(const float* x, long n);
    // The softmax of one row at a temperature, in double precision. Returns the largest probability.
    double (*softmax)(const float* logits, long vocab, double temperature, double* out);
    double (*softmax64)(const double* logits, long vocab, double temperature, double* out);
    // The natural logarithm of each number, in place; minus infinity for 0. Not for subnormal numbers.
    void (*logarithm)(double* x, long count);
    // out [n] = sum of weights [count] times rows [count, n], in ascending order of rows.
    void (*weighted_sum)(const double* const* rows, const double* weights, long count, long n, double* out);
    // The first token with the largest quotient of weight and exponential number. -1 when no weight is positive.
    long (*exponential_sample)(const double* weights, long vocab, const RandomStream& stream);
    // The uniform number in (0, 1) of the first word, `block` blocks after the stream's start.
    double (*uniform)(const RandomStream& stream, uint64_t block);
    // out = max(0, scale target - q), all [n]. Returns the sum of out.
    double (*residual)(const double* target, const double* q, double scale, long n, double* out);
    // The target's distribution moved towards the drafter's: log-probabilities [vocab], all NaN where a row holds NaN.
    // Returns the total variation from the target. `scratch` holds 3 vocab numbers.
    double (*adapt)(
        const float* target, const float* drafter, const AdaptiveParams&, long vocab, double* out, double* scratch);
};

extern const Kernels kernels_base;
extern const Kernels kernels_neon_dot;
extern const Kernels kernels_neon_i8mm;
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx_vnni;
extern const Kernels kernels_avx512;
extern const Kernels kernels_avx512_vnni;
extern const Kernels kernels_avx512_bf16;
extern const Kernels kernels_amx_bf16;

}  // namespace cospec
