// Inputs, outputs and scratch memory of one forward.
#pragma once
#include "model/llama_forward.h"
#include "ops/ops.h"

namespace cospec {

constexpr long REDUNDANT_NORM_ROWS = 16;  // up to so many rows each thread normalizes for itself, which saves a barrier

struct Buffers {
    float *x, *gathered, *normed, *qkv, *attended, *intermediate, *cos, *sin, *gate_up, *branch;
    float *router, *expert_rows, *expert_intermediate, *expert_results;  // rows by place, see experts.h
    float* states;                                                       // see attention_states()
};

// What a forward reads and writes besides the batch.
struct ForwardIO {
    float* logits;                       // [num_logit_rows, vocab_size]; null where no caller reads the logits
    float* states = nullptr;             // [num_logit_rows, hidden], the inputs of the head; or null
    const float* stage_input = nullptr;  // [num_rows, hidden]; null for the first stage, which embeds the tokens
    float* stage_output = nullptr;       // [num_rows, hidden]; null for the last stage
    SumShards sum = nullptr;             // null: the layers are not sharded
};

// Whether the outputs of attention and feed-forward change before they are added.
inline bool has_branches(const LlamaConfig& s) {
    return s.num_experts || s.residual_factor != 1.0f || s.layers[0].after_attention || s.layers[0].after_mlp;
}

inline Buffers buffers_for(Scratch& scratch, const LlamaConfig& s, long rows, int threads, bool sharded) {
    const long head_rows = s.heads + 2 * s.kv_heads, turns = s.num_tables * s.rotated / 2;
    const long places = rows * s.experts_per_token;
    const long sizes[] = {rows * s.hidden, rows * s.hidden,
        rows * s.hidden * (rows <= REDUNDANT_NORM_ROWS ? threads : 1), rows * head_rows * s.dim, rows * s.heads * s.dim,
        rows * s.intermediate, rows * turns, rows * turns, s.gelu ? rows * s.layers[0].gate_up->outputs : 0,
        has_branches(s) || sharded ? rows * s.hidden : 0, rows * s.num_experts, places * s.hidden,
        places * s.expert_intermediate, places * s.hidden};
    long total = 0, at[14];
    for (int i = 0; i < 14; i++) at[i] = total, total += (sizes[i] + 31) / 32 * 32;
    float* p = scratch.reserve(total);
    return {p + at[0], p + at[1], p + at[2], p + at[3], p + at[4], p + at[5], p + at[6], p + at[7], p + at[8],
        p + at[9], p + at[10], p + at[11], p + at[12], p + at[13], nullptr};
}

inline AttentionParams attention_params(
    const LlamaConfig& s, const InputBatch& b, const Buffers& buf, long layer, long window) {
    const long row = (s.heads + 2 * s.kv_heads) * s.dim;
    AttentionParams params = {};
    params.q = buf.qkv;
    params.k = params.q + s.heads * s.dim;
    params.v = params.k + s.kv_heads * s.dim;
    params.q_row = params.k_row = params.v_row = row;
    params.q_head = params.k_head = params.v_head = s.dim;
    params.k_pages = b.k_pages[layer];
    params.v_pages = b.v_pages[layer];
    params.cache_format = b.cache_format;
    params.out = buf.attended;
    params.heads = s.heads, params.kv_heads = s.kv_heads, params.dim = s.dim;
    params.page_size = b.page_size, params.table_width = b.table_width;
    params.scale = s.scale, params.window = window, params.softcap = s.attention_softcap;
    params.positions = b.positions, params.visible = b.visible, params.mask = b.mask;
    params.tables = b.tables, params.starts = b.starts, params.write_at = b.write_at;
    params.num_sequences = b.num_sequences;
    return params;
}

}  // namespace cospec
