// The tokens that followed the longest known suffix, by a suffix automaton with counts (drafters/suffix.py).
#include <algorithm>
#include <memory>
#include <queue>
#include <tuple>
#include <unordered_map>

#include "ops/ops.h"
#include "spec/lookup.h"

namespace cospec {

namespace {

constexpr long LONGEST = 32;    // maximum length of a counted suffix
constexpr long MAX_NODES = 64;  // of a draft tree
constexpr long LINEAR = 16;     // continuations from which on a state has a hash table
constexpr int32_t ROOT = 0, NONE = -1;

struct Continuation {
    int64_t token;
    int32_t state;
};

// The continuations of a state, in the order of their first occurrence.
struct Continuations {
    std::vector<Continuation> list;
    std::unique_ptr<std::unordered_map<int64_t, int32_t>> places;

    Continuations() = default;
    Continuations(Continuations&&) = default;
    Continuations(const Continuations& other)
        : list(other.list) {
        if (other.places) places = std::make_unique<std::unordered_map<int64_t, int32_t>>(*other.places);
    }

    Continuation* find(int64_t token) {
        if (places) {
            const auto found = places->find(token);
            return found == places->end() ? nullptr : &list[found->second];
        }
        for (Continuation& each : list)
            if (each.token == token) return &each;
        return nullptr;
    }

    void set(int64_t token, int32_t state) {
        if (Continuation* found = find(token)) {
            found->state = state;
            return;
        }
        list.push_back({token, state});
        if (places) {
            places->emplace(token, list.size() - 1);
        } else if (list.size() > LINEAR) {
            places = std::make_unique<std::unordered_map<int64_t, int32_t>>();
            for (size_t place = 0; place < list.size(); place++) places->emplace(list[place].token, place);
        }
    }
};

struct State {
    Continuations next;
    int32_t link = NONE;
    int64_t length = 0, count = 0;
};

struct Automaton;

// A matched suffix of `length` tokens: the automaton's state after it.
struct Match {
    Automaton* automaton;
    int32_t state;
    int64_t length;
};

// All substrings of a growing text, with counts of those up to LONGEST tokens.
struct Automaton {
    std::vector<State> states = std::vector<State>(1);
    long size = 0;

    void add(int64_t token) {
        size++;
        int32_t at = last_;
        if (states[at].next.find(
                token)) {  // only after `cut`: the text so far is a substring with another continuation
            last_ = split(at, token);
        } else {
            const int32_t made = last_ = new_state(states[at].length + 1);
            for (; at >= 0 && !states[at].next.find(token); at = states[at].link) states[at].next.set(token, made);
            const int32_t link = at >= 0 ? split(at, token) : ROOT;
            states[made].link = link;
        }
        note(token);
    }

    // Begin another text: no substring crosses this position.
    void cut() { last_ = recent_ = ROOT, reach_ = 0; }

    // The longest suffix of the text itself that occurred earlier.
    Match own_match() {
        int32_t state = recent_;
        int64_t length = reach_;
        while (state > ROOT && states[state].count < 2) state = states[state].link, length = states[state].length;
        return {this, std::max(state, ROOT), std::min<int64_t>(length, LONGEST)};
    }

    // The longest suffix of the tokens [first, end) that occurs in the text.
    Match match(const int64_t* first, const int64_t* end) {
        int32_t state = ROOT;
        int64_t length = 0;
        for (; first < end; first++) {
            Continuation* next;
            while (!(next = states[state].next.find(*first)) && state != ROOT)
                state = states[state].link, length = states[state].length;
            if (next) state = next->state, length++;
        }
        return {this, state, length};
    }

   private:
    int32_t new_state(int64_t length) {
        states.emplace_back();
        states.back().length = length;
        return states.size() - 1;
    }

    // The state of exactly the substrings of `at` followed by `token`; the other substrings get a new state.
    int32_t split(int32_t at, int64_t token) {
        const int32_t whole = states[at].next.find(token)->state;
        if (states[whole].length == states[at].length + 1) return whole;
        const int32_t part = new_state(states[at].length + 1);
        Continuations next = states[whole].next;
        states[part].next.list = std::move(next.list), states[part].next.places = std::move(next.places);
        states[part].link = states[whole].link, states[part].count = states[whole].count;
        states[whole].link = part;
        for (; at >= 0; at = states[at].link) {
            Continuation* found = states[at].next.find(token);
            if (!found || found->state != whole) break;
            found->state = part;
        }
        return part;
    }

    // Count the substrings that end here, up to LONGEST tokens long.
    void note(int64_t token) {
        recent_ = states[recent_].next.find(token)->state;
        reach_ = std::min(reach_ + 1, LONGEST);
        for (int32_t link; (link = states[recent_].link) >= 0 && states[link].length >= reach_;) recent_ = link;
        for (int32_t state = recent_; state > ROOT; state = states[state].link) states[state].count++;
    }

