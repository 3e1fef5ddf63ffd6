// The forward pass of a Llama-family model over a packed batch.
#pragma once
#include <stdint.h>

#include "kernels.h"

// Weights of one layer; norms are float32. Projections of one input are one product: queries, keys and values; and gates
// with their inputs, in the order that the ending GATE asks for.
struct LlamaLayer {
    const float *input_norm, *mlp_norm;
    const float *q_norm, *k_norm;  // [dim] each, or null
    const Linear *qkv, *output, *gate_up, *down;
    long window;  // 0: none
};

struct LlamaSpec {
    const LlamaLayer* layer;
    const void* embedding;  // [vocabulary, hidden]
    const float* final_norm;
    const Linear* head;
    const float* inverse_frequencies;  // [dim / 2] of the rotary embedding
    long embedding_kind, layers, hidden, heads, kv_heads, dim, inner;
    float eps, scale, rotary_scale;
};

struct Llama;  // a model with its scratch

// T rows of S segments; see cospec.models.packed.PackedBatch.
struct Batch {
    const int64_t *ids, *positions;
    const int32_t *row_segment, *visible;
    const int64_t* mask;
    const int32_t *tables, *starts, *write_at;
    const int64_t* wanted;            // rows that get logits
    float *const *k_pages, *const *v_pages;  // of each layer
    long rows, segments, wanted_rows, page_size, table_width;
};

// How the tokens of a rollout are chosen and where they go; S segments, the longest first.
struct Rollout {
    const double* temperatures;  // [S], 0: the likeliest token
    const uint64_t* streams;     // [S, 6], of the first token; the position in word 4 goes up with each
    const int64_t* depths;       // [S], tokens of each, falling
    long depth;                  // of the longest
    float* logits;  // [depth, S, vocabulary], what the tokens are chosen by; null where nobody wants it
    long step_logits;  // floats from one step's logits to the next one's: S * vocabulary, or 0 where nobody wants them
    double* q;        // [S, depth, vocabulary], what the tokens were drawn from; null when all are the likeliest
    int64_t* tokens;  // [S, depth]; -1 where nothing could be chosen; not written behind a segment's own depth
    double* confidence;  // [S, depth], the largest probability of each row, at temperature 1 for the likeliest; or null
};
