// Small operations on single rows.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace {

static void rms_norm(const float* x, const float* weight, float eps, long n, float* y) {
    V part[4] = {zero(), zero(), zero(), zero()};
    long i = 0;
    for (; i + 16 <= n; i += 16) {
        V value = load(x + i);
        V* to = &part[i / 16 % 4];
        *to = fma(value, value, *to);
    }
    float squares = sum((part[0] + part[1]) + (part[2] + part[3]));
    for (long j = i; j < n; j++) squares = __builtin_fmaf(x[j], x[j], squares);
    const float factor = 1.0f / __builtin_sqrtf(squares / (float)n + eps);
    for (long j = 0; j < n; j++) y[j] = weight[j] * (x[j] * factor);
}

// Rotary embedding of one head in place; cos and sin hold dim / 2 values.
static void rotate(float* x, const float* cos, const float* sin, long dim) {
    const long half = dim / 2;
    for (long i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i] + a * sin[i];
    }
}

static void widen(const uint16_t* bf16, long n, float* y) {
    long i = 0;
    for (; i + 16 <= n; i += 16) store(y + i, from_bf16(bf16 + i));
    for (; i < n; i++) {
        const uint32_t word = (uint32_t)bf16[i] << 16;
        memcpy(y + i, &word, 4);
    }
}

// The first of the largest; -1 when that is infinite, or something is not a number.
static long argmax(const float* x, long n) {
    constexpr long STEP = 64;
    V top[4], odd[4];
    for (int j = 0; j < 4; j++) top[j] = splat(x[0]), odd[j] = zero();
    long i = 0;
    for (; i + STEP <= n; i += STEP)
        UNROLL for (int j = 0; j < 4; j++) {
            const V value = load(x + i + 16 * j);
            top[j] = larger(value, top[j]);
            odd[j] = odd[j] + value * zero();  // stays 0 while all are finite
        }
    float most = largest(larger(larger(top[0], top[1]), larger(top[2], top[3])));
    bool finite = sum((odd[0] + odd[1]) + (odd[2] + odd[3])) == 0.0f;
    for (; i < n; i++) {
        if (x[i] > most) most = x[i];
        finite &= x[i] * 0.0f == 0.0f;
    }
    for (long j = 0; !finite && j < n; j++)
        if (x[j] != x[j]) return -1;
    if (__builtin_isinf(most)) return -1;
    for (i = 0; i + STEP <= n; i += STEP) {  // skip what holds smaller ones only
        UNROLL for (int j = 0; j < 4; j++) top[j] = load(x + i + 16 * j);
        if (largest(larger(larger(top[0], top[1]), larger(top[2], top[3]))) == most) break;
    }
    for (; i < n; i++)
        if (x[i] == most) return i;
    return -1;
}

}  // namespace
