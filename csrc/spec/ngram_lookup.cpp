// The tokens after the latest occurrence of the longest known n-gram (drafters/ngram.py).
#include <algorithm>
#include <random>

#include "ops/ops.h"
#include "spec/lookup.h"

namespace cospec {

namespace {

// Differs between processes, so that no prompt can be made of n-grams that share a place.
const uint64_t HASH_SEED = ((uint64_t)std::random_device()() << 32) ^ std::random_device()();

// The latest end of each n-gram of one size. Open addressing over positions of the text.
class LatestEnds {
   public:
    LatestEnds(const std::vector<int64_t>& text, long size)
        : text_(text),
          size_(size),
          ends_(64) {}

    // Note that an n-gram ends at `end`; a later end replaces an earlier one.
    void note(int32_t end) {
        if (2 * count_ >= ends_.size()) grow();
        int32_t& place = find(end);
        count_ += place == 0;
        place = end;
    }

    // The noted end of the n-gram before `end`; 0 if there is none.
    int32_t latest(int32_t end) { return find(end); }

   private:
    int32_t& find(int32_t end) {
        const int64_t* words = text_.data() + end - size_;
        uint64_t hash = HASH_SEED;
        for (long i = 0; i < size_; i++) hash = (hash ^ (uint64_t)words[i]) * 0x9E3779B97F4A7C15u, hash ^= hash >> 29;
        for (size_t place = hash;; place++) {
            int32_t& found = ends_[place & (ends_.size() - 1)];
            if (found == 0 || std::equal(words, words + size_, text_.data() + found - size_)) return found;
        }
    }

    void grow() {
        std::vector<int32_t> old(2 * ends_.size());
        old.swap(ends_);
        for (int32_t end : old)
            if (end) find(end) = end;
    }

    const std::vector<int64_t>& text_;
    const long size_;
    size_t count_ = 0;
    std::vector<int32_t> ends_;  // 0: free; its size is a power of two
};

struct NgramLookup : Lookup {
    const long shortest;
    std::vector<LatestEnds> by_size;  // from `shortest` tokens on

    NgramLookup(long shortest, long longest)
        : shortest(shortest) {
        for (long size = shortest; size <= longest; size++) by_size.emplace_back(tokens, size);
    }

    void extend(int64_t token) override {
        const long end = tokens.size();  // the n-grams that end here have a next token now
        for (long size = shortest; size < shortest + (long)by_size.size() && size <= end; size++)
            by_size[size - shortest].note(end);
        tokens.push_back(token);
    }

    void propose(const int64_t* assumed, long num_assumed, const LookupShape& shape, LookupDraft& draft) override {
        const size_t known = tokens.size();
        tokens.insert(tokens.end(), assumed, assumed + num_assumed);
        const long start = next_token(), count = std::min(shape.depth, shape.max_nodes);
        draft.tokens.clear(), draft.parents.clear(), draft.confidence.clear();
        if (start) {
            const long period = (long)tokens.size() - start;  // beyond the end, the copied tokens repeat
            for (long i = 0; i < count; i++)
                draft.tokens.push_back(tokens[start + i % period]), draft.parents.push_back(i - 1);
        }
        tokens.resize(known);
    }

   private:
    // The position after the latest earlier occurrence of the longest known suffix; 0 if there is none.
    long next_token() {
        const long end = tokens.size();
        for (long size = shortest + by_size.size() - 1; size >= shortest; size--) {
            const long found = size < end ? by_size[size - shortest].latest(end) : 0;
            if (found) return found;
        }
        return 0;
    }
};

}  // namespace

API void* cospec_ngram_new(long shortest, long longest) { return (Lookup*)new NgramLookup(shortest, longest); }

}  // namespace cospec
