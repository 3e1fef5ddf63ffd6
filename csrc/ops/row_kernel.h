// Small operations on single rows.
#pragma once
#include "ops/integer_simd.h"
#include "ops/kernels.h"
#include "ops/simd.h"

namespace cospec {

namespace {

static void rms_norm(const float* x, const float* weight, float eps, long n, float* y) {
    V part[4] = {zero(), zero(), zero(), zero()};
    long i = 0;
    for (; i + 16 <= n; i += 16) {
        V value = load(x + i);
        V* total = &part[i / 16 % 4];
        *total = fma(value, value, *total);
    }
    float squares = sum((part[0] + part[1]) + (part[2] + part[3]));
    for (long j = i; j < n; j++) squares = __builtin_fmaf(x[j], x[j], squares);
    const float factor = 1.0f / __builtin_sqrtf(squares / (float)n + eps);
    for (long j = 0; j < n; j++) y[j] = weight[j] * (x[j] * factor);
}

// Rotary embedding of one head in place; cos and sin hold dim / 2 values.
static void apply_rotary(float* x, const float* cos, const float* sin, long dim) {
    const long half = dim / 2;
    for (long i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i] + a * sin[i];
    }
}

static void bf16_to_float(const uint16_t* bf16, long n, float* y) {
    long i = 0;
    for (; i + 16 <= n; i += 16) store(y + i, from_bf16(bf16 + i));
    for (; i < n; i++) {
        const uint32_t word = (uint32_t)bf16[i] << 16;
        memcpy(y + i, &word, 4);
    }
}

static void fp16_to_float(const uint16_t* fp16, long n, float* y) {
    long i = 0;
    for (; i + 16 <= n; i += 16) store(y + i, from_half(fp16 + i));
    uint16_t rest[16] = {};
    float floats[16];
    memcpy(rest, fp16 + i, sizeof(uint16_t) * (n - i));
    store(floats, from_half(rest));
    memcpy(y + i, floats, sizeof(float) * (n - i));
}

// The first index of the largest value. -1 when the largest value is infinite, or any value is NaN.
static long argmax(const float* x, long n) {
    constexpr long STEP = 64;
    V lane_max[4], nonfinite[4];
    for (int j = 0; j < 4; j++) lane_max[j] = splat(x[0]), nonfinite[j] = zero();
    long i = 0;
    for (; i + STEP <= n; i += STEP)
        UNROLL_FOR (int j = 0; j < 4; j++) {
            const V value = load(x + i + 16 * j);
            lane_max[j] = larger(value, lane_max[j]);
            nonfinite[j] = nonfinite[j] + value * zero();  // stays 0 while all are finite
        }
    float maximum = largest(larger(larger(lane_max[0], lane_max[1]), larger(lane_max[2], lane_max[3])));
    bool finite = sum((nonfinite[0] + nonfinite[1]) + (nonfinite[2] + nonfinite[3])) == 0.0f;
    for (; i < n; i++) {
        if (x[i] > maximum) maximum = x[i];
        finite &= x[i] * 0.0f == 0.0f;
    }
    for (long j = 0; !finite && j < n; j++)
        if (x[j] != x[j]) return -1;
    if (__builtin_isinf(maximum)) return -1;
    for (i = 0; i + STEP <= n; i += STEP) {  // skip steps that hold only smaller values
        UNROLL_FOR (int j = 0; j < 4; j++) lane_max[j] = load(x + i + 16 * j);
        if (largest(larger(larger(lane_max[0], lane_max[1]), larger(lane_max[2], lane_max[3]))) == maximum) break;
    }
    for (; i < n; i++)
        if (x[i] == maximum) return i;
    return -1;
}

}  // namespace

}  // namespace cospec
