#include "packing.h"

#include <string.h>

#include <algorithm>

namespace {

constexpr long MAX_NODES = 64;  // of a tree: one word of ancestor bits per node

bool is_chain(const int64_t* parents, long nodes) {
    for (long i = 0; i < nodes; i++)
        if (parents[i] != i - 1) return false;
    return true;
}

long pages_for(const Segment& s, const Cache& cache, long ahead) {
    return (s.start + s.tokens + ahead + cache.page_size - 1) / cache.page_size;
}

}  // namespace

// Positions and visible entries of a branching tree behind `known` tokens.
bool Packing::add_nodes(const Segment& s, const int64_t* parents, long known) {
    int64_t depths[MAX_NODES];
    uint64_t above[MAX_NODES];
    if (s.nodes > MAX_NODES) return false;
    for (long i = 0; i < s.nodes; i++) {
        const int64_t parent = parents[i];
        if (parent < -1 || parent >= i) return false;
        depths[i] = parent < 0 ? 1 : depths[parent] + 1;
        above[i] = (parent < 0 ? 0 : above[parent]) | 1ull << i;
        positions_.push_back(known - 1 + depths[i]);
        visible_.push_back(known);
        mask_.push_back((int64_t)above[i]);
    }
    deepest_ = *std::max_element(depths, depths + s.nodes);
    return true;
}

bool Packing::add(const Segment& s, const int64_t* ids, const int64_t* parents, const Cache& cache, long ahead) {
    if (s.tokens < 1 || s.start < 0 || s.nodes > s.tokens || s.logits_from < 0 || s.logits_from > s.tokens) return false;
    if (pages_for(s, cache, ahead) > s.page_count) return false;
    for (long i = 0; i < s.tokens; i++)
        if (ids[i] < 0 || ids[i] >= cache.vocabulary) return false;
    const bool tree = !is_chain(parents, s.nodes);
    const long causal = tree ? s.tokens - s.nodes : s.tokens, first = (long)write_at_.size();
    for (long i = 0; i < causal; i++) {
        positions_.push_back(s.start + i);
        visible_.push_back(s.start + i + 1);
        mask_.push_back(0);
    }
    deepest_ = tree ? 0 : s.nodes;
    if (tree && !add_nodes(s, parents, s.start + causal)) return false;
    if (s.start + s.tokens - s.nodes + deepest_ + ahead > cache.max_len) return false;
    for (long i = 0; i < s.tokens; i++) {
        write_at_.push_back(s.start + i);
        row_segment_.push_back((int32_t)starts_.size());
        if (i >= s.logits_from) wanted_.push_back(first + i);
    }
    starts_.push_back((int32_t)first);
    return true;
}

bool Packing::lay_out(const Given& given, const Cache& cache, long ahead, Batch* batch) {
    for (auto* column : {&positions_, &mask_, &wanted_}) column->clear();
    for (auto* column : {&row_segment_, &visible_, &starts_, &write_at_}) column->clear();
    const int64_t *ids = given.ids, *parents = given.parents;
    long width = 0;
    for (long i = 0; i < given.count; i++) {
        const Segment& s = given.segments[i];
        if (!add(s, ids, parents, cache, ahead)) return false;
        ids += s.tokens, parents += s.nodes;
        width = std::max(width, pages_for(s, cache, ahead));
    }
    if (!given.count) return false;
    starts_.push_back((int32_t)write_at_.size());
    tables_.assign(given.count * width, 0);
    for (long i = 0; i < given.count; i++) {
        const Segment& s = given.segments[i];
        memcpy(&tables_[i * width], s.pages, sizeof(int32_t) * pages_for(s, cache, ahead));
    }
    *batch = {
        given.ids, positions_.data(), row_segment_.data(), visible_.data(), mask_.data(), tables_.data(), starts_.data(),
        write_at_.data(), wanted_.data(), cache.k_pages, cache.v_pages, (long)write_at_.size(), given.count,
        (long)wanted_.size(), cache.page_size, width,
    };
    return true;
}
