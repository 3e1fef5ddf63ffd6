// A step does what drafters/model.py or a lookup, core/verifier.py and drafters/draft_kv_cache.py do.
#include "spec/multi_step.h"

#include <poll.h>
#include <string.h>

#include <algorithm>
#include <chrono>
#include <vector>

namespace cospec {

namespace {

constexpr long HEADER = sizeof(OutputHeader) / sizeof(int64_t);

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// The state of a request between steps.
struct SlotState {
    std::vector<int64_t> tokens;  // known tokens that are not yet fed
    int64_t num_known, num_computed, num_left, first_logit;
    long num_fed() const { return num_known - (long)tokens.size(); }
    long num_pending() const { return num_known - num_computed; }
};

// Buffers are kept between calls, because fresh memory costs more than the data written to it.
struct Workspace {
    Scratch logits, q;
    Scratch drafter_rows, drafter_logits, last_rows;  // of a blend: by step of a draft; by row of the target; after it
    std::vector<double> divergences;
    std::vector<SlotState> states;
    std::vector<SequenceSlice> slices;
    std::vector<int64_t> ids, parents, depths, drafted, nodes, results;
    std::vector<double> temperatures;
    std::vector<uint64_t> streams;
    std::vector<VerifyTask> tasks, last_tasks;
    std::vector<long> fully_accepted;
    LookupDraft lookup_draft;
};
thread_local Workspace workspace;

struct MultiStepRunner {
    const MultiStepTask& task;
    const long vocab_size = task.cache->vocab_size;
    double* q = nullptr;  // [num_drafting, max_draft_len, vocab_size]
    long logit_rows = 0;  // of the steps so far
    const bool blended = task.blend_form != SINGLE;
    float* drafter_rows = nullptr;    // of a blend, [max_draft_len, num_drafting, vocab_size]
    float* drafter_logits = nullptr;  // of a blend, a row for each row of the target

    void start() {
        workspace.states.resize(task.num_slots);
        const int64_t* token = task.tokens;
        for (long i = 0; i < task.num_slots; i++) {
            const RequestSlot& slot = task.slots[i];
            SlotState& state = workspace.states[i];
            state.tokens.assign(token, token + slot.num_known - slot.num_fed);
            state.num_known = slot.num_known, state.num_computed = slot.num_computed;
            state.num_left = slot.num_left, state.first_logit = slot.first_logit;
            token += slot.num_known - slot.num_fed;
        }
        workspace.depths.clear();
        for (long i = 0; i < task.num_drafting; i++) workspace.depths.push_back(task.slots[i].draft_len);
        workspace.drafted.resize(task.num_drafting * task.max_draft_len);
    }

    bool draft() {
        bool any_sampled = false;
        for (long i = 0; i < task.num_drafting; i++)
            any_sampled |= !task.slots[i].lookup && task.slots[i].params.sampling.temperature > 0.0;
        q = any_sampled ? (double*)workspace.q.reserve(2 * task.num_drafting * task.max_draft_len * vocab_size)
                        : nullptr;
        if (blended) drafter_rows = workspace.drafter_rows.reserve(task.max_draft_len * task.num_drafting * vocab_size);
        std::fill(workspace.drafted.begin(), workspace.drafted.end(), -1);
        for (long first = 0, end; first < task.num_drafting; first = end) {
            for (end = first + 1; end < task.num_drafting; end++)
                if (task.slots[end].drafter != task.slots[first].drafter) break;
            if (task.slots[first].lookup)
                for (long i = first; i < end; i++) look_up(i);
            else if (!draft_by_one(first, end))
                return false;
        }
        return true;
    }

    // Draft for a request without a model. The lookup reads the known tokens that it has not read before.
    void look_up(long i) {
        const RequestSlot& slot = task.slots[i];
        const SlotState& state = workspace.states[i];
        LookupDraft& draft = workspace.lookup_draft;
        for (size_t place = slot.lookup->tokens.size() - state.num_fed(); place < state.tokens.size(); place++)
            slot.lookup->extend(state.tokens[place]);
        slot.lookup->propose(nullptr, 0, {slot.draft_len, slot.draft_len, nullptr, 0, 0.0}, draft);
        std::copy(draft.tokens.begin(), draft.tokens.end(), workspace.drafted.begin() + i * task.max_draft_len);
    }

