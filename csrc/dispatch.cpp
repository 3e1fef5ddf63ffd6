#include "dispatch.h"
#include "ops.h"

#include <string.h>

#include <atomic>

namespace {

const Kernels* best() {
#if defined(__x86_64__)
    __builtin_cpu_init();
#if defined(COSPEC_HAS_AVX512)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
#if defined(COSPEC_HAS_AVX512_BF16)
        if (__builtin_cpu_supports("avx512bf16")) return &kernels_avx512_bf16;
#endif
        return &kernels_avx512;
    }
#endif
#if defined(COSPEC_HAS_AVX2)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &kernels_avx2;
#endif
#endif
    return &kernels_base;
}

// From the least to the best.
const Kernels* const offered[] = {
    &kernels_base,
#if defined(COSPEC_HAS_AVX2)
    &kernels_avx2,
#endif
#if defined(COSPEC_HAS_AVX512)
    &kernels_avx512,
#endif
#if defined(COSPEC_HAS_AVX512_BF16)
    &kernels_avx512_bf16,
#endif
};

std::atomic<const Kernels*> chosen{nullptr};

const Kernels* find(const char* name) {
    const Kernels* const most = best();
    for (const Kernels* k : offered) {
        if (!strcmp(k->name, name)) return k;
        if (k == most) break;
    }
    return nullptr;
}

}  // namespace

const Kernels& kernels() {
    const Kernels* k = chosen.load(std::memory_order_relaxed);
    if (!k) chosen.store(k = best());
    return *k;
}

API const char* cospec_isa() { return kernels().name; }

// Whether the processor and this build have an instruction set.
API int cospec_has_isa(const char* name) { return find(name) != nullptr; }

// Use an instruction set below the best one; 0 when the processor or this build does not have it.
API int cospec_set_isa(const char* name) {
    const Kernels* const found = find(name);
    if (found) chosen.store(found);
    return found != nullptr;
}
