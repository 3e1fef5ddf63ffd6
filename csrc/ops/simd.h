// Sixteen float32 lanes for every register width.
//
// Every kernel is written once over `V`.
// The order of additions inside a `V` is the same for every instruction set: lane i with i+8, then i+4, i+2, i+1.
// Fused multiply-add is used in the same places, so results agree bit for bit.
// This header is compiled several times with different target flags, so all functions have internal linkage.
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL_FOR(...) _Pragma("GCC unroll 16") for (__VA_ARGS__)

namespace cospec {
namespace {

#if defined(__AVX512F__)

struct V {
    __m512 r;
};
INLINE V zero() { return {_mm512_setzero_ps()}; }
INLINE V splat(float x) { return {_mm512_set1_ps(x)}; }
INLINE V load(const float* p) { return {_mm512_loadu_ps(p)}; }
INLINE V load_low8(const float* p) { return {_mm512_maskz_loadu_ps(0xff, p)}; }
INLINE void store(float* p, V a) { _mm512_storeu_ps(p, a.r); }
INLINE void store_low8(float* p, V a) { _mm512_mask_storeu_ps(p, 0xff, a.r); }
INLINE V operator+(V a, V b) { return {_mm512_add_ps(a.r, b.r)}; }
INLINE V operator-(V a, V b) { return {_mm512_sub_ps(a.r, b.r)}; }
INLINE V operator*(V a, V b) { return {_mm512_mul_ps(a.r, b.r)}; }
INLINE V operator/(V a, V b) { return {_mm512_div_ps(a.r, b.r)}; }
INLINE V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.r, b.r, c.r)}; }
INLINE V smaller(V a, V b) { return {_mm512_min_ps(a.r, b.r)}; }
INLINE V larger(V a, V b) { return {_mm512_max_ps(a.r, b.r)}; }
INLINE V select(uint32_t bits, V yes, V no) { return {_mm512_mask_mov_ps(no.r, (__mmask16)bits, yes.r)}; }
INLINE V bf16_low(const uint32_t* p) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))}; }
INLINE V bf16_high(const uint32_t* p) {
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32((int)0xffff0000)))};
}
INLINE V from_int8(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
INLINE V from_bf16(const uint16_t* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
// 2^n for whole n in [-126, 127]
INLINE V power_of_two(V n) {
    __m512i i = _mm512_add_epi32(_mm512_cvtps_epi32(n.r), _mm512_set1_epi32(127));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(i, 23))};
}

#elif defined(__AVX2__)