    // Draft for the requests [first, end), which have one drafter.
    bool draft_by_one(long first, long end) {
        workspace.slices.clear(), workspace.ids.clear(), workspace.temperatures.clear(), workspace.streams.clear();
        for (long i = first; i < end; i++) {
            const RequestSlot& slot = task.slots[i];
            const SlotState& state = workspace.states[i];
            const uint64_t base = state.num_known, size = state.tokens.size();
            workspace.slices.push_back(
                {state.num_fed(), (long)size, 0, (long)size - 1, slot.drafter_pages, slot.num_drafter_pages});
            workspace.ids.insert(workspace.ids.end(), state.tokens.begin(), state.tokens.end());
            workspace.temperatures.push_back(slot.params.sampling.temperature);
            const uint64_t step_word = slot.stream_kind == TARGET ? 0 : base;
            for (uint64_t word : {slot.params.seed, slot.stream_kind, (uint64_t)0, (uint64_t)0, base, step_word})
                workspace.streams.push_back(word);
        }
        const long row = first * task.max_draft_len;
        const BatchView view = {workspace.slices.data(), workspace.ids.data(), nullptr, end - first};
        const Rollout rollout = {workspace.temperatures.data(), workspace.streams.data(),
            workspace.depths.data() + first, task.max_draft_len, drafter_rows,
            drafter_rows ? (end - first) * vocab_size : 0, q ? q + row * vocab_size : nullptr,
            workspace.drafted.data() + row, nullptr, nullptr};
        return cospec_llama_rollout(task.slots[first].drafter, task.slots[first].drafter_cache, &view, &rollout);
    }

    const int64_t* draft_tokens(long i) const {
        return i < task.num_drafting ? workspace.drafted.data() + i * task.max_draft_len : task.slots[i].draft;
    }

    // The length of a request's draft. A draft of the call ends where the drafter's logits held NaN, or where a lookup
    // found no more.
    long num_drafted(long i) const {
        const int64_t* tokens = draft_tokens(i);
        const long n = task.slots[i].draft_len;
        return i < task.num_drafting ? std::find(tokens, tokens + n, -1) - tokens : n;
    }

    const double* draft_probs(long i) const {
        const RequestSlot& slot = task.slots[i];
        if (i >= task.num_drafting) return slot.q;
        const bool sampled = !slot.lookup && slot.stream_kind == DRAFT && slot.params.sampling.temperature > 0.0;
        return sampled ? q + i * task.max_draft_len * vocab_size : nullptr;
    }

    // Lay out the computed tokens of a request and its draft. Returns the number of logit rows.
    long add_slot(long i, long row) {
        const RequestSlot& slot = task.slots[i];
        const SlotState& state = workspace.states[i];
        const long n = num_drafted(i), pending = state.num_pending(), node_offset = workspace.nodes.size();
        const long num_rows = pending + n - state.first_logit, num_verified = slot.deferred ? 0 : num_rows - blended;
        const int64_t* tokens = draft_tokens(i);
        workspace.slices.push_back({state.num_computed, pending + n, n, state.first_logit, slot.pages, slot.num_pages});
        workspace.ids.insert(workspace.ids.end(), state.tokens.end() - pending, state.tokens.end());
        workspace.ids.insert(workspace.ids.end(), tokens, tokens + n);
        workspace.nodes.insert(workspace.nodes.end(), tokens, tokens + n);
        for (long node = 0; node < n; node++) {
            const int64_t parent = slot.parents ? slot.parents[node] : node - 1;
            workspace.parents.push_back(parent), workspace.nodes.push_back(parent);
        }
        workspace.tasks.push_back({row, row, num_verified, node_offset, slot.deferred ? 0 : n, draft_probs(i), nullptr,
            (uint64_t)state.num_known, slot.params});
        return num_rows;
    }

