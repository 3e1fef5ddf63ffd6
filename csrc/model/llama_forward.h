// The forward pass of a Llama-family model over a packed batch.
#pragma once
#include <stdint.h>

#include "ops/kernels.h"

namespace cospec {

// Weights of one layer; norms are float32. Projections of one input are one product.
// The projections of queries, keys and values lie one after another: q joins the next ones of its format, which are
// null. gate_up interleaves gates and inputs for the epilogue SWIGLU.
// A layer with a mixture of experts has a router and experts; gate_up and down are null.
struct LlamaLayer {
    const float *attention_norm, *mlp_norm;    // of the inputs [hidden], or null
    const float *after_attention, *after_mlp;  // of the outputs [hidden], or null
    const float *q_norm, *k_norm;              // of each head [dim], of all heads with wide_norms, or null
    const Linear *q, *k, *v, *output, *gate_up, *down;
    const Linear* router;                                      // of num_experts outputs, or null
    const Linear *const *expert_gate_up, *const *expert_down;  // [num_experts]
    long window;                                               // 0: none
    long rotary;  // which table of frequencies rotates queries and keys; -1: none
};

struct LlamaConfig {
    const LlamaLayer* layers;
    const void* embedding;  // [vocab_size, hidden], floats or file blocks
    const float* final_norm;
    const Linear* head;
    const float* inverse_frequencies;  // [num_tables, rotated / 2] of the rotary embedding
    long embedding_format, num_layers, hidden, heads, kv_heads, dim, intermediate;
    long rotated, num_tables;                                  // numbers of a head that rotate
    long wide_norms, gelu;                                     // gelu: the activation is GELU by tanh, else SiLU
    long num_experts, experts_per_token, expert_intermediate;  // 0 without layers of experts
    long normalized_experts;                                   // the weights of a token's experts sum to 1
    float eps, scale, rotary_scale;
    float embedding_factor, residual_factor, logit_factor;
    float attention_softcap, logit_softcap;  // 0: none
};

// Replaces a shard's product by the sum of all shards' products; count is the same in every shard.
typedef void (*SumShards)(float* product, long count);

// Inputs and outputs of consecutive layers, whose model has only these layers and the heads and columns of one shard.
struct StageIO {
    const float* input;  // [num_rows, hidden]; null for the first stage, which embeds the tokens
    float* output;       // [num_rows, hidden]; null for the last stage
    float* logits;       // [num_logit_rows, vocab_size]; null where no caller reads the logits
    SumShards sum;       // null: not sharded
};

struct LlamaModel;  // a model with its scratch memory

// T rows of S sequences; see cospec.models.input_batch.InputBatch.
struct InputBatch {
    const int64_t *ids, *positions;
    const int32_t *row_sequence, *visible;
    const int64_t* mask;
    const int32_t *tables, *starts, *write_at;
    const int64_t* logit_rows;              // rows that get logits
    void *const *k_pages, *const *v_pages;  // of each layer
    long num_rows, num_sequences, num_logit_rows, page_size, table_width, cache_format;
};

// How the tokens of a rollout are chosen, and where they are written. S sequences, the longest rollout first.
struct Rollout {
    const double* temperatures;  // [S], 0: the most likely token
    const uint64_t* streams;     // [S, 6], of the first token; the position in word 4 goes up with each token
    const int64_t* depths;       // [S], tokens of each sequence, descending
    long max_depth;              // the largest depth, or more: the width of the outputs
    float* logits;               // [max_depth, S, vocab_size], or null
    long logits_stride;  // floats from one step's logits to the next: S * vocab_size, or 0 where logits are not kept
    double* q;  // [S, max_depth, vocab_size], what the tokens were sampled from; null when all are the most likely
    int64_t* tokens;  // [S, max_depth]; -1 where no token could be chosen; not written beyond a sequence's depth
    double*
        confidence;  // [S, max_depth], the largest probability of each row, at temperature 1 for greedy rows; or null
    int64_t* hits;   // [S], how many tokens that follow a row of known tokens are the most likely there; or null
};

}  // namespace cospec
