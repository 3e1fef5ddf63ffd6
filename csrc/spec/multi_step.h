// Several decoding steps of the same requests in one call: draft, score, verify, commit.
#pragma once
#include "model/input_batch.h"
#include "spec/verify.h"

namespace cospec {

// One request. Requests with the longest drafts come first.
struct RequestSlot {
    int64_t draft_len;
    int64_t num_known;  // known tokens
    int64_t num_fed;    // known tokens in the drafter's cache; num_known - 1 without drafting
    int64_t num_left;   // tokens that the request may still generate
    const int32_t* pages;
    int64_t num_pages;
    const int32_t* drafter_pages;
    int64_t num_drafter_pages;
    const int64_t* stop_tokens;
    int64_t num_stop_tokens;
    uint64_t stream_kind;  // StreamKind that the drafter samples with
    const double* q;       // [draft_len, vocab_size], what a given draft was sampled from, or null
    AcceptanceParams params;
};

struct MultiStepTask {
    LlamaModel* target;
    const KVCacheView* cache;
    LlamaModel* drafter;
    const KVCacheView* drafter_cache;
    const RequestSlot* slots;
    const int64_t* tokens;  // known tokens that are not yet fed, request after request
    const int64_t* drafts;  // [num_slots, max_draft_len] given drafts; null where the call drafts
    int64_t num_slots, num_drafting, max_draft_len, max_steps;
    double time_limit;  // seconds; a step starts only if it would end in time at the mean duration so far
    int64_t wakeup_fd;  // no step starts once this file descriptor is readable; negative: none
    // [max_steps, num_slots, 4 + max_draft_len]: draft length, accepted length, next token, bonus flag, draft tokens.
    // The bonus flag is -1 where the target distribution is invalid.
    int64_t* output;
    int64_t* num_fed;  // [num_slots], tokens in the drafter's cache at the end
    double* seconds;   // [max_steps, 3]: drafting, scoring, verification
};

}  // namespace cospec
