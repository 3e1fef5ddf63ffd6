// Several decoding steps of the same requests in one call: draft, score, verify, commit.
#pragma once
#include "model/input_batch.h"
#include "spec/lookup.h"
#include "spec/verify.h"

namespace cospec {

// One request. The first `num_drafting` requests are drafted for by the call: requests with one drafter follow each
// other, the longest drafts first.
struct RequestSlot {
    int64_t draft_len;     // of the draft that the call makes, or nodes of the given draft
    int64_t num_known;     // known tokens, up to the last one that is computed
    int64_t num_computed;  // known tokens in the target's cache
    int64_t num_fed;       // known tokens in the drafter's cache or its lookup; num_computed if the call does not draft
    int64_t num_left;      // tokens that the request may still generate
    int64_t first_logit;   // the first of the computed tokens that gets a row of logits, in the first step
    int64_t deferred;      // 1: the caller verifies by the logits, and the call ends after the step
    const int32_t* pages;
    int64_t num_pages;
    LlamaModel* drafter;  // null if no model drafts in the call
    const KVCacheView* drafter_cache;
    const int32_t* drafter_pages;
    int64_t num_drafter_pages;
    Lookup* lookup;  // drafts in place of a model, or null
    const int64_t* stop_tokens;
    int64_t num_stop_tokens;
    uint64_t stream_kind;            // StreamKind that the drafter samples with
    const int64_t *draft, *parents;  // [draft_len], a given draft
    const double* q;                 // [draft_len, vocab_size], what a given draft was sampled from, or null
    AcceptanceParams params;
};

// An output row of a request and step starts with this. The tokens of a draft that the call made follow, or the
// accepted nodes of a given draft.
struct OutputHeader {
    int64_t draft_len, num_accepted;
    int64_t token;  // -1 for a deferred request, and for one with more known tokens to compute
    int64_t bonus;  // -1 where the target distribution is invalid
};

struct MultiStepTask {
    LlamaModel* target;
    const KVCacheView* cache;
    const RequestSlot* slots;
    const int64_t* tokens;  // tokens [num_fed, num_known) of each request, request after request
    int64_t num_slots, num_drafting;
    int64_t max_draft_len, max_steps;  // the length is that of the longest draft that the call makes
    double time_limit;  // seconds; a step starts only if it would end in time at the mean duration so far
    int64_t wakeup_fd;  // no step starts once this file descriptor is readable; negative: none
    // [max_steps, num_slots, output_width]: an OutputHeader, then tokens or nodes.
    int64_t* output;
    int64_t output_width;  // words of the header, and the longest draft
    int64_t* num_fed;      // [num_slots], tokens in the drafter's cache or its lookup at the end
    double* seconds;       // [max_steps, 3]: drafting, scoring, verification
    float* logits;         // room for the target's rows of all steps, step after step; null if the caller reads none
    // SINGLE: the target verifies. Otherwise its blend with the drafter does, which then scores every position: one
    // drafter drafts for all slots, none of which has a given draft, is deferred or has several rows of known tokens.
    int64_t blend_form;
    const double* blend_weights;  // as LogitsSource::weights
    double* divergences;          // [max_steps, num_slots, max_draft_len + 1] of the output's tokens; null for SINGLE
};

}  // namespace cospec
