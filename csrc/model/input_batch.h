// Builds packed batches as cospec.models.input_batch does. Batches that this builder rejects raise an error there.
#pragma once
#include <vector>

#include "model/llama_forward.h"
#include "ops/ops.h"

namespace cospec {

// The tokens of one sequence: known tokens, then the nodes of a draft. See cospec.core.model_io.SequenceSlice.
struct SequenceSlice {
    int64_t start, num_tokens, num_nodes, first_logit;
    const int32_t* pages;
    int64_t num_pages;
};

// The KV cache of a model and its limits.
struct KVCacheView {
    void *const *k_pages, *const *v_pages;  // of each layer
    long cache_format, page_size, vocab_size, max_len;
};

// Slices with their tokens and parents, slice after slice.
struct BatchView {
    const SequenceSlice* slices;
    const int64_t *ids, *parents;
    long num_slices;
};

class InputBatchBuilder {
   public:
    // Build the batch with pages for `lookahead` more tokens of each sequence.
    // Returns false, and no batch, where the input is invalid. The batch is valid until the next call.
    bool build(const BatchView& view, const KVCacheView& cache, long lookahead, InputBatch* batch);

   private:
    bool add(
        const SequenceSlice& s, const int64_t* ids, const int64_t* parents, const KVCacheView& cache, long lookahead);
    bool add_nodes(const SequenceSlice& s, const int64_t* parents, long known);

    std::vector<int64_t> positions_, mask_, logit_rows_;
    std::vector<int32_t> row_sequence_, visible_, tables_, starts_, write_at_;
    long max_depth_ = 0;
};

// See model/llama_forward.cpp.
API int cospec_llama_score(LlamaModel* model, const KVCacheView* cache, const BatchView* view, float* logits);
API int cospec_llama_stage(LlamaModel* model, const KVCacheView* cache, const BatchView* view, const StageIO* io);
API int cospec_llama_rollout(
    LlamaModel* model, const KVCacheView* cache, const BatchView* view, const Rollout* rollout);

}  // namespace cospec