struct V {
    __m256 a, b;
};
INLINE V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE V splat(float x) {
    __m256 r = _mm256_set1_ps(x);
    return {r, r};
}
INLINE V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE V load_low8(const float* p) { return {_mm256_loadu_ps(p), _mm256_setzero_ps()}; }
INLINE void store(float* p, V v) {
    _mm256_storeu_ps(p, v.a);
    _mm256_storeu_ps(p + 8, v.b);
}
INLINE void store_low8(float* p, V v) { _mm256_storeu_ps(p, v.a); }
INLINE V operator+(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE V operator-(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INLINE V operator*(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE V operator/(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
INLINE V fma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
INLINE V smaller(V x, V y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
INLINE V larger(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
INLINE __m256 lanes_of(uint32_t bits) {
    const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)bits), each), each));
}
INLINE V select(uint32_t bits, V yes, V no) {
    return {_mm256_blendv_ps(no.a, yes.a, lanes_of(bits)), _mm256_blendv_ps(no.b, yes.b, lanes_of(bits >> 8))};
}
INLINE __m256 high_half(const uint32_t* p) {
    __m256i words = _mm256_loadu_si256((const __m256i*)p);
    return _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32((int)0xffff0000)));
}
INLINE __m256 low_half(const uint32_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i*)p), 16));
}
INLINE V bf16_low(const uint32_t* p) { return {low_half(p), low_half(p + 8)}; }
INLINE V bf16_high(const uint32_t* p) { return {high_half(p), high_half(p + 8)}; }
INLINE __m256 widen_int8(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
INLINE V from_int8(const int8_t* p) { return {widen_int8(p), widen_int8(p + 8)}; }
INLINE __m256 widen_bf16(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
INLINE V from_bf16(const uint16_t* p) { return {widen_bf16(p), widen_bf16(p + 8)}; }
INLINE __m256 shift_exponent(__m256 n) {
    __m256i i = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(i, 23));
}
INLINE V power_of_two(V n) { return {shift_exponent(n.a), shift_exponent(n.b)}; }

#else  // GCC and clang vectors of four; NEON where present, SSE2 or plain code elsewhere

typedef float Quad __attribute__((vector_size(16)));
typedef int32_t IntQuad __attribute__((vector_size(16)));
typedef uint32_t WordQuad __attribute__((vector_size(16)));
struct V {
    Quad q[4];
};
#define QUADS(expression)                                     \
    V r;                                                      \
    UNROLL_FOR (int i = 0; i < 4; i++) r.q[i] = (expression); \
    return r
INLINE Quad load4(const void* p) {
    Quad r;
    memcpy(&r, p, 16);
    return r;
}
INLINE V zero() { QUADS((Quad){}); }
INLINE V splat(float x) { QUADS(((Quad){x, x, x, x})); }
INLINE V load(const float* p) { QUADS(load4(p + 4 * i)); }
INLINE V load_low8(const float* p) { QUADS(i < 2 ? load4(p + 4 * i) : (Quad){}); }
INLINE void store(float* p, V v) { memcpy(p, &v, 64); }
INLINE void store_low8(float* p, V v) { memcpy(p, &v, 32); }
INLINE V operator+(V x, V y) { QUADS(x.q[i] + y.q[i]); }
INLINE V operator-(V x, V y) { QUADS(x.q[i] - y.q[i]); }
INLINE V operator*(V x, V y) { QUADS(x.q[i] * y.q[i]); }
INLINE V operator/(V x, V y) { QUADS(x.q[i] / y.q[i]); }
INLINE Quad fma4(Quad a, Quad b, Quad c) {
#if defined(__aarch64__)
    return (Quad)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    Quad r;
    for (int i = 0; i < 4; i++) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return r;
#endif
}
INLINE V fma(V x, V y, V z) { QUADS(fma4(x.q[i], y.q[i], z.q[i])); }
INLINE Quad pick4(IntQuad which, Quad yes, Quad no) { return (Quad)(((IntQuad)yes & which) | ((IntQuad)no & ~which)); }
INLINE V smaller(V x, V y) { QUADS(pick4(x.q[i] < y.q[i], x.q[i], y.q[i])); }
INLINE V larger(V x, V y) { QUADS(pick4(x.q[i] > y.q[i], x.q[i], y.q[i])); }
INLINE IntQuad lanes_of(uint32_t bits) {
    const WordQuad each = {1, 2, 4, 8};
    return ((WordQuad){bits, bits, bits, bits} & each) != 0;
}
INLINE V select(uint32_t bits, V yes, V no) { QUADS(pick4(lanes_of(bits >> (4 * i)), yes.q[i], no.q[i])); }
INLINE V bf16_low(const uint32_t* p) { QUADS((Quad)((WordQuad)load4(p + 4 * i) << 16)); }
INLINE V bf16_high(const uint32_t* p) { QUADS((Quad)((WordQuad)load4(p + 4 * i) & 0xffff0000u)); }
INLINE V from_int8(const int8_t* p) {
#if defined(__aarch64__)
    const int8x16_t bytes = vld1q_s8(p);
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
    const int32x4_t words[4] = {
        vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)};
    QUADS((Quad)vcvtq_f32_s32(words[i]));
#else
    QUADS(((Quad){(float)p[4 * i], (float)p[4 * i + 1], (float)p[4 * i + 2], (float)p[4 * i + 3]}));
#endif
}
INLINE V from_bf16(const uint16_t* p) {
    QUADS((Quad)((WordQuad){p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]} << 16));
}
INLINE V power_of_two(V n) { QUADS((Quad)((__builtin_convertvector(n.q[i], IntQuad) + 127) << 23)); }

