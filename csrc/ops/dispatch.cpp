#include "ops/dispatch.h"
#include "ops/ops.h"

#include <string.h>

#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__)
#include <sys/sysctl.h>
#endif

namespace cospec {

namespace {

bool always() { return true; }

#if defined(__x86_64__)
bool has_avx2() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx_vnni() {
    unsigned eax = 0, ebx, ecx, edx;
    return has_avx2() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 4 & 1);
}
bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool has_avx512_bf16() { return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }
// Linux gives a process the memory of tiles when the process asks for them.
bool has_amx_bf16() {
#if defined(__linux__)
    constexpr unsigned TILES = 1u << 24 | 1u << 22;             // AMX-TILE and AMX-BF16
    constexpr long REQUEST_PERMISSION = 0x1023, TILEDATA = 18;  // of arch_prctl
    unsigned eax = 0, ebx, ecx, edx = 0;
    return has_avx512_bf16() && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & TILES) == TILES &&
           !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILEDATA);
#else
    return false;
#endif
}
#elif defined(__aarch64__)
#if defined(__linux__)
bool has_neon_dot() { return getauxval(AT_HWCAP) >> 20 & 1; }
bool has_neon_i8mm() { return has_neon_dot() && (getauxval(AT_HWCAP2) >> 13 & 1); }
#else
bool has_feature(const char* name) {
    int found = 0;
    size_t size = sizeof found;
    return !sysctlbyname(name, &found, &size, nullptr, 0) && found;
}
bool has_neon_dot() { return has_feature("hw.optional.arm.FEAT_DotProd"); }
bool has_neon_i8mm() { return has_neon_dot() && has_feature("hw.optional.arm.FEAT_I8MM"); }
#endif
#endif

struct InstructionSet {
    const Kernels* kernels;
    bool (*here)();     // whether this processor has the set
    bool experimental;  // not measured on a processor that has the set, so used only when asked for
};

// From the lowest to the highest.
const InstructionSet SETS[] = {
    {&kernels_base, always, false},
#if defined(COSPEC_HAS_NEON_DOT)
    {&kernels_neon_dot, has_neon_dot, true},
#endif
#if defined(COSPEC_HAS_NEON_I8MM)
    {&kernels_neon_i8mm, has_neon_i8mm, true},
#endif
#if defined(COSPEC_HAS_AVX2)
    {&kernels_avx2, has_avx2, false},
#endif
#if defined(COSPEC_HAS_AVX_VNNI)
    {&kernels_avx_vnni, has_avx_vnni, false},
#endif
#if defined(COSPEC_HAS_AVX512)
    {&kernels_avx512, has_avx512, false},
#endif
#if defined(COSPEC_HAS_AVX512_VNNI)
    {&kernels_avx512_vnni, has_avx512_vnni, false},
#endif
#if defined(COSPEC_HAS_AVX512_BF16)
    {&kernels_avx512_bf16, has_avx512_bf16, false},
#endif
#if defined(COSPEC_HAS_AMX_BF16)
    {&kernels_amx_bf16, has_amx_bf16, false},
#endif
};

std::atomic<const Kernels*> selected{nullptr};

const Kernels* best() {
    const Kernels* found = &kernels_base;
    for (const InstructionSet& set : SETS)
        if (!set.experimental && set.here()) found = set.kernels;
    return found;
}

const Kernels* find(const char* name) {
    for (const InstructionSet& set : SETS)
        if (!strcmp(set.kernels->name, name) && set.here()) return set.kernels;
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

// Use another instruction set than the best one. Returns 0 when the processor or this build does not have the set.
API int cospec_set_isa(const char* name) {
    const Kernels* const found = find(name);
    if (found) selected.store(found);
    return found != nullptr;
}

}  // namespace cospec