    bool score(float** logits) {
        long row = 0;
        for (auto* column : {&workspace.ids, &workspace.parents, &workspace.nodes}) column->clear();
        workspace.slices.clear(), workspace.tasks.clear();
        for (long i = 0; i < task.num_slots; i++) row += add_slot(i, row);
        *logits = task.logits ? task.logits + logit_rows * vocab_size : workspace.logits.reserve(row * vocab_size);
        logit_rows += row;
        const BatchView view = {
            workspace.slices.data(), workspace.ids.data(), workspace.parents.data(), task.num_slots};
        return cospec_llama_score(task.target, task.cache, &view, *logits);
    }

    bool verify(const float* logits) {
        const double weight = 1.0;
        if (blended) place_drafter_logits();
        const float* rows[2] = {logits, drafter_logits};
        const LogitsSource source = {rows, blended ? task.blend_weights : &weight, 1 + blended, vocab_size,
            task.blend_form, 0.0, blended ? workspace.divergences.data() : nullptr};
        workspace.results.resize(task.num_slots * sizeof(VerifyResult) / sizeof(int64_t) + workspace.nodes.size());
        cospec_verify(
            &source, workspace.tasks.data(), task.num_slots, workspace.nodes.data(), workspace.results.data());
        return !blended || sample_last(source);
    }

    // Copy the drafter's logits to the rows of the target, except those after the last token of each draft.
    void place_drafter_logits() {
        const VerifyTask& last = workspace.tasks.back();
        const long num_rows = last.first_row + last.num_rows + 1;
        drafter_logits = workspace.drafter_logits.reserve(num_rows * vocab_size);
        for (long i = 0; i < task.num_drafting; i++) {
            const VerifyTask& own = workspace.tasks[i];
            for (long row = 0; row < own.num_rows; row++)
                memcpy(drafter_logits + (own.first_row + row) * vocab_size,
                    drafter_rows + (row * task.num_drafting + i) * vocab_size, vocab_size * sizeof(float));
        }
        workspace.divergences.assign(num_rows, 0.0);
    }

    // Where a draft was accepted as a whole, score its last token with the drafter, and sample the token after it.
    // Returns false where the library cannot lay out the batch.
    bool sample_last(const LogitsSource& source) {
        VerifyResult* results = (VerifyResult*)workspace.results.data();
        workspace.slices.clear(), workspace.ids.clear(), workspace.last_tasks.clear(), workspace.fully_accepted.clear();
        for (long i = 0; i < task.num_slots; i++) {
            const VerifyTask& own = workspace.tasks[i];
            const SlotState& state = workspace.states[i];
            if (results[i].invalid || results[i].num_accepted < own.num_nodes || results[i].token >= 0) continue;
            const long n = own.num_nodes, start = n ? state.num_known + n - 1 : state.num_fed();
            const int64_t* first = n ? draft_tokens(i) + n - 1 : state.tokens.data();
            const long count = n ? 1 : state.tokens.size();
            const RequestSlot& slot = task.slots[i];
            workspace.slices.push_back({start, count, 0, count - 1, slot.drafter_pages, slot.num_drafter_pages});
            workspace.ids.insert(workspace.ids.end(), first, first + count);
            workspace.last_tasks.push_back({own.first_row + n, own.first_row + n, 1, 0, 0, nullptr, nullptr,
                (uint64_t)(state.num_known + n), slot.params});
            workspace.fully_accepted.push_back(i);
        }
        const long count = workspace.fully_accepted.size();
        if (!count) return true;
        float* rows = workspace.last_rows.reserve(count * vocab_size);
        const BatchView view = {workspace.slices.data(), workspace.ids.data(), nullptr, count};
        if (!cospec_llama_score(task.slots[0].drafter, task.slots[0].drafter_cache, &view, rows)) return false;
        for (long place = 0; place < count; place++)
            memcpy(drafter_logits + workspace.last_tasks[place].first_row * vocab_size, rows + place * vocab_size,
                vocab_size * sizeof(float));
        std::vector<VerifyResult> found(count);
        cospec_verify(&source, workspace.last_tasks.data(), count, nullptr, (int64_t*)found.data());
        for (long place = 0; place < count; place++) {
            const long i = workspace.fully_accepted[place];
            results[i].token = found[place].token, results[i].invalid |= found[place].invalid;
            results[i].bonus = workspace.tasks[i].num_nodes > 0;
        }
        return true;
    }

