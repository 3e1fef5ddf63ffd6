#include "ops/dispatch.h"
#include "ops/ops.h"

#include <string.h>

#include <atomic>

namespace cospec {

namespace {

const Kernels* best() {
#if defined(__x86_64__)
    __builtin_cpu_init();
#if defined(COSPEC_HAS_AVX512)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
#if defined(COSPEC_HAS_AVX512_VNNI)
        const bool vnni = __builtin_cpu_supports("avx512vnni");
#if defined(COSPEC_HAS_AVX512_BF16)
        if (vnni && __builtin_cpu_supports("avx512bf16")) return &kernels_avx512_bf16;
#endif
        if (vnni) return &kernels_avx512_vnni;
#endif
        return &kernels_avx512;
    }
#endif
#if defined(COSPEC_HAS_AVX2)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        return &kernels_avx2;
#endif
#endif
    return &kernels_base;
}

// From the lowest to the highest.
const Kernels* const supported[] = {
    &kernels_base,
#if defined(COSPEC_HAS_AVX2)
    &kernels_avx2,
#endif
#if defined(COSPEC_HAS_AVX512)
    &kernels_avx512,
#endif
#if defined(COSPEC_HAS_AVX512_VNNI)
    &kernels_avx512_vnni,
#endif
#if defined(COSPEC_HAS_AVX512_BF16)
    &kernels_avx512_bf16,
#endif
};

std::atomic<const Kernels*> selected{nullptr};

const Kernels* find(const char* name) {
    const Kernels* const highest = best();
    for (const Kernels* k : supported) {
        if (!strcmp(k->name, name)) return k;
        if (k == highest) break;
    }
    return nullptr;
}

}  // namespace

const Kernels& kernels() {
    const Kernels* k = selected.load(std::memory_order_relaxed);
    if (!k) selected.store(k = best());
    return *k;
}

API const char* cospec_isa() { return kernels().name; }

// Whether this processor and this build have an instruction set.
API int cospec_has_isa(const char* name) { return find(name) != nullptr; }

// Use an instruction set below the best one. Returns 0 when the processor or this build does not have the set.
API int cospec_set_isa(const char* name) {
    const Kernels* const found = find(name);
    if (found) selected.store(found);
    return found != nullptr;
}

}  // namespace cospec
