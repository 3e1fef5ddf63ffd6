// Drafts without a model: tokens that followed the end of the text before. drafters/ngram.py and drafters/suffix.py are
// the readable implementations; drafts are equal.
#pragma once
#include <stdint.h>

#include <vector>

namespace cospec {

// The shape of a draft: `DraftBudget` in core/types.py.
struct LookupShape {
    int64_t depth, max_nodes;
    const int64_t* widths;  // [num_widths], continuations of each node, by level; the last levels have no limit
    int64_t num_widths;
    double threshold;  // the smallest product of the confidences on the path to a node
};

struct LookupDraft {
    std::vector<int64_t> tokens, parents;
    std::vector<double> confidence;  // empty where the lookup has no confidences
};

// The known tokens of one sequence, and an index of what followed them before.
struct Lookup {
    std::vector<int64_t> tokens;
    virtual ~Lookup() = default;
    // Append one known token.
    virtual void extend(int64_t token) = 0;
    // Draft after the known tokens and `num_assumed` more; without nodes where the end of the text is new.
    virtual void propose(const int64_t* assumed, long num_assumed, const LookupShape& shape, LookupDraft& draft) = 0;
};

}  // namespace cospec
