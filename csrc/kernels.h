// What the kernels of one instruction set offer, and the plain structs they share with the rest.
#pragma once
#include <stddef.h>
#include <stdint.h>

enum Kind { FP32 = 0, BF16 = 1, INT8 = 2 };

// A weight [outputs, inputs] in panels of 64 outputs: for each input, the weights of those outputs side by side.
// The last panel is as wide as it needs to be, in steps of 32. In bf16 panels one 32-bit word holds two inputs' weights
// of an output, the earlier input in the lower half, and inputs are even in number: the last may be all 0.
struct Linear {
    int kind;
    long outputs, inputs;
    void* weight;
    float* scale;  // [outputs rounded up to 32] of int8 weights, or null
    float* bias;   // [outputs rounded up to 32], or null
};

enum Ending {
    SET = 0,  // y = result
    ADD = 1,  // y += result
    GATE = 2  // panels hold 32 gates, then their 32 inputs: y = silu(gate) * input, half as many as outputs
};

struct LinearJob {
    const Linear* linear;
    const float* x;  // [rows, inputs], `x_row` apart
    long x_row, rows;
    float* y;  // `y_row` apart
    long y_row, y_columns;
    Ending ending;
};

// Attention of rows over paged keys and values [pages, kv_heads, page_size, dim].
struct AttentionJob {
    const float *q, *k, *v;  // new rows; strides in floats
    long q_row, q_head, k_row, k_head, v_row, v_head;
    float *k_pages, *v_pages, *out;  // out: [rows, heads, dim]
    long heads, kv_heads, dim, page_size, table_width;
    float scale, softcap;  // softcap 0: none
    long window;           // 0: none
    const int64_t* positions;
    const int32_t *visible, *tables, *starts, *write_at;
    const int64_t* mask;
    long segments;
};

// Key and counter of the generator; word 2 of the counter is the token's position in its sequence.
struct Stream {
    uint64_t key[2], counter[4];
};

struct Kernels {
    const char* name;
    // The share `part` of `parts` of a product; `scratch` holds linear_scratch() floats.
    void (*linear)(const LinearJob&, int part, int parts, float* scratch);
    size_t (*linear_scratch)(long rows, long inputs);
    // Rows [first, last) of one segment against one key-value head; `scratch` holds attend_scratch() floats.
    void (*attend)(const AttentionJob&, long segment, long kv_head, long first, long last, float* scratch);
    size_t (*attend_scratch)(long rows, long heads_per_kv, long dim);
    void (*rms_norm)(const float* x, const float* weight, float eps, long n, float* y);
    void (*rotate)(float* x, const float* cos, const float* sin, long dim);
    void (*widen)(const uint16_t* bf16, long n, float* y);
    long (*argmax)(const float* x, long n);
    // The softmax of one row at a temperature, in double precision; returns its largest entry.
    double (*softmax)(const float* logits, long vocab, double temperature, double* out);
    double (*softmax64)(const double* logits, long vocab, double temperature, double* out);
    // The natural logarithm of each, in place; of 0 minus infinity. Not for subnormal numbers.
    void (*logarithm)(double* x, long count);
    // out [n] = the sum of weights [count] times rows [count, n], the first one first.
    void (*weighted)(const double* const* rows, const double* weights, long count, long n, double* out);
    // The first token with the largest weight / exponential; -1 when no weight is positive.
    long (*race)(const double* weights, long vocab, const Stream& stream);
    // The number between 0 and 1 that the first word `block` blocks behind the stream's start stands for.
    double (*uniform)(const Stream& stream, uint64_t block);
    // out = max(0, scale law - q), all [n]; returns its sum.
    double (*surplus)(const double* law, const double* q, double scale, long n, double* out);
};

extern const Kernels kernels_base;
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
extern const Kernels kernels_avx512_bf16;