    int32_t last_ = ROOT, recent_ = ROOT;  // the state of the text; the state of its last LONGEST tokens
    long reach_ = 0;                       // the number of these tokens
};

// Finished responses in two automata; the older is dropped when the younger is full.
struct Responses {
    const long half;
    std::unique_ptr<Automaton> older = std::make_unique<Automaton>(), younger = std::make_unique<Automaton>();

    explicit Responses(long max_tokens)
        : half(max_tokens / 2) {}

    void add(const int64_t* first, const int64_t* end) {
        for (first = std::max(first, end - half); first < end; first++) younger->add(*first);
        younger->cut();
        if (younger->size >= half) older = std::move(younger), younger = std::make_unique<Automaton>();
    }
};

// A node that may join the tree; the smallest joins first.
using Waiting = std::tuple<double, long, long, long, int64_t, double, int32_t>;  // minus the product of confidences,
// rank among its siblings, depth, parent, token, confidence, state

struct SuffixLookup : Lookup {
    Automaton own;
    Responses* const responses;
    const long min_match;

    SuffixLookup(Responses* responses, long min_match)
        : responses(responses),
          min_match(min_match) {}

    void extend(int64_t token) override { tokens.push_back(token), own.add(token); }

    // No token may be assumed.
    void propose(const int64_t*, long, const LookupShape& shape, LookupDraft& draft) override {
        draft.tokens.clear(), draft.parents.clear(), draft.confidence.clear();
        Match best = own.own_match();
        const int64_t* end = tokens.data() + tokens.size();
        for (Automaton* each : {responses->younger.get(), responses->older.get()}) {
            if (!each->size) continue;
            const Match found = each->match(std::max(end - LONGEST, (const int64_t*)tokens.data()), end);
            if (found.length > best.length) best = found;
        }
        if (best.length >= min_match && std::min(shape.depth, shape.max_nodes) > 0) read(best, shape, draft);
    }

   private:
    // The most probable nodes after the match, by the product of their confidences.
    void read(const Match& match, const LookupShape& shape, LookupDraft& draft) {
        waiting_.clear();
        add_children(match, -1, 0, 1.0, shape);
        const size_t most = std::min(shape.max_nodes, (int64_t)MAX_NODES);
        while (!waiting_.empty() && draft.tokens.size() < most) {
            std::pop_heap(waiting_.begin(), waiting_.end(), std::greater<>());
            const auto [value, rank, depth, parent, token, confidence, state] = waiting_.back();
            waiting_.pop_back();
            const long node = draft.tokens.size();
            draft.tokens.push_back(token), draft.parents.push_back(parent), draft.confidence.push_back(confidence);
            if (depth < shape.depth)
                add_children({match.automaton, state, match.length + depth}, node, depth, -value, shape);
        }
    }

    // Add the continuations of node `parent` at `depth`; a single child for a chain.
    void add_children(const Match& match, long parent, long depth, double above, const LookupShape& shape) {
        long width = depth < shape.num_widths ? shape.widths[depth] : shape.max_nodes > shape.depth ? MAX_NODES : 1;
        const std::vector<State>& states = match.automaton->states;
        const std::vector<Continuation>& list = states[match.state].next.list;
        followers_.clear();
        int64_t total = 0;
        for (auto each = list.rbegin(); each != list.rend(); ++each)  // newest first
            if (const int64_t count = states[each->state].count) followers_.push_back({count, *each}), total += count;
        std::stable_sort(followers_.begin(), followers_.end(),
            [](const Follower& one, const Follower& other) { return one.count > other.count; });
        width = std::min(width, (long)followers_.size());
        for (long rank = 0; rank < width; rank++) {
            const auto& [count, next] = followers_[rank];
            const double confidence = (double)count / (double)total * (double)match.length / (double)(match.length + 1);
            if (above * confidence < shape.threshold) continue;
            waiting_.emplace_back(-above * confidence, rank, depth + 1, parent, next.token, confidence, next.state);
            std::push_heap(waiting_.begin(), waiting_.end(), std::greater<>());
        }
    }

    struct Follower {
        int64_t count;
        Continuation next;
    };
    std::vector<Follower> followers_;
    std::vector<Waiting> waiting_;
};

}  // namespace

API void* cospec_responses_new(long max_tokens) { return new Responses(max_tokens); }
API void cospec_responses_free(void* responses) { delete (Responses*)responses; }
API long cospec_responses_size(const void* responses) {
    return ((const Responses*)responses)->older->size + ((const Responses*)responses)->younger->size;
}

// Store the tokens [first, end) of a text.
API void cospec_responses_add(void* responses, const void* lookup, long first, long end) {
    const std::vector<int64_t>& tokens = ((const Lookup*)lookup)->tokens;
    ((Responses*)responses)->add(tokens.data() + first, tokens.data() + end);
}

// The responses have to outlive the lookup.
API void* cospec_suffix_new(void* responses, long min_match) {
    return (Lookup*)new SuffixLookup((Responses*)responses, min_match);
}

}  // namespace cospec