#endif

INLINE float sum(V v) {
    float x[16];
    store(x, v);
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; i++) x[i] += x[i + step];
    return x[0];
}

#if defined(__AVX512F__)
INLINE float largest(V v) {
    const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(v.r), _mm512_extractf32x8_ps(v.r, 1));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
#else
INLINE float largest(V v) {
    float x[16];
    store(x, v);
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; i++) x[i] = x[i] > x[i + step] ? x[i] : x[i + step];
    return x[0];
}
#endif

#if defined(__AVX512F__)
// r[j] = sum(v[j]) for 16 vectors at once, in the order of `sum`
INLINE V sums16(const V* v) {
    __m512 half[8], quarter[4];
    UNROLL_FOR (int i = 0; i < 8; i++) {  // half[i]: vectors i and i + 8
        __m512 a = v[i].r, b = v[i + 8].r;
        half[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
    UNROLL_FOR (int i = 0; i < 4; i++) {  // blocks of quarter[i]: vectors i, i + 8, i + 4, i + 12
        __m512 a = half[i], b = half[i + 4];
        quarter[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
    __m512 a = _mm512_unpacklo_ps(quarter[0], quarter[1]), b = _mm512_unpacklo_ps(quarter[2], quarter[3]);
    __m512 c = _mm512_unpackhi_ps(quarter[0], quarter[1]), d = _mm512_unpackhi_ps(quarter[2], quarter[3]);
    __m512 l0 = _mm512_shuffle_ps(a, b, 0x44), l1 = _mm512_shuffle_ps(a, b, 0xee);
    __m512 l2 = _mm512_shuffle_ps(c, d, 0x44), l3 = _mm512_shuffle_ps(c, d, 0xee);
    __m512 r = _mm512_add_ps(_mm512_add_ps(l0, l2), _mm512_add_ps(l1, l3));
    return {_mm512_shuffle_f32x4(r, r, 0xd8)};
}
#elif defined(__AVX2__)
// r[j] = sum(v[j]) for 4 vectors at once, in the order of `sum`
INLINE void sums4(const V* v, float* r) {
    __m128 q[4];
    UNROLL_FOR (int i = 0; i < 4; i++) {
        __m256 h = _mm256_add_ps(v[i].a, v[i].b);
        q[i] = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    }
    _MM_TRANSPOSE4_PS(q[0], q[1], q[2], q[3]);
    _mm_storeu_ps(r, _mm_add_ps(_mm_add_ps(q[0], q[2]), _mm_add_ps(q[1], q[3])));
}
#else
INLINE void sums4(const V* v, float* r) {
    for (int i = 0; i < 4; i++) r[i] = sum(v[i]);
}
#endif

// exp(x) to about 1e-7 relative; x is clamped to [-87.3, 88], so that the result is a normal number
INLINE V exponential(V x) {
    x = larger(smaller(x, splat(88.0f)), splat(-87.3f));
    const V magic = splat(12582912.0f);  // adding it rounds to the nearest whole number
    V n = fma(x, splat(1.44269504f), magic) - magic;
    x = fma(n, splat(-0.693359375f), x);
    x = fma(n, splat(2.12194440e-4f), x);
    V y = splat(1.9875691500e-4f);
    y = fma(y, x, splat(1.3981999507e-3f));
    y = fma(y, x, splat(8.3334519073e-3f));
    y = fma(y, x, splat(4.1665795894e-2f));
    y = fma(y, x, splat(1.6666665459e-1f));
    y = fma(y, x, splat(5.0000001201e-1f));
    y = fma(y, x * x, x + splat(1.0f));
    return y * power_of_two(n);
}

INLINE V silu(V x) { return x / (splat(1.0f) + exponential(zero() - x)); }

INLINE V hyperbolic_tangent(V x) {  // tanh
    return splat(1.0f) - splat(2.0f) / (exponential(x + x) + splat(1.0f));
}

}  // namespace

}  // namespace cospec
