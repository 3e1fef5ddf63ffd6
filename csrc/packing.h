// Laying out a packed batch, as cospec.models.packed does; what it refuses is refused there too, with a reason.
#pragma once
#include <vector>

#include "llama.h"
#include "ops.h"

// The tokens of one sequence: known ones, then the nodes of a draft; see cospec.batches.Segment.
struct Segment {
    int64_t start, tokens, nodes, logits_from;
    const int32_t* pages;
    int64_t page_count;
};

// The cache that a model runs on, and what it takes.
struct Cache {
    float *const *k_pages, *const *v_pages;  // of each layer
    long page_size, vocabulary, max_len;
};

// Segments with their tokens and parents, one after the other.
struct Given {
    const Segment* segments;
    const int64_t *ids, *parents;
    long count;
};

class Packing {
   public:
    // Room for `ahead` tokens behind each segment is asked for as well. False, and no batch, where something is amiss.
    // The batch lasts until the next one is laid out.
    bool lay_out(const Given& given, const Cache& cache, long ahead, Batch* batch);

   private:
    bool add(const Segment& s, const int64_t* ids, const int64_t* parents, const Cache& cache, long ahead);
    bool add_nodes(const Segment& s, const int64_t* parents, long known);

    std::vector<int64_t> positions_, mask_, wanted_;
    std::vector<int32_t> row_segment_, visible_, tables_, starts_, write_at_;
    long deepest_ = 0;
};

// See csrc/llama.cpp.
API int cospec_llama_score(Llama* model, const Cache* cache, const Given* given, float* logits);
API int cospec_llama_rollout(Llama* model, const Cache* cache, const Given* given, const Rollout* rollout);
