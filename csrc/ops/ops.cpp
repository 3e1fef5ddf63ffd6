#include "ops/ops.h"

#include <stdint.h>
#include <string.h>

#include <algorithm>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "ops/block_formats.h"
#include "ops/dispatch.h"
#include "ops/thread_pool.h"

namespace cospec {

namespace {

constexpr size_t LINE = 64, HUGE_PAGE = 2 << 20;
constexpr long PANEL = 64, TILE = 64;  // outputs, inputs

// Large weights use huge pages, because every forward touches each page once.
void* allocate(size_t bytes) {
    const bool huge = bytes >= HUGE_PAGE;
    void* p = nullptr;
    // Kernels prefetch a few lines past the end; the slack keeps these lines inside.
    if (posix_memalign(&p, huge ? HUGE_PAGE : LINE, bytes + LINE) != 0) return nullptr;
#if defined(__linux__)
    if (huge) madvise(p, bytes, MADV_HUGEPAGE);
#endif
    return p;
}

long round_up(long n, long to) { return (n + to - 1) / to * to; }

template <class T> T flush_subnormal(T weight) { return weight; }
Bf16 flush_subnormal(Bf16 weight) {  // products take subnormal numbers for 0
    const uint16_t bits = (uint16_t)weight;
    return (Bf16)(bits & 0x7f80 ? bits : bits & 0x8000);
}

// Packs inputs [first_input, last_input) of some outputs. WORD inputs of an output share a word; rows beyond `outputs`
// and inputs beyond `all_inputs` are zeros. The constants WORD and `width` save a division per weight.
template <long WORD, class T>
void pack_tile(const T* from, long rows, long all_inputs, long width, long first_input, long last_input, T* to) {
    for (long j = 0; j < width; j++) {
        const T* row = from + j * all_inputs;
        T* p = to + j * WORD;
        for (long k = first_input; k < last_input; k += WORD)
            for (long i = 0; i < WORD; i++)
                p[k * width + i] = j < rows && k + i < all_inputs ? flush_subnormal(row[k + i]) : T(0);
    }
}

// Threads take panels; a tile of inputs stays in the first cache.
template <long WORD, class T> void pack(const T* from, long outputs, long all_inputs, T* to) {
    const long padded_outputs = round_up(outputs, 32), inputs = round_up(all_inputs, WORD);
    const long panels = round_up(padded_outputs, PANEL) / PANEL;
    in_parallel(outputs * all_inputs < 65536 ? 1 : num_threads(), [&](const Team& team) {
        for (long panel = team.begin(panels); panel < team.end(panels); panel++) {
            const long first = panel * PANEL, width = std::min(padded_outputs - first, PANEL);
            for (long k = 0; k < inputs; k += TILE)
                pack_tile<WORD>(from + first * all_inputs, outputs - first, all_inputs, width, k,
                    std::min(k + TILE, inputs), to + first * inputs);
        }
    });
}

// Four streams of multiplications, so that one thread hashes as fast as it reads.
uint64_t hash_chunk(const uint8_t* from, long bytes, uint64_t number) {
    constexpr uint64_t FACTOR = 0x9e3779b97f4a7c15;
    uint64_t state[4] = {number, ~number, number ^ FACTOR, number + FACTOR}, word;
    auto mix = [&](uint64_t& s, uint64_t w) {
        s = (s ^ w) * FACTOR;
        s ^= s >> 29;
    };
    long at = 0;
    for (; at + 32 <= bytes; at += 32)
        for (int i = 0; i < 4; i++) {
            memcpy(&word, from + at + 8 * i, 8);
            mix(state[i], word);
        }
    for (; at < bytes; at++) mix(state[at % 4], from[at]);
    for (int i = 1; i < 4; i++) mix(state[0], state[i]);
    mix(state[0], (uint64_t)bytes);
    return state[0];
}

float* padded_copy(const float* from, long n) {
    if (!from) return nullptr;
    float* to = (float*)allocate(sizeof(float) * round_up(n, PANEL));
    memset(to, 0, sizeof(float) * round_up(n, PANEL));
    memcpy(to, from, sizeof(float) * n);
    return to;
}

size_t packed_bytes(int format, long outputs, long inputs) {
    switch (format) {
#define FORMAT(name, id, Element, inputs_per_word, ...) \
    case id: return sizeof(Element) * round_up(outputs, 32) * round_up(inputs, inputs_per_word);
        WEIGHT_FORMATS(FORMAT)
#undef FORMAT
    }
    return packed_block_bytes(format, outputs, inputs);
}

void pack_weight(int format, const void* from, long outputs, long inputs, void* to) {
    switch (format) {
#define FORMAT(name, id, Element, inputs_per_word, ...) \
    case id: return pack<inputs_per_word>((const Element*)from, outputs, inputs, (Element*)to);
        WEIGHT_FORMATS(FORMAT)
#undef FORMAT
    }
    pack_blocks(format, (const uint8_t*)from, outputs, inputs, (uint8_t*)to);
}

}  // namespace

float* Scratch::reserve(size_t floats) {
    if (floats > size) {
        free(data);
        size = floats + floats / 4;
        data = (float*)allocate(size * sizeof(float));
    }
    return data;
}

Scratch& thread_scratch() {
    thread_local Scratch scratch;
    return scratch;
}

void write_cache(const AttentionParams& params, long sequence, long kv_head, long first, long last) {
    const int32_t* table = params.tables + sequence * params.table_width;
    const long stride = entry_bytes(params.cache_format, params.dim);
    for (long row = first; row < last; row++) {
        const long position = params.write_at[row], page = table[position / params.page_size];
        const long offset =
            ((page * params.kv_heads + kv_head) * params.page_size + position % params.page_size) * stride;
        const float* k = params.k + row * params.k_row + kv_head * params.k_head;
        const float* v = params.v + row * params.v_row + kv_head * params.v_head;
        switch (params.cache_format) {
#define FORMAT(name, id, Entry)                                                        \
    case id:                                                                           \
        Entry::write(k, params.dim, (Entry::Number*)((char*)params.k_pages + offset)); \
        Entry::write(v, params.dim, (Entry::Number*)((char*)params.v_pages + offset)); \
        break;
            CACHE_FORMATS(FORMAT)
#undef FORMAT
        }
    }
}

namespace {

constexpr long HEAD_QUERIES = 32;  // of a task and key-value head: they share keys and values, and stay in cache
constexpr long TASK_QUERIES = 48;  // of a task with several heads, which reads a page in the order of memory
constexpr long TASKS = 2;          // for each thread, which take tasks in turn

// How the attention of a batch is divided. Results do not depend on the division.
struct Division {
    long rows;   // of a task at most
    long heads;  // key-value heads of a task at most; 0: as many as TASK_QUERIES allow
    bool spans;  // whether a task has one span of the context
    long heads_of(const AttentionParams& params, long task_rows) const {
        const long queries = task_rows * (params.heads / params.kv_heads);
        const long most = TASK_QUERIES / queries < MAX_TASK_HEADS ? TASK_QUERIES / queries : MAX_TASK_HEADS;
        return most < 1 ? 1 : heads && heads < most ? heads : most;
    }
};

long num_spans(const AttentionParams& params, long sequence) {
    return params.write_at[params.starts[sequence + 1] - 1] / SPAN + 1;
}

// Visit each task with all spans of its context.
template <class Visit> void for_tasks(const AttentionParams& params, const Division& division, Visit visit) {
    for (long s = 0; s < params.num_sequences; s++)
        for (long first = params.starts[s], end = params.starts[s + 1]; first < end; first += division.rows) {
            const long last = first + division.rows < end ? first + division.rows : end;
            const long heads = division.heads_of(params, last - first);
            for (long h = 0; h < params.kv_heads; h += heads) {
                const long last_head = h + heads < params.kv_heads ? h + heads : params.kv_heads;
                visit(AttentionTask{s, h, last_head, first, last, ALL_SPANS, nullptr});
            }
        }
}

// Long contexts of few rows are divided by spans, then by heads, until each thread has some tasks.
Division divide(const AttentionParams& params, int threads) {
    const long rows = HEAD_QUERIES * params.kv_heads / params.heads;
    Division division = {rows < 1 ? 1 : rows, 0, false};
    long tasks = 0, spans = 0;
    for_tasks(params, division, [&](const AttentionTask& task) { tasks++, spans += num_spans(params, task.sequence); });
    division.spans = tasks < TASKS * threads && spans > tasks;
    const long found = division.spans ? spans : tasks;
    if (found < TASKS * threads) {
        const long groups = (TASKS * threads + found - 1) / found;
        division.heads = params.kv_heads / groups < 1 ? 1 : params.kv_heads / groups;
    }
    return division;
}

// Claim the tasks [*from, *to) of those that are left: neighbours, as a span fetches the begin of the next one.
bool claim(std::atomic<long>& next, long count, int threads, long* from, long* to) {
    *from = next.load(std::memory_order_relaxed);
    do {
        if (*from >= count) return false;
        const long share = (count - *from) / (2 * threads);
        *to = *from + (share > 1 ? share : 1);
    } while (!next.compare_exchange_weak(*from, *to, std::memory_order_relaxed, std::memory_order_relaxed));
    return true;
}

long state_floats(const AttentionParams& params, const AttentionTask& task) {
    return task.num_queries(params) * attention_state(params.dim);
}

}  // namespace

size_t attention_states(const AttentionParams& params, int threads) {
    const Division division = divide(params, threads);
    size_t floats = 0;
    for_tasks(params, division,
        [&](const AttentionTask& task) { floats += num_spans(params, task.sequence) * state_floats(params, task); });
    return division.spans ? floats : 0;
}

void run_attention(const AttentionParams& params, const Team& team, std::atomic<long>& next, float* states) {
    const Kernels& k = kernels();
    const long queries = HEAD_QUERIES > TASK_QUERIES ? HEAD_QUERIES : TASK_QUERIES,
               group = params.heads / params.kv_heads;
    float* scratch = thread_scratch().reserve(k.attend_scratch(queries > group ? queries : group, params.dim));
    const Division division = divide(params, team.size);
    const auto spans_of = [&](const AttentionTask& task) {
        return division.spans ? num_spans(params, task.sequence) : 1;
    };
    long count = 0, number = 0, from, to;
    for_tasks(params, division, [&](const AttentionTask& task) { count += spans_of(task); });
    bool more = claim(next, count, team.size, &from, &to);
    float* state = states;
    for_tasks(params, division, [&](AttentionTask task) {
        for (long span = 0; more && span < spans_of(task); span++, number++) {
            if (division.spans) task.span = span, task.state = state, state += state_floats(params, task);
            if (number < from) continue;
            k.attend(params, task, scratch);
            if (number + 1 == to) more = claim(next, count, team.size, &from, &to);
        }
    });
    if (!division.spans) return;
    team.barrier();
    number = 0, state = states;
    for_tasks(params, division, [&](AttentionTask task) {
        const long spans = num_spans(params, task.sequence);
        task.state = state, state += spans * state_floats(params, task);
        if (number++ % team.size == team.id) k.merge_spans(params, task, spans);
    });
}

// The number of a format of the KV cache. -1 when the library has no format of that name.
API int cospec_cache_format(const char* name) {
    const char* const names[] = {
#define FORMAT(name, ...) name,
        CACHE_FORMATS(FORMAT)
#undef FORMAT
    };
    for (int format = 0; format < NUM_CACHE_FORMATS; format++)
        if (!strcmp(names[format], name)) return format;
    return -1;
}

// The number of a weight format. -1 when the library has no kernel of that name.
API int cospec_weight_format(const char* name) {
    const char* const names[] = {
#define FORMAT(name, ...) name,
        WEIGHT_FORMATS(FORMAT) BLOCK_FORMATS(FORMAT)
#undef FORMAT
    };
    for (int format = 0; format < NUM_WEIGHT_FORMATS; format++)
        if (!strcmp(names[format], name)) return format;
    return -1;
}

// Bytes of a packed weight, and the packing. from: [outputs, inputs]; `to` is aligned to 64 bytes.
API long cospec_packed_bytes(int format, long outputs, long inputs) {
    return (long)packed_bytes(format, outputs, inputs);
}

API void cospec_pack(int format, const void* from, long outputs, long inputs, void* to) {
    pack_weight(format, from, outputs, inputs, to);
}

// weight: packed. order: [inputs], or null, see Linear. Both are not copied, and must outlive the result.
// scale, bias: [outputs], or null.
API Linear* cospec_linear_new(int format, const void* weight, const float* scale, const float* bias,
    const int32_t* order, long outputs, long inputs) {
    return new Linear{format, outputs, inputs, weight, padded_copy(scale, outputs), padded_copy(bias, outputs), order};
}

// A hash of memory that finds damage, not attacks. The number of threads does not change the result.
API uint64_t cospec_checksum(const uint8_t* from, long bytes) {
    constexpr long CHUNK = 1 << 20;
    const long chunks = (bytes + CHUNK - 1) / CHUNK;
    std::atomic<uint64_t> total{(uint64_t)bytes};
    in_parallel(chunks < 2 ? 1 : num_threads(), [&](const Team& team) {
        for (long c = team.begin(chunks); c < team.end(chunks); c++)
            total += hash_chunk(from + c * CHUNK, c + 1 < chunks ? CHUNK : bytes - c * CHUNK, (uint64_t)c);
    });
    return total;
}

API void cospec_linear_free(Linear* l) {
    free(l->scale);
    free(l->bias);
    delete l;
}

// y [rows, outputs] = x [rows, inputs] times the weight, both contiguous
API void cospec_linear(const Linear* l, const float* x, long rows, float* y) {
    const LinearParams params = {l, x, l->inputs, rows, y, l->outputs, l->outputs, STORE};
    // Waking the workers takes longer than a very small product.
    const int threads = rows * l->inputs * l->outputs < 30000 ? 1 : num_threads();
    in_parallel(threads, [&](const Team& team) {
        const Kernels& k = kernels();
        k.linear(params, team, thread_scratch().reserve(k.linear_scratch(rows, l->inputs)));
    });
}

API void cospec_attention(const AttentionParams* params) {
    std::atomic<long> next{0};
    Scratch shared;
    float* states = shared.reserve(attention_states(*params, num_threads()));
    in_parallel(num_threads(), [&](const Team& team) {
        const long pairs = params->num_sequences * params->kv_heads;
        for (long i = team.begin(pairs); i < team.end(pairs); i++) {
            const long s = i / params->kv_heads;
            write_cache(*params, s, i % params->kv_heads, params->starts[s], params->starts[s + 1]);
        }
        team.barrier();
        run_attention(*params, team, next, states);
    });
}

// Read memory to measure the bandwidth, each thread its own part. Returns the sum of the words.
API uint64_t cospec_read_memory(const uint64_t* from, long words) {
    std::atomic<uint64_t> total{0};
    constexpr long LINE = 64 / sizeof(*from), AHEAD = 64 * LINE;  // without prefetches some processors read less
    in_parallel(num_threads(), [&](const Team& team) {
        uint64_t sum = 0;
        long i = team.begin(words);
        for (; i + LINE <= team.end(words); i += LINE) {
            __builtin_prefetch(from + i + AHEAD);
            for (long word = 0; word < LINE; word++) sum += from[i + word];
        }
        for (; i < team.end(words); i++) sum += from[i];
        total += sum;
    });
    return total;
}

API void cospec_rms_norm(const float* x, const float* weight, float eps, long rows, long n, float* y) {
    in_parallel(rows * n < 65536 ? 1 : num_threads(), [&](const Team& team) {
        for (long r = team.begin(rows); r < team.end(rows); r++)
            kernels().rms_norm(x + r * n, weight, eps, n, y + r * n);
    });
}

API void cospec_argmax(const float* x, long rows, long n, int64_t* result) {
    for (long r = 0; r < rows; r++) result[r] = kernels().argmax(x + r * n, n);
}

API void cospec_set_threads(int threads) { set_num_threads(threads); }
API int cospec_threads() { return num_threads(); }

}  // namespace cospec
