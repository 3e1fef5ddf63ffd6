// Verification of drafts by target logits: the task of each request and the result.
#pragma once
#include "ops/ops.h"
#include "spec/blend.h"

namespace cospec {

enum StreamKind { TARGET = 0, DRAFT = 1, ACCEPT = 2, RECOVER = 3 };  // as cospec.rng.random_streams.StreamKind

// How the target distribution follows from logits. Temperature 0 is a point mass on the most likely token.
struct SamplingShape {
    double temperature, top_p, min_p;
    int64_t top_k;
};

// The part of a task that stays the same in every step of a request.
struct AcceptanceParams {
    int64_t method;
    uint64_t seed;
    SamplingShape sampling;
};

// One request: its rows of logits and its draft.
// The draft's tokens begin at `node_offset` of the nodes of all requests; its parents follow its tokens.
struct VerifyTask {
    int64_t check_row, first_row, num_rows;  // rows [check_row, first_row) are only checked for NaN and infinity
    int64_t node_offset, num_nodes;
    const double* q;        // [num_nodes, vocab_size], what the draft was sampled from; null for point masses
    const uint32_t* masks;  // [num_rows, ceil(vocab_size / 32)], a bit per allowed token; null allows all tokens
    uint64_t base_len;      // committed tokens
    AcceptanceParams params;
};

// `num_accepted` nodes are accepted and `token` follows. `token` is -1 where the task has no row for it.
struct VerifyResult {
    int64_t num_accepted, token, bonus, invalid;
};

// Verify every task by its rows of logits.
// nodes: tokens and parents of all drafts. results: [count] VerifyResult, then the accepted paths.
// A path begins at the task's node_offset. A row with NaN makes a result invalid only where the result depends on it.
API void cospec_verify(
    const LogitsSource* source, const VerifyTask* tasks, long count, const int64_t* nodes, int64_t* results);

}  // namespace cospec
