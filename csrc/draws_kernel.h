// Drawing tokens: softmax in double precision, exponential races with a counter-based generator, and what drafts leave of
// a law.
//
// The generator is Philox-4x64 with ten rounds (Salmon et al. 2011), counted as numpy counts it, so that the same key
// gives the same words here and there. Sums go to eight lanes whatever the width of the registers, and contraction is
// off, so every instruction set gives the same bits.
#pragma once
#include <math.h>

#include "kernels.h"
#include "simd.h"

namespace {

#if defined(__AVX512F__)
constexpr int WIDE = 8;
#elif defined(__AVX2__)
constexpr int WIDE = 4;
#else
constexpr int WIDE = 2;
#endif
constexpr int LANES = 8, REGISTERS = LANES / WIDE;
constexpr int STEP = WIDE == 8 ? 32 : 16;  // numbers at once: as many as the registers hold
constexpr long CHUNK = 64;  // tokens of a race between two looks at whether any of them can still win
constexpr double TO_UNIT = 0x1p-52, HALF_STEP = 0x1p-53;

typedef double D __attribute__((vector_size(8 * WIDE)));
typedef int64_t I __attribute__((vector_size(8 * WIDE)));
typedef uint64_t U __attribute__((vector_size(8 * WIDE)));
typedef float Narrow __attribute__((vector_size(4 * WIDE)));

template <class T> INLINE T read(const void* p) { T x; memcpy(&x, p, sizeof x); return x; }
template <class T> INLINE void write(void* p, const T& x) { memcpy(p, &x, sizeof x); }
INLINE D pick(I which, D yes, D no) { return (D)(((I)yes & which) | ((I)no & ~which)); }
INLINE D more(D x, D y) { return pick((I)(x > y), x, y); }
INLINE D whole(U n) { return (D)(n | 0x4330000000000000u) - 0x1p52; }  // n < 2^52 as a number

static double largest(const double* x, long n) {
    D top[REGISTERS] = {};
    long i = 0;
    for (; i + LANES <= n; i += LANES)
        UNROLL for (int j = 0; j < REGISTERS; j++) top[j] = more(read<D>(x + i + j * WIDE), top[j]);
    double lane[LANES], most = 0.0;
    write(lane, top);
    for (double value : lane) most = value > most ? value : most;
    for (; i < n; i++) most = x[i] > most ? x[i] : most;
    return most;
}

INLINE double total(const D* part) {
    double lane[LANES];
    memcpy(lane, part, sizeof lane);
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

// Chains of dependent steps are taken for several registers by turns, so that none waits for another.
#define EACH UNROLL for (int j = 0; j < COUNT; j++)

template <int COUNT> INLINE void power(D* x) {  // e^x in place, for x <= 0
    I tiny[COUNT];
    D shifted[COUNT], r[COUNT], y[COUNT];
    EACH tiny[j] = (I)(x[j] < -708.0);
    EACH x[j] = pick(tiny[j], D{} - 708.0, x[j]);
    EACH shifted[j] = x[j] * 0x1.71547652b82fep+0 + 0x1.8p52;
    EACH r[j] = x[j] - (shifted[j] - 0x1.8p52) * 0x1.62e42feep-1;
    EACH r[j] = r[j] - (shifted[j] - 0x1.8p52) * 0x1.a39ef35793c76p-33;
    constexpr double terms[] = {1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0,
                                1.0 / 362880.0,     1.0 / 40320.0,     1.0 / 5040.0,     1.0 / 720.0,
                                1.0 / 120.0,        1.0 / 24.0,        1.0 / 6.0,        0.5, 1.0, 1.0};
    EACH y[j] = D{} + terms[0];
    UNROLL for (int i = 1; i < 14; i++) EACH y[j] = y[j] * r[j] + terms[i];
    EACH x[j] = pick(tiny[j], D{}, y[j] * (D)(((I)shifted[j] + 1023) << 52));
}

// e^((x - most) / temperature) of some logits, added to the lanes of `part`.
INLINE D widened(const float* x) { return __builtin_convertvector(read<Narrow>(x), D); }
INLINE D widened(const double* x) { return read<D>(x); }
template <int COUNT, class T> INLINE void powers(const T* x, double most, double temperature, D* part, double* out) {
    D y[COUNT];
    EACH y[j] = (widened(x + j * WIDE) - most) / temperature;
    power<COUNT>(y);
    EACH write(out + j * WIDE, y[j]);
    EACH part[j % REGISTERS] += y[j];
}

static double most_of(const float* x, long n) {
    V top = splat(x[0]);
    long i = 0;
    for (; i + 16 <= n; i += 16) top = larger(load(x + i), top);
    float most = largest(top);
    for (; i < n; i++) most = x[i] > most ? x[i] : most;
    return most;
}
static double most_of(const double* x, long n) {
    double most = x[0];
    for (long i = 1; i < n; i++) most = x[i] > most ? x[i] : most;
    return most;
}

template <class T> static double softmax(const T* logits, long vocab, double temperature, double* out) {
    const double most = most_of(logits, vocab);
    long i = 0;
    D part[REGISTERS] = {};
    for (i = 0; i + STEP <= vocab; i += STEP) powers<STEP / WIDE>(logits + i, most, temperature, part, out + i);
    if (i < vocab) {
        T rest[STEP];
        double last[STEP];
        for (int j = 0; j < STEP; j++) rest[j] = i + j < vocab ? logits[i + j] : -INFINITY;
        powers<STEP / WIDE>(rest, most, temperature, part, last);
        memcpy(out + i, last, sizeof(double) * (vocab - i));
    }
    const double factor = 1.0 / total(part);
    for (long k = 0; k < vocab; k++) out[k] *= factor;
    return factor;
}

// Words of the generator's blocks from `block` on, four of each.
#if defined(__AVX512F__)
constexpr int BLOCKS = 16;
INLINE void multiply(__m512i x, uint64_t by, __m512i* high, __m512i* low) {
    const __m512i mask = _mm512_set1_epi64(0xffffffff), x1 = _mm512_srli_epi64(x, 32);
    const __m512i y0 = _mm512_set1_epi64(by & 0xffffffff), y1 = _mm512_set1_epi64(by >> 32);
    const __m512i corner = _mm512_mul_epu32(x, y0);
    const __m512i middle = _mm512_add_epi64(_mm512_mul_epu32(x, y1), _mm512_srli_epi64(corner, 32));
    const __m512i upper = _mm512_add_epi64(_mm512_mul_epu32(x1, y0), _mm512_and_si512(middle, mask));
    *high = _mm512_add_epi64(_mm512_mul_epu32(x1, y1), _mm512_srli_epi64(middle, 32));
    *high = _mm512_add_epi64(*high, _mm512_srli_epi64(upper, 32));
    *low = _mm512_mask_mov_epi32(_mm512_slli_epi64(upper, 32), 0x5555, corner);
}
static void philox(const Stream& stream, uint64_t block, uint64_t* words) {
    constexpr int COUNT = BLOCKS / 8;
    const __m512i start = _mm512_set1_epi64(stream.counter[0]), one = _mm512_set1_epi64(1);
    __m512i c[COUNT][4], h0[COUNT], l0[COUNT], h1[COUNT], l1[COUNT];
    EACH {
        const __m512i count = _mm512_add_epi64(_mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7), _mm512_set1_epi64(block + 8 * j));
        c[j][0] = _mm512_add_epi64(start, count);
        for (int i = 1; i < 4; i++) c[j][i] = _mm512_set1_epi64(stream.counter[i]);
        c[j][1] = _mm512_mask_add_epi64(c[j][1], _mm512_cmplt_epu64_mask(c[j][0], start), c[j][1], one);
    }
    uint64_t k0 = stream.key[0], k1 = stream.key[1];
    UNROLL for (int round = 0; round < 10; round++) {
        const __m512i key0 = _mm512_set1_epi64(k0), key1 = _mm512_set1_epi64(k1);
        EACH multiply(c[j][0], 0xD2E7470EE14C6C93u, &h0[j], &l0[j]);
        EACH multiply(c[j][2], 0xCA5A826395121157u, &h1[j], &l1[j]);
        EACH {
            c[j][0] = _mm512_ternarylogic_epi64(h1[j], c[j][1], key0, 0x96);  // exclusive or of three
            c[j][1] = l1[j];
            c[j][2] = _mm512_ternarylogic_epi64(h0[j], c[j][3], key1, 0x96);
            c[j][3] = l0[j];
        }
        k0 += 0x9E3779B97F4A7C15u;
        k1 += 0xBB67AE8584CAA73Bu;
    }
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    EACH {  // a register holds one word of eight blocks; a block's four go side by side
        const __m512i even01 = _mm512_unpacklo_epi64(c[j][0], c[j][1]), odd01 = _mm512_unpackhi_epi64(c[j][0], c[j][1]);
        const __m512i even23 = _mm512_unpacklo_epi64(c[j][2], c[j][3]), odd23 = _mm512_unpackhi_epi64(c[j][2], c[j][3]);
        for (int half = 0; half < 2; half++) {
            const __m512i even = _mm512_permutex2var_epi64(even01, half ? second : first, even23);
            const __m512i odd = _mm512_permutex2var_epi64(odd01, half ? second : first, odd23);
            _mm512_storeu_si512(words + 32 * j + 16 * half, _mm512_shuffle_i64x2(even, odd, 0x44));
            _mm512_storeu_si512(words + 32 * j + 16 * half + 8, _mm512_shuffle_i64x2(even, odd, 0xee));
        }
    }
}
#else
constexpr int BLOCKS = 2;
static void philox(const Stream& stream, uint64_t block, uint64_t* words) {
    constexpr int COUNT = BLOCKS;
    uint64_t c[COUNT][4], k0 = stream.key[0], k1 = stream.key[1];
    EACH {
        memcpy(c[j], stream.counter, sizeof c[j]);
        c[j][0] += block + j;
        c[j][1] += c[j][0] < stream.counter[0];
    }
    for (int round = 0; round < 10; round++) {
        EACH {
            const auto first = (unsigned __int128)0xD2E7470EE14C6C93u * c[j][0];
            const auto second = (unsigned __int128)0xCA5A826395121157u * c[j][2];
            c[j][0] = (uint64_t)(second >> 64) ^ c[j][1] ^ k0;
            c[j][1] = (uint64_t)second;
            c[j][2] = (uint64_t)(first >> 64) ^ c[j][3] ^ k1;
            c[j][3] = (uint64_t)first;
        }
        k0 += 0x9E3779B97F4A7C15u;
        k1 += 0xBB67AE8584CAA73Bu;
    }
    memcpy(words, c, sizeof c);
}
#endif

// Odd multiples of 2^-53, so that none is rounded to 0 or 1.
INLINE D unit(U words) { return whole(words >> 12) * TO_UNIT + HALF_STEP; }

// -log in place of numbers between 0 and 1: log(m 2^e) through atanh of (m - 1) / (m + 1), m in [sqrt(1/2), sqrt(2)).
template <int COUNT> INLINE void minus_log(D* u) {
    D e[COUNT], f[COUNT], s[COUNT], z[COUNT], y[COUNT];
    EACH {
        const U moved = (U)u[j] - 0x3fe6a09e667f3bcdu + 0x3ff0000000000000u;
        e[j] = whole(moved >> 52) - 1023.0;
        f[j] = (D)((moved & 0xfffffffffffffu) + 0x3fe6a09e667f3bcdu) - 1.0;
    }
    EACH s[j] = f[j] / (2.0 + f[j]);
    EACH z[j] = s[j] * s[j];
    constexpr double terms[] = {0x1.2f112df3e5244p-3, 0x1.39a09d078c69fp-3, 0x1.7466496cb03dep-3, 0x1.c71c51d8e78afp-3,
                                0x1.2492494229359p-2, 0x1.999999997fa04p-2, 0x1.5555555555593p-1};
    EACH y[j] = D{} + terms[0];
    UNROLL for (int i = 1; i < 7; i++) EACH y[j] = terms[i] + z[j] * y[j];
    EACH {
        const D half = 0.5 * f[j] * f[j], tail = z[j] * y[j];
        u[j] = -(e[j] * 0x1.62e42feep-1 - ((half - (s[j] * (half + tail) + e[j] * 0x1.a39ef35793c76p-33)) - f[j]));
    }
}

// The natural logarithm of each, in place; of 0 minus infinity. Not for subnormal numbers.
static void logarithm(double* x, long count) {
    for (long i = 0; i < count; i += WIDE) {
        double part[WIDE] = {};
        const long n = count - i < WIDE ? count - i : WIDE;
        memcpy(part, x + i, n * sizeof(double));
        D y[1] = {read<D>(part)};
        const D value = y[0];
        minus_log<1>(y);
        y[0] = pick((I)(value == D{}), D{} - INFINITY, pick((I)(value > D{}), -y[0], D{} + NAN));
        memcpy(x + i, y, n * sizeof(double));
    }
}

// out [n] = the sum of weights [count] times rows [count, n], the first one first.
static void weighted(const double* const* rows, const double* weights, long count, long n, double* out) {
    long i = 0;
    for (; i + LANES <= n; i += LANES) {
        D sum[REGISTERS] = {};
        for (long r = 0; r < count; r++)
            UNROLL for (int j = 0; j < REGISTERS; j++) sum[j] += weights[r] * read<D>(rows[r] + i + j * WIDE);
        UNROLL for (int j = 0; j < REGISTERS; j++) write(out + i + j * WIDE, sum[j]);
    }
    for (; i < n; i++) {
        out[i] = 0.0;
        for (long r = 0; r < count; r++) out[i] += weights[r] * rows[r][i];
    }
}

// Each weight over the exponential number that its uniform one stands for.
INLINE void compete(const double* units, const double* weights, double* scores) {
    constexpr int COUNT = STEP / WIDE;
    D x[COUNT];
    EACH x[j] = read<D>(units + j * WIDE);
    minus_log<COUNT>(x);
    EACH write(scores + j * WIDE, read<D>(weights + j * WIDE) / x[j]);
}

static double first_uniform(const Stream& stream, uint64_t block) {
    uint64_t words[4 * BLOCKS];
    philox(stream, block + 1, words);
    return unit(U{} + words[0])[0];
}

static long race(const double* weights, long vocab, const Stream& stream) {
    double units[CHUNK], scores[CHUNK], tail[CHUNK], best = 0.0;
    long winner = -1;
    for (long start = 0; start < vocab; start += CHUNK) {
        const long n = vocab - start < CHUNK ? vocab - start : CHUNK;
        const double* part = weights + start;
        if (n < CHUNK) {
            memset(tail, 0, sizeof tail);
            part = (const double*)memcpy(tail, part, n * sizeof(double));
        }
        const double heaviest = largest(part, CHUNK);
        if (!(heaviest > 0.0)) continue;
        for (long i = 0; i < CHUNK; i += 4 * BLOCKS) {
            uint64_t words[4 * BLOCKS];
            philox(stream, (uint64_t)(start + i) / 4 + 1, words);
            UNROLL for (int j = 0; j < 4 * BLOCKS; j += WIDE) write(units + i + j, unit(read<U>(words + j)));
        }
        // -log u is above 1 - u, so that no score is above this.
        if (heaviest < best * (1.0 - largest(units, CHUNK))) continue;
        for (long i = 0; i < CHUNK; i += STEP) compete(units + i, part + i, scores + i);
        const double most = largest(scores, CHUNK);
        if (most > best) {
            best = most;
            for (winner = start; scores[winner - start] != most;) winner++;
        }
    }
    return winner;
}

// out = max(0, scale law - q); returns its sum.
static double surplus(const double* law, const double* q, double scale, long n, double* out) {
    D part[REGISTERS] = {};
    long i = 0;
    for (; i + LANES <= n; i += LANES)
        UNROLL for (int j = 0; j < REGISTERS; j++) {
            const D rest = more(scale * read<D>(law + i + j * WIDE) - read<D>(q + i + j * WIDE), D{});
            write(out + i + j * WIDE, rest);
            part[j] += rest;
        }
    double sum = total(part);
    for (; i < n; i++) {
        const double rest = scale * law[i] - q[i];
        sum += out[i] = rest > 0.0 ? rest : 0.0;
    }
    return sum;
}

}  // namespace
