// Products of bytes and sums of 32-bit integers for every register width.
//
// Sixteen sums, each of four products: unsigned bytes of a weight times signed bytes of an input. All products and sums
// are exact, so every instruction set gives the same integers.
#pragma once
#include "ops/block_formats.h"
#include "ops/simd.h"

namespace cospec {
namespace {

// The four input bytes that all outputs multiply.
INLINE uint32_t quad_at(const int8_t* p) {
    uint32_t r;
    memcpy(&r, p, 4);
    return r;
}

// Largest integers whose four products fit twice into 16 bits: 2 * 2 * 63 * 128 < 2^15.
constexpr bool fits_16_bits(int largest) { return largest <= 63; }

// Larger integers, all with the offset 128, would saturate 16 bits. Without a dot product instruction they lose their
// offset, and the sign goes to the input: |weight| * (input with the weight's sign), 2 * 128 * 127 < 2^15.
// An input is never -128. Then `dot` takes the offset off, and sums start at 0. So it does where the instruction takes
// signed weights only.
#if (defined(__AVX512F__) && !defined(__AVX512VNNI__)) || \
    (defined(__ARM_FEATURE_DOTPROD) && !defined(__ARM_FEATURE_MATMUL_INT8))
constexpr bool dot_takes_offset(int largest) { return !fits_16_bits(largest); }
#else
constexpr bool dot_takes_offset(int) { return false; }
#endif

#if defined(__AVX512F__)

struct Bytes {
    __m512i r;
};
struct Ints {
    __m512i r;
};
INLINE Bytes load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
INLINE Bytes operator|(Bytes a, Bytes b) { return {_mm512_or_si512(a.r, b.r)}; }
// Shift to the right, or left by a negative number, and keep the bits of `mask` in each byte.
template <int SHIFT> INLINE Bytes shifted(Bytes b, int mask) {
    __m512i r = b.r;
    if constexpr (SHIFT > 0) r = _mm512_srli_epi16(r, SHIFT);
    if constexpr (SHIFT < 0) r = _mm512_slli_epi16(r, -SHIFT);
    return {_mm512_and_si512(r, _mm512_set1_epi8((char)mask))};
}
INLINE Bytes lookup(const uint8_t* table, Bytes index) {
    return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), index.r)};
}
INLINE Ints splat_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
INLINE Ints load_ints(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
INLINE Ints operator+(Ints x, Ints y) { return {_mm512_add_epi32(x.r, y.r)}; }
INLINE V to_float(Ints x) { return {_mm512_cvtepi32_ps(x.r)}; }
INLINE V widen_uint8(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
INLINE V from_half(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }

// total + products of two words of weights with eight inputs
template <int LARGEST> INLINE Ints dot(Bytes first, Bytes second, const int8_t* x, Ints total) {
    const __m512i x0 = _mm512_set1_epi32((int)quad_at(x)), x1 = _mm512_set1_epi32((int)quad_at(x + 4));
#if defined(__AVX512VNNI__)
    return {_mm512_dpbusd_epi32(_mm512_dpbusd_epi32(total.r, first.r, x0), second.r, x1)};
#else
    const __m512i ones = _mm512_set1_epi16(1);
    if constexpr (fits_16_bits(LARGEST)) {
        const __m512i pairs = _mm512_add_epi16(_mm512_maddubs_epi16(first.r, x0), _mm512_maddubs_epi16(second.r, x1));
        return {_mm512_add_epi32(total.r, _mm512_madd_epi16(pairs, ones))};
    } else {
        const auto word = [&](__m512i w, __m512i x) {
            const __m512i number = _mm512_xor_si512(w, _mm512_set1_epi8((char)128));
            const __m512i turned = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(number), _mm512_setzero_si512(), x);
            return _mm512_madd_epi16(_mm512_maddubs_epi16(_mm512_abs_epi8(number), turned), ones);
        };
        return {_mm512_add_epi32(total.r, _mm512_add_epi32(word(first.r, x0), word(second.r, x1)))};
    }
#endif
}

#elif defined(__AVX2__)

struct Bytes {
    __m256i a, b;
};
struct Ints {
    __m256i a, b;
};
INLINE Bytes load_bytes(const uint8_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
INLINE Bytes operator|(Bytes x, Bytes y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
template <int SHIFT> INLINE __m256i shift_bytes(__m256i r, int mask) {
    if constexpr (SHIFT > 0) r = _mm256_srli_epi16(r, SHIFT);
    if constexpr (SHIFT < 0) r = _mm256_slli_epi16(r, -SHIFT);
    return _mm256_and_si256(r, _mm256_set1_epi8((char)mask));
}
template <int SHIFT> INLINE Bytes shifted(Bytes x, int mask) {
    return {shift_bytes<SHIFT>(x.a, mask), shift_bytes<SHIFT>(x.b, mask)};
}
INLINE Bytes lookup(const uint8_t* table, Bytes index) {
    const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
    return {_mm256_shuffle_epi8(both, index.a), _mm256_shuffle_epi8(both, index.b)};
}
INLINE Ints splat_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE Ints load_ints(const int32_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
}
INLINE Ints operator+(Ints x, Ints y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
INLINE V to_float(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
INLINE __m256 widen_uint8x8(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
INLINE V widen_uint8(const uint8_t* p) { return {widen_uint8x8(p), widen_uint8x8(p + 8)}; }
INLINE __m256 from_half8(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
INLINE V from_half(const uint16_t* p) { return {from_half8(p), from_half8(p + 8)}; }

#if defined(__AVXVNNI__)
INLINE __m256i dot8(__m256i total, __m256i first, __m256i second, __m256i x0, __m256i x1) {
    return _mm256_dpbusd_avx_epi32(_mm256_dpbusd_avx_epi32(total, first, x0), second, x1);
}
template <int LARGEST> INLINE Ints dot(Bytes first, Bytes second, const int8_t* x, Ints total) {
    const __m256i x0 = _mm256_set1_epi32((int)quad_at(x)), x1 = _mm256_set1_epi32((int)quad_at(x + 4));
    return {dot8(total.a, first.a, second.a, x0, x1), dot8(total.b, first.b, second.b, x0, x1)};
}
#endif

#else

struct Bytes {
    uint8_t b[64];
};
struct Ints {
    int32_t i[16];
};
INLINE Bytes load_bytes(const uint8_t* p) {
    Bytes r;
    memcpy(r.b, p, 64);
    return r;
}
INLINE Bytes operator|(Bytes x, Bytes y) {
    for (int i = 0; i < 64; i++) x.b[i] |= y.b[i];
    return x;
}
template <int SHIFT> INLINE Bytes shifted(Bytes x, int mask) {
    for (int i = 0; i < 64; i++) x.b[i] = (uint8_t)((SHIFT < 0 ? x.b[i] << -SHIFT : x.b[i] >> SHIFT) & mask);
    return x;
}
INLINE Bytes lookup(const uint8_t* table, Bytes index) {
    for (int i = 0; i < 64; i++) index.b[i] = table[index.b[i]];
    return index;
}
INLINE Ints splat_int(int32_t x) {
    Ints r;
    for (int i = 0; i < 16; i++) r.i[i] = x;
    return r;
}
INLINE V to_float(Ints x) {
    float t[16];
    for (int i = 0; i < 16; i++) t[i] = (float)x.i[i];
    return load(t);
}
INLINE V widen_uint8(const uint8_t* p) {
    float t[16];
    for (int i = 0; i < 16; i++) t[i] = (float)p[i];
    return load(t);
}
INLINE float half_to_float(uint16_t half) {
    const uint32_t exponent = half >> 10 & 31, bits = (uint32_t)(half & 0x7fff) << 13;
    const uint32_t word = bits + (exponent == 31 ? 224u << 23 : 112u << 23);
    float x;
    memcpy(&x, &word, 4);
    if (exponent == 0) x = (float)(half & 0x3ff) * 0x1p-24f;
    return half & 0x8000 ? -x : x;
}
INLINE V from_half(const uint16_t* p) {
    float t[16];
    for (int i = 0; i < 16; i++) t[i] = half_to_float(p[i]);
    return load(t);
}
#if defined(__ARM_FEATURE_DOTPROD)
// total + four sums of four products
template <int LARGEST> INLINE int32x4_t dot4(int32x4_t total, uint8x16_t weights, uint32_t x) {
    const int8x16_t inputs = vreinterpretq_s8_u32(vdupq_n_u32(x));
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return vusdotq_s32(total, weights, inputs);
#else
    if constexpr (dot_takes_offset(LARGEST)) weights = veorq_u8(weights, vdupq_n_u8(128));
    return vdotq_s32(total, vreinterpretq_s8_u8(weights), inputs);
#endif
}
template <int LARGEST> INLINE Ints dot(Bytes first, Bytes second, const int8_t* x, Ints total) {
    for (int i = 0; i < 4; i++) {
        int32x4_t sum = vld1q_s32(total.i + 4 * i);
        sum = dot4<LARGEST>(sum, vld1q_u8(first.b + 16 * i), quad_at(x));
        sum = dot4<LARGEST>(sum, vld1q_u8(second.b + 16 * i), quad_at(x + 4));
        vst1q_s32(total.i + 4 * i, sum);
    }
    return total;
}
#else
template <int LARGEST> INLINE Ints dot(Bytes first, Bytes second, const int8_t* x, Ints total) {
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < 4; k++) total.i[i] += first.b[4 * i + k] * x[k] + second.b[4 * i + k] * x[4 + k];
    return total;
}
#endif

#endif

}  // namespace

}  // namespace cospec
