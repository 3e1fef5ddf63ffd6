#include "model/input_batch.h"

#include <string.h>

#include <algorithm>

namespace cospec {

namespace {

constexpr long MAX_NODES = 64;  // of a tree: one word of ancestor bits per node

bool is_chain(const int64_t* parents, long num_nodes) {
    for (long i = 0; i < num_nodes; i++)
        if (parents[i] != i - 1) return false;
    return true;
}

long pages_for(const SequenceSlice& s, const KVCacheView& cache, long lookahead) {
    return (s.start + s.num_tokens + lookahead + cache.page_size - 1) / cache.page_size;
}

}  // namespace

// Positions and visible entries of a branching draft after `num_known` tokens.
bool InputBatchBuilder::add_nodes(const SequenceSlice& s, const int64_t* parents, long num_known) {
    int64_t depths[MAX_NODES];
    uint64_t ancestors[MAX_NODES];
    if (s.num_nodes > MAX_NODES) return false;
    for (long i = 0; i < s.num_nodes; i++) {
        const int64_t parent = parents[i];
        if (parent < -1 || parent >= i) return false;
        depths[i] = parent < 0 ? 1 : depths[parent] + 1;
        ancestors[i] = (parent < 0 ? 0 : ancestors[parent]) | 1ull << i;
        positions_.push_back(num_known - 1 + depths[i]);
        visible_.push_back(num_known);
        mask_.push_back((int64_t)ancestors[i]);
    }
    max_depth_ = *std::max_element(depths, depths + s.num_nodes);
    return true;
}

bool InputBatchBuilder::add(
    const SequenceSlice& s, const int64_t* ids, const int64_t* parents, const KVCacheView& cache, long lookahead) {
    if (s.num_tokens < 1 || s.start < 0 || s.num_nodes > s.num_tokens || s.first_logit < 0 ||
        s.first_logit > s.num_tokens)
        return false;
    if (pages_for(s, cache, lookahead) > s.num_pages) return false;
    for (long i = 0; i < s.num_tokens; i++)
        if (ids[i] < 0 || ids[i] >= cache.vocab_size) return false;
    const bool branches = !is_chain(parents, s.num_nodes);
    const long num_causal = branches ? s.num_tokens - s.num_nodes : s.num_tokens, first = (long)write_at_.size();
    for (long i = 0; i < num_causal; i++) {
        positions_.push_back(s.start + i);
        visible_.push_back(s.start + i + 1);
        mask_.push_back(0);
    }
    max_depth_ = branches ? 0 : s.num_nodes;
    if (branches && !add_nodes(s, parents, s.start + num_causal)) return false;
    if (s.start + s.num_tokens - s.num_nodes + max_depth_ + lookahead > cache.max_len) return false;
    for (long i = 0; i < s.num_tokens; i++) {
        write_at_.push_back(s.start + i);
        row_sequence_.push_back((int32_t)starts_.size());
        if (i >= s.first_logit) logit_rows_.push_back(first + i);
    }
    starts_.push_back((int32_t)first);
    return true;
}

bool InputBatchBuilder::build(const BatchView& view, const KVCacheView& cache, long lookahead, InputBatch* batch) {
    for (auto* column : {&positions_, &mask_, &logit_rows_}) column->clear();
    for (auto* column : {&row_sequence_, &visible_, &starts_, &write_at_}) column->clear();
    const int64_t *ids = view.ids, *parents = view.parents;
    long width = 0;
    for (long i = 0; i < view.num_slices; i++) {
        const SequenceSlice& s = view.slices[i];
        if (!add(s, ids, parents, cache, lookahead)) return false;
        ids += s.num_tokens, parents += s.num_nodes;
        width = std::max(width, pages_for(s, cache, lookahead));
    }
    if (!view.num_slices) return false;
    starts_.push_back((int32_t)write_at_.size());
    tables_.assign(view.num_slices * width, 0);
    for (long i = 0; i < view.num_slices; i++) {
        const SequenceSlice& s = view.slices[i];
        memcpy(&tables_[i * width], s.pages, sizeof(int32_t) * pages_for(s, cache, lookahead));
    }
    *batch = {view.ids, positions_.data(), row_sequence_.data(), visible_.data(), mask_.data(), tables_.data(),
        starts_.data(), write_at_.data(), logit_rows_.data(), cache.k_pages, cache.v_pages, (long)write_at_.size(),
        view.num_slices, (long)logit_rows_.size(), cache.page_size, width, cache.cache_format};
    return true;
}

}  // namespace cospec
