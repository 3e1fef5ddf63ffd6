#include "spec/lookup.h"

#include <algorithm>

#include "ops/ops.h"

namespace cospec {

API void cospec_lookup_free(void* lookup) { delete (Lookup*)lookup; }
API long cospec_lookup_size(const void* lookup) { return ((const Lookup*)lookup)->tokens.size(); }

// Append known tokens [count].
API void cospec_lookup_extend(void* lookup, const int64_t* tokens, long count) {
    for (long i = 0; i < count; i++) ((Lookup*)lookup)->extend(tokens[i]);
}

// Draft after the known tokens and `assumed` ones. tokens, parents, confidence: room for shape->max_nodes nodes.
// Returns the number of nodes. Without confidences, the room for these stays unchanged.
API long cospec_lookup_propose(void* lookup, const int64_t* assumed, long num_assumed, const LookupShape* shape,
    int64_t* tokens, int64_t* parents, double* confidence) {
    thread_local LookupDraft draft;
    ((Lookup*)lookup)->propose(assumed, num_assumed, *shape, draft);
    std::copy(draft.tokens.begin(), draft.tokens.end(), tokens);
    std::copy(draft.parents.begin(), draft.parents.end(), parents);
    std::copy(draft.confidence.begin(), draft.confidence.end(), confidence);
    return draft.tokens.size();
}

}  // namespace cospec
