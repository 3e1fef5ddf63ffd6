#include "ops/ops.h"

#include <stdint.h>
#include <string.h>
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
uint16_t flush_subnormal(uint16_t bf16) {
    return bf16 & 0x7f80 ? bf16 : bf16 & 0x8000;
}  // products take subnormal numbers for 0

// `inputs_per_word` inputs of an output share a word. Threads take panels; a tile of inputs stays in the first cache.
template <class T> void pack(const T* from, long outputs, long all_inputs, long inputs_per_word, T* to) {
    const long padded_outputs = round_up(outputs, 32), inputs = round_up(all_inputs, inputs_per_word);
    const long panels = round_up(padded_outputs, PANEL) / PANEL;
    auto pack_tile = [&](long panel, long first_input) {
        const long first = panel * PANEL, left = padded_outputs - first, width = left < PANEL ? left : PANEL;
        const long last_input = first_input + TILE < inputs ? first_input + TILE : inputs;
        T* p = to + first * inputs;
        for (long j = 0; j < width; j++) {
            const bool inside = first + j < outputs;
            const T* row = from + (first + j) * all_inputs;
            for (long k = first_input; k < last_input; k++)
                p[(k / inputs_per_word * width + j) * inputs_per_word + k % inputs_per_word] =
                    inside && k < all_inputs ? flush_subnormal(row[k]) : T(0);
        }
    };
    in_parallel(outputs * all_inputs < 65536 ? 1 : num_threads(), [&](const Team& team) {
        for (long panel = team.begin(panels); panel < team.end(panels); panel++)
            for (long k = 0; k < inputs; k += TILE) pack_tile(panel, k);
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
    case id: return pack((const Element*)from, outputs, inputs, inputs_per_word, (Element*)to);
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

long attention_rows(const AttentionParams& params) {
    const long rows = 32 * params.kv_heads / params.heads;
    return rows < 1 ? 1 : rows;
}

void write_cache(const AttentionParams& params, long sequence, long kv_head, long first, long last) {
    const int32_t* table = params.tables + sequence * params.table_width;
    for (long row = first; row < last; row++) {
        const long position = params.write_at[row], page = table[position / params.page_size];
        const long offset =
            ((page * params.kv_heads + kv_head) * params.page_size + position % params.page_size) * params.dim;
        memcpy(params.k_pages + offset, params.k + row * params.k_row + kv_head * params.k_head,
            sizeof(float) * params.dim);
        memcpy(params.v_pages + offset, params.v + row * params.v_row + kv_head * params.v_head,
            sizeof(float) * params.dim);
    }
}

void run_attention_tasks(const AttentionParams& params, std::atomic<long>& next) {
    const Kernels& k = kernels();
    const long rows_per_task = attention_rows(params);
    float* scratch =
        thread_scratch().reserve(k.attend_scratch(rows_per_task, params.heads / params.kv_heads, params.dim));
    long task = 0, claimed = next.fetch_add(1);
    for (long s = 0; s < params.num_sequences; s++)
        for (long first = params.starts[s]; first < params.starts[s + 1]; first += rows_per_task)
            for (long h = 0; h < params.kv_heads; h++, task++) {
                if (task != claimed) continue;
                k.attend(params, s, h, first,
                    first + rows_per_task < params.starts[s + 1] ? first + rows_per_task : params.starts[s + 1],
                    scratch);
                claimed = next.fetch_add(1);
            }
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

// weight: packed, not copied, and must outlive the result. scale, bias: [outputs], or null.
API Linear* cospec_linear_new(
    int format, const void* weight, const float* scale, const float* bias, long outputs, long inputs) {
    return new Linear{format, outputs, inputs, weight, padded_copy(scale, outputs), padded_copy(bias, outputs)};
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
        k.linear(params, team.id, team.size, thread_scratch().reserve(k.linear_scratch(rows, l->inputs)));
    });
}

API void cospec_attention(const AttentionParams* params) {
    std::atomic<long> next{0};
    in_parallel(num_threads(), [&](const Team& team) {
        const long pairs = params->num_sequences * params->kv_heads;
        for (long i = team.begin(pairs); i < team.end(pairs); i++) {
            const long s = i / params->kv_heads;
            write_cache(*params, s, i % params->kv_heads, params->starts[s], params->starts[s + 1]);
        }
        team.barrier();
        run_attention_tasks(*params, next);
    });
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