    // Commit a result to a request and to its output row. Returns whether the request can run another such step; a
    // request with a given draft cannot.
    bool commit(long step, long i, const int64_t* path, int64_t* out) {
        const VerifyResult& result = ((const VerifyResult*)workspace.results.data())[i];
        const RequestSlot& slot = task.slots[i];
        SlotState& state = workspace.states[i];
        const int64_t* drafted = draft_tokens(i);
        const long n = num_drafted(i), accepted = result.num_accepted;
        const OutputHeader header = {n, accepted, result.token, result.invalid ? -1 : result.bonus};
        memcpy(out, &header, sizeof header);
        if (i < task.num_drafting)
            std::copy(drafted, drafted + n, out + HEADER);
        else
            std::copy(path, path + accepted, out + HEADER);
        if (result.invalid || result.token < 0 || slot.draft) return false;
        // The drafter was not fed its last token, unless the token was accepted for a blend. A lookup reads no drafts.
        const long num_cached = slot.lookup                ? 0
                                : blended && accepted == n ? n
                                                           : std::max(0L, std::min(accepted, n - 1));
        if (task.divergences) {
            const double* own = workspace.divergences.data() + workspace.tasks[i].first_row;
            double* divergences = task.divergences + (step * task.num_slots + i) * (task.max_draft_len + 1);
            std::copy(own, own + accepted + 1, divergences);
        }
        state.tokens.assign(drafted + num_cached, drafted + accepted);
        state.tokens.push_back(result.token);
        state.num_known += accepted + 1, state.num_left -= accepted + 1;
        state.num_computed = state.num_known - 1, state.first_logit = 0;
        const int64_t* stop_end = slot.stop_tokens + slot.num_stop_tokens;
        bool stopped = std::find(slot.stop_tokens, stop_end, result.token) != stop_end;
        for (long node = 0; node < accepted; node++)
            stopped |= std::find(slot.stop_tokens, stop_end, drafted[node]) != stop_end;
        task.num_fed[i] = state.num_fed();
        return !stopped && state.num_left > slot.draft_len;
    }

    bool woken() const {
        pollfd descriptor = {(int)task.wakeup_fd, POLLIN, 0};
        return task.wakeup_fd >= 0 && poll(&descriptor, 1, 0) > 0;
    }

    long run() {
        const double call_start = now();
        start();
        for (long step = 0; step < task.max_steps; step++) {
            const double step_start = now();
            const bool late = (step_start - call_start) * (step + 1) > task.time_limit * step;
            if (step && (late || woken())) return step;
            if (task.num_drafting && !draft()) return step;
            const double drafted = now();
            float* logits;
            if (!score(&logits)) return step;
            const double scored = now();
            if (!verify(logits)) return step;
            double* seconds = task.seconds + 3 * step;
            seconds[0] = drafted - step_start, seconds[1] = scored - drafted, seconds[2] = now() - scored;
            const int64_t* paths = workspace.results.data() + task.num_slots * sizeof(VerifyResult) / sizeof(int64_t);
            int64_t* out = task.output + step * task.num_slots * task.output_width;
            bool all_go_on = true;
            for (long i = 0; i < task.num_slots; i++, out += task.output_width)
                all_go_on &= commit(step, i, paths + workspace.tasks[i].node_offset, out);
            if (!all_go_on) return step + 1;
        }
        return task.max_steps;
    }
};

}  // namespace

// Returns how many steps were run. 0: the library cannot lay out the batch, and no output was written.
API long cospec_multi_step(const MultiStepTask* task) { return MultiStepRunner{*task}.run(); }

}  // namespace cospec
