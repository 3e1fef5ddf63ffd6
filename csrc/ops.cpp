#include "ops.h"

#include <stdint.h>
#include <string.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "dispatch.h"

namespace {

constexpr size_t LINE = 64, HUGE_PAGE = 2 << 20;
constexpr long PANEL = 64;

// Large weights on huge pages, since walking them touches each page once per forward.
void* allocate(size_t bytes) {
    const bool huge = bytes >= HUGE_PAGE;
    void* p = nullptr;
    // Kernels fetch a few lines past the end of what they read; the slack keeps that inside.
    if (posix_memalign(&p, huge ? HUGE_PAGE : LINE, bytes + LINE) != 0) return nullptr;
#if defined(__linux__)
    if (huge) madvise(p, bytes, MADV_HUGEPAGE);
#endif
    return p;
}

long rounded(long n, long to) { return (n + to - 1) / to * to; }

template <class T> T kept(T weight) { return weight; }
uint16_t kept(uint16_t bf16) { return bf16 & 0x7f80 ? bf16 : bf16 & 0x8000; }  // products take subnormal numbers for 0

// `together` inputs of an output share a word.
template <class T> void pack(const Linear& l, const T* from, long together) {
    T* to = (T*)l.weight;
    const long all = rounded(l.outputs, 32), inputs = rounded(l.inputs, together);
    for (long panel = 0; panel < all; panel += PANEL) {
        const long width = all - panel < PANEL ? all - panel : PANEL;
        T* p = to + panel * inputs;
        for (long j = 0; j < width; j++) {
            const bool real = panel + j < l.outputs;
            const T* row = from + (panel + j) * l.inputs;
            for (long k = 0; k < inputs; k++)
                p[(k / together * width + j) * together + k % together] = real && k < l.inputs ? kept(row[k]) : T(0);
        }
    }
}

float* padded_copy(const float* from, long n) {
    if (!from) return nullptr;
    float* to = (float*)allocate(sizeof(float) * rounded(n, PANEL));
    memset(to, 0, sizeof(float) * rounded(n, PANEL));
    memcpy(to, from, sizeof(float) * n);
    return to;
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

Scratch& own_scratch() {
    thread_local Scratch scratch;
    return scratch;
}

Linear* linear_new(int kind, const void* weight, const float* scale, const float* bias, long outputs, long inputs) {
    const size_t element = kind == FP32 ? 4 : kind == BF16 ? 2 : 1;
    Linear* l = new Linear{kind, outputs, inputs, nullptr, padded_copy(scale, outputs), padded_copy(bias, outputs)};
    l->weight = allocate(element * rounded(outputs, 32) * rounded(inputs, 2));
    if (kind == FP32) pack(*l, (const float*)weight, 1);
    if (kind == BF16) pack(*l, (const uint16_t*)weight, 2);
    if (kind == INT8) pack(*l, (const int8_t*)weight, 1);
    return l;
}

void linear_free(Linear* l) {
    if (!l) return;
    free(l->weight);
    free(l->scale);
    free(l->bias);
    delete l;
}

long attention_rows(const AttentionJob& job) {
    const long rows = 32 * job.kv_heads / job.heads;
    return rows < 1 ? 1 : rows;
}

void write_cache(const AttentionJob& job, long segment, long kv_head, long first, long last) {
    const int32_t* table = job.tables + segment * job.table_width;
    for (long row = first; row < last; row++) {
        const long at = job.write_at[row], page = table[at / job.page_size];
        const long offset = ((page * job.kv_heads + kv_head) * job.page_size + at % job.page_size) * job.dim;
        memcpy(job.k_pages + offset, job.k + row * job.k_row + kv_head * job.k_head, sizeof(float) * job.dim);
        memcpy(job.v_pages + offset, job.v + row * job.v_row + kv_head * job.v_head, sizeof(float) * job.dim);
    }
}

void attend_all(const AttentionJob& job, std::atomic<long>& next) {
    const Kernels& k = kernels();
    const long most = attention_rows(job);
    float* scratch = own_scratch().reserve(k.attend_scratch(most, job.heads / job.kv_heads, job.dim));
    long task = 0, mine = next.fetch_add(1);
    for (long s = 0; s < job.segments; s++)
        for (long first = job.starts[s]; first < job.starts[s + 1]; first += most)
            for (long h = 0; h < job.kv_heads; h++, task++) {
                if (task != mine) continue;
                k.attend(job, s, h, first, first + most < job.starts[s + 1] ? first + most : job.starts[s + 1], scratch);
                mine = next.fetch_add(1);
            }
}

API Linear* cospec_linear_new(
    int kind, const void* weight, const float* scale, const float* bias, long outputs, long inputs) {
    return linear_new(kind, weight, scale, bias, outputs, inputs);
}

API void cospec_linear_free(Linear* linear) { linear_free(linear); }

// y [rows, outputs] = x [rows, inputs] times the weight, both contiguous
API void cospec_linear(const Linear* l, const float* x, long rows, float* y) {
    const LinearJob job = {l, x, l->inputs, rows, y, l->outputs, l->outputs, SET};
    // Waking the others takes longer than a very small product.
    const int threads = rows * l->inputs * l->outputs < 30000 ? 1 : pool_threads();
    in_parallel(threads, [&](const Team& team) {
        const Kernels& k = kernels();
        k.linear(job, team.id, team.size, own_scratch().reserve(k.linear_scratch(rows, l->inputs)));
    });
}

API void cospec_attention(const AttentionJob* job) {
    std::atomic<long> next{0};
    in_parallel(pool_threads(), [&](const Team& team) {
        const long pairs = job->segments * job->kv_heads;
        for (long i = team.begin(pairs); i < team.end(pairs); i++) {
            const long s = i / job->kv_heads;
            write_cache(*job, s, i % job->kv_heads, job->starts[s], job->starts[s + 1]);
        }
        team.barrier();
        attend_all(*job, next);
    });
}

API void cospec_rms_norm(const float* x, const float* weight, float eps, long rows, long n, float* y) {
    in_parallel(rows * n < 65536 ? 1 : pool_threads(), [&](const Team& team) {
        for (long r = team.begin(rows); r < team.end(rows); r++) kernels().rms_norm(x + r * n, weight, eps, n, y + r * n);
    });
}

API void cospec_argmax(const float* x, long rows, long n, int64_t* result) {
    for (long r = 0; r < rows; r++) result[r] = kernels().argmax(x + r * n, n);
}

API void cospec_set_threads(int threads) { pool_set_threads(threads); }
API int cospec_threads() { return pool_threads(); }
