// Sizes and field offsets of the structs that callers fill. A caller confirms its own declarations with these.
#include <stddef.h>
#include <string.h>

#include <vector>

#include "spec/multi_step.h"
#include "spec/pool_lockstep.h"

namespace cospec {

namespace {

struct Field {
    const char* name;
    size_t offset;
};

struct Layout {
    const char* name;
    size_t size;
    std::vector<Field> fields;
};

// LAYOUT(S, a, b) lists FIELD(S, a) and FIELD(S, b); at most 64 fields.
#define FIELD(S, field) {#field, offsetof(S, field)},
#define PARENTHESES ()
#define RESCAN(...) RESCAN_16(RESCAN_16(RESCAN_16(RESCAN_16(__VA_ARGS__))))
#define RESCAN_16(...) RESCAN_4(RESCAN_4(RESCAN_4(RESCAN_4(__VA_ARGS__))))
#define RESCAN_4(...) RESCAN_1(RESCAN_1(RESCAN_1(RESCAN_1(__VA_ARGS__))))
#define RESCAN_1(...) __VA_ARGS__
#define NEXT_FIELD(S, field, ...) FIELD(S, field) __VA_OPT__(NEXT_FIELD_AGAIN PARENTHESES(S, __VA_ARGS__))
#define NEXT_FIELD_AGAIN() NEXT_FIELD
#define LAYOUT(S, ...)                                        \
    {                                                         \
        #S, sizeof(S), { RESCAN(NEXT_FIELD(S, __VA_ARGS__)) } \
    }

const std::vector<Layout>& layouts() {
    static const std::vector<Layout> all = {
        LAYOUT(AttentionParams, q, k, v, q_row, q_head, k_row, k_head, v_row, v_head, k_pages, v_pages, out,
            cache_format, heads, kv_heads, dim, page_size, table_width, scale, softcap, window, positions, visible,
            tables, starts, write_at, mask, num_sequences),
        LAYOUT(LlamaLayer, attention_norm, mlp_norm, after_attention, after_mlp, q_norm, k_norm, q, k, v, output,
            gate_up, down, router, expert_gate_up, expert_down, window, rotary),
        LAYOUT(LlamaConfig, layers, embedding, final_norm, head, inverse_frequencies, embedding_format, num_layers,
            hidden, heads, kv_heads, dim, intermediate, rotated, num_tables, wide_norms, gelu, num_experts,
            experts_per_token, expert_intermediate, normalized_experts, eps, scale, rotary_scale, embedding_factor,
            residual_factor, logit_factor, attention_softcap, logit_softcap),
        LAYOUT(InputBatch, ids, positions, row_sequence, visible, mask, tables, starts, write_at, logit_rows, k_pages,
            v_pages, num_rows, num_sequences, num_logit_rows, page_size, table_width, cache_format),
        LAYOUT(Rollout, temperatures, streams, depths, max_depth, logits, logits_stride, q, tokens, confidence, hits),
        LAYOUT(StageIO, input, output, logits, sum),
        LAYOUT(SequenceSlice, start, num_tokens, num_nodes, first_logit, pages, num_pages),
        LAYOUT(KVCacheView, k_pages, v_pages, cache_format, page_size, vocab_size, max_len),
        LAYOUT(BatchView, slices, ids, parents, num_slices),
        LAYOUT(LogitsSource, logits, weights, num_models, vocab_size, form, plausibility_cutoff, divergences),
        LAYOUT(SamplingShape, temperature, top_p, min_p, top_k),
        LAYOUT(AcceptanceParams, method, seed, sampling),
        LAYOUT(VerifyTask, check_row, first_row, num_rows, node_offset, num_nodes, q, masks, base_len, params),
        LAYOUT(VerifyResult, num_accepted, token, bonus, invalid),
        LAYOUT(LookupShape, depth, max_nodes, widths, num_widths, threshold),
        LAYOUT(RequestSlot, draft_len, num_known, num_computed, num_fed, num_left, first_logit, deferred, pages,
            num_pages, drafter, drafter_cache, drafter_pages, num_drafter_pages, lookup, stop_tokens, num_stop_tokens,
            stream_kind, draft, parents, q, params),
        LAYOUT(OutputHeader, draft_len, num_accepted, token, bonus),
        LAYOUT(MultiStepTask, target, cache, slots, tokens, num_slots, num_drafting, max_draft_len, max_steps,
            time_limit, wakeup_fd, output, output_width, num_fed, seconds, logits, blend_form, blend_weights,
            divergences),
        LAYOUT(PoolRequest, greedy, shares_stream, depth, max_nodes, temperature, threshold),
        LAYOUT(PoolBatch, num_requests, num_drafters, max_depth, tree_capacity, steps, calibration_bins,
            calibration_prior, min_prob, min_second_prob, requests, streams, calibrations, weights, odds, spans, tokens,
            parents, raw_confidence, candidates, candidate_probs, q, mix_weights, main_path, path_len, active,
            num_nodes, out_tokens, out_parents, out_owners, out_confidence),
        LAYOUT(LockstepDrafter, drafter, model, cache, slices, ids, requests, num_requests),
        LAYOUT(MixBuffers, distributions, mixtures, vocab_size, kept_steps),
    };
    return all;
}

const Layout* find(const char* name) {
    for (const Layout& layout : layouts())
        if (!strcmp(layout.name, name)) return &layout;
    return nullptr;
}

}  // namespace

// Bytes of a struct, or -1 where the library has no such struct.
API long cospec_struct_size(const char* name) {
    const Layout* layout = find(name);
    return layout ? (long)layout->size : -1;
}

// Bytes before a field of a struct, or -1 where the library has no such field.
API long cospec_field_offset(const char* name, const char* field) {
    const Layout* layout = find(name);
    for (size_t i = 0; layout && i < layout->fields.size(); i++)
        if (!strcmp(layout->fields[i].name, field)) return (long)layout->fields[i].offset;
    return -1;
}

}  // namespace cospec
