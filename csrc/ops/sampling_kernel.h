// Softmax in double precision, exponential sampling with a counter-based generator, and residual distributions.
//
// The generator is Philox-4x64 with ten rounds (Salmon et al. 2011).
// The counter advances as in numpy, so the same key gives the same words.
// Sums use eight lanes for every register width, and contraction is off, so every instruction set gives the same bits.
#pragma once
#include <math.h>

#include "ops/kernels.h"
#include "ops/simd.h"

namespace cospec {

namespace {

#if defined(__AVX512F__)
constexpr int WIDE = 8;
#elif defined(__AVX2__)
constexpr int WIDE = 4;
#else
constexpr int WIDE = 2;
#endif
constexpr int LANES = 8, REGISTERS = LANES / WIDE;
constexpr int STEP = WIDE == 8 ? 32 : 16;  // numbers per step: as many as the registers hold
constexpr long CHUNK = 64;                 // tokens between two checks whether any of them can still win
constexpr double TO_UNIT = 0x1p-52, HALF_STEP = 0x1p-53;

typedef double D __attribute__((vector_size(8 * WIDE)));
typedef int64_t I __attribute__((vector_size(8 * WIDE)));
typedef uint64_t U __attribute__((vector_size(8 * WIDE)));
typedef float Narrow __attribute__((vector_size(4 * WIDE)));

template <class T> INLINE T read(const void* p) {
    T x;
    memcpy(&x, p, sizeof x);
    return x;
}
template <class T> INLINE void write(void* p, const T& x) { memcpy(p, &x, sizeof x); }
INLINE D select(I which, D yes, D no) { return (D)(((I)yes & which) | ((I)no & ~which)); }
INLINE D elementwise_max(D x, D y) { return select((I)(x > y), x, y); }
INLINE D from_integer(U n) { return (D)(n | 0x4330000000000000u) - 0x1p52; }  // n < 2^52 as a number

static double max_positive(const double* x, long n) {
    D lane_max[REGISTERS] = {};
    long i = 0;
    for (; i + LANES <= n; i += LANES)
        UNROLL_FOR (int j = 0; j < REGISTERS; j++)
            lane_max[j] = elementwise_max(read<D>(x + i + j * WIDE), lane_max[j]);
    double lane[LANES], maximum = 0.0;
    write(lane, lane_max);
    for (double value : lane) maximum = value > maximum ? value : maximum;
    for (; i < n; i++) maximum = x[i] > maximum ? x[i] : maximum;
    return maximum;
}

INLINE double total(const D* part) {
    double lane[LANES];
    memcpy(lane, part, sizeof lane);
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

// Interleave the dependent steps of several registers, so that no register waits for another.
#define EACH(j) UNROLL_FOR (int j = 0; j < COUNT; j++)

template <int COUNT> INLINE void exp_nonpositive(D* x) {  // e^x in place, for x <= 0
    I tiny[COUNT];
    D shifted[COUNT], r[COUNT], y[COUNT];
    EACH (j) tiny[j] = (I)(x[j] < -708.0);
    EACH (j) x[j] = select(tiny[j], D{} - 708.0, x[j]);
    EACH (j) shifted[j] = x[j] * 0x1.71547652b82fep+0 + 0x1.8p52;
    EACH (j) r[j] = x[j] - (shifted[j] - 0x1.8p52) * 0x1.62e42feep-1;
    EACH (j) r[j] = r[j] - (shifted[j] - 0x1.8p52) * 0x1.a39ef35793c76p-33;
    constexpr double terms[] = {1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0,
        1.0 / 362880.0, 1.0 / 40320.0, 1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0};
    EACH (j) y[j] = D{} + terms[0];
    UNROLL_FOR (int i = 1; i < 14; i++)
        EACH (j) y[j] = y[j] * r[j] + terms[i];
    EACH (j) x[j] = select(tiny[j], D{}, y[j] * (D)(((I)shifted[j] + 1023) << 52));
}

// e^((x - maximum) / temperature) of some logits, added to the lanes of `part`.
INLINE D to_double(const float* x) { return __builtin_convertvector(read<Narrow>(x), D); }
INLINE D to_double(const double* x) { return read<D>(x); }
template <int COUNT, class T> INLINE void softmax_terms(
    const T* x, double maximum, double temperature, D* part, double* out) {
    D y[COUNT];
    EACH (j) y[j] = (to_double(x + j * WIDE) - maximum) / temperature;
    exp_nonpositive<COUNT>(y);
    EACH (j) write(out + j * WIDE, y[j]);
    EACH (j) part[j % REGISTERS] += y[j];
}

static double max_of(const float* x, long n) {
    V lane_max = splat(x[0]);
    long i = 0;
    for (; i + 16 <= n; i += 16) lane_max = larger(load(x + i), lane_max);
    float maximum = largest(lane_max);
    for (; i < n; i++) maximum = x[i] > maximum ? x[i] : maximum;
    return maximum;
}
static double max_of(const double* x, long n) {
    double maximum = x[0];
    long i = 0;
    if (n >= LANES) {
        D lane_max[REGISTERS];
        UNROLL_FOR (int j = 0; j < REGISTERS; j++) lane_max[j] = read<D>(x + j * WIDE);
        for (i = LANES; i + LANES <= n; i += LANES)
            UNROLL_FOR (int j = 0; j < REGISTERS; j++)
                lane_max[j] = elementwise_max(read<D>(x + i + j * WIDE), lane_max[j]);
        for (int j = 0; j < REGISTERS; j++)
            for (int lane = 0; lane < WIDE; lane++) maximum = lane_max[j][lane] > maximum ? lane_max[j][lane] : maximum;
    }
    for (; i < n; i++) maximum = x[i] > maximum ? x[i] : maximum;
    return maximum;
}

template <class T> static double softmax(const T* logits, long vocab, double temperature, double* out) {
    const double maximum = max_of(logits, vocab);
    long i = 0;
    D part[REGISTERS] = {};
    for (i = 0; i + STEP <= vocab; i += STEP)
        softmax_terms<STEP / WIDE>(logits + i, maximum, temperature, part, out + i);
    if (i < vocab) {
        T padded[STEP];
        double last[STEP];
        for (int j = 0; j < STEP; j++) padded[j] = i + j < vocab ? logits[i + j] : -INFINITY;
        softmax_terms<STEP / WIDE>(padded, maximum, temperature, part, last);
        memcpy(out + i, last, sizeof(double) * (vocab - i));
    }
    const double factor = 1.0 / total(part);
    for (long k = 0; k < vocab; k++) out[k] *= factor;
    return factor;
}

// Words of the generator's blocks from `block` on, four words per block.
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
static void philox(const RandomStream& stream, uint64_t block, uint64_t* words) {
    constexpr int COUNT = BLOCKS / 8;
    const __m512i start = _mm512_set1_epi64(stream.counter[0]), one = _mm512_set1_epi64(1);
    __m512i c[COUNT][4], h0[COUNT], l0[COUNT], h1[COUNT], l1[COUNT];
    EACH (j) {
        const __m512i count =
            _mm512_add_epi64(_mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7), _mm512_set1_epi64(block + 8 * j));
        c[j][0] = _mm512_add_epi64(start, count);
        for (int i = 1; i < 4; i++) c[j][i] = _mm512_set1_epi64(stream.counter[i]);
        c[j][1] = _mm512_mask_add_epi64(c[j][1], _mm512_cmplt_epu64_mask(c[j][0], start), c[j][1], one);
    }
    uint64_t k0 = stream.key[0], k1 = stream.key[1];
    UNROLL_FOR (int round = 0; round < 10; round++) {
        const __m512i key0 = _mm512_set1_epi64(k0), key1 = _mm512_set1_epi64(k1);
        EACH (j) multiply(c[j][0], 0xD2E7470EE14C6C93u, &h0[j], &l0[j]);
        EACH (j) multiply(c[j][2], 0xCA5A826395121157u, &h1[j], &l1[j]);
        EACH (j) {
            c[j][0] = _mm512_ternarylogic_epi64(h1[j], c[j][1], key0, 0x96);  // exclusive or of three
            c[j][1] = l1[j];
            c[j][2] = _mm512_ternarylogic_epi64(h0[j], c[j][3], key1, 0x96);
            c[j][3] = l0[j];
        }
        k0 += 0x9E3779B97F4A7C15u;
        k1 += 0xBB67AE8584CAA73Bu;
    }
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11),
                  second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    EACH (j) {  // a register holds one word of eight blocks; store a block's four words side by side
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
static void philox(const RandomStream& stream, uint64_t block, uint64_t* words) {
    constexpr int COUNT = BLOCKS;
    uint64_t c[COUNT][4], k0 = stream.key[0], k1 = stream.key[1];
    EACH (j) {
        memcpy(c[j], stream.counter, sizeof c[j]);
        c[j][0] += block + j;
        c[j][1] += c[j][0] < stream.counter[0];
    }
    for (int round = 0; round < 10; round++) {
        EACH (j) {
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

// Odd multiples of 2^-53, so that no number is rounded to 0 or 1.
INLINE D unit(U words) { return from_integer(words >> 12) * TO_UNIT + HALF_STEP; }

// -log in place of numbers between 0 and 1: log(m 2^e) through atanh of (m - 1) / (m + 1), m in [sqrt(1/2), sqrt(2)).
template <int COUNT> INLINE void minus_log(D* u) {
    D e[COUNT], f[COUNT], s[COUNT], z[COUNT], y[COUNT];
    EACH (j) {
        const U moved = (U)u[j] - 0x3fe6a09e667f3bcdu + 0x3ff0000000000000u;
        e[j] = from_integer(moved >> 52) - 1023.0;
        f[j] = (D)((moved & 0xfffffffffffffu) + 0x3fe6a09e667f3bcdu) - 1.0;
    }
    EACH (j) s[j] = f[j] / (2.0 + f[j]);
    EACH (j) z[j] = s[j] * s[j];
    constexpr double terms[] = {0x1.2f112df3e5244p-3, 0x1.39a09d078c69fp-3, 0x1.7466496cb03dep-3, 0x1.c71c51d8e78afp-3,
        0x1.2492494229359p-2, 0x1.999999997fa04p-2, 0x1.5555555555593p-1};
    EACH (j) y[j] = D{} + terms[0];
    UNROLL_FOR (int i = 1; i < 7; i++)
        EACH (j) y[j] = terms[i] + z[j] * y[j];
    EACH (j) {
        const D half = 0.5 * f[j] * f[j], tail = z[j] * y[j];
        u[j] = -(e[j] * 0x1.62e42feep-1 - ((half - (s[j] * (half + tail) + e[j] * 0x1.a39ef35793c76p-33)) - f[j]));
    }
}

// The natural logarithm of each number, in place; minus infinity for 0. Not for subnormal numbers.
static void logarithm(double* x, long count) {
    for (long i = 0; i < count; i += WIDE) {
        double part[WIDE] = {};
        const long n = count - i < WIDE ? count - i : WIDE;
        memcpy(part, x + i, n * sizeof(double));
        D y[1] = {read<D>(part)};
        const D value = y[0];
        minus_log<1>(y);
        y[0] = select((I)(value == D{}), D{} - INFINITY, select((I)(value > D{}), -y[0], D{} + NAN));
        memcpy(x + i, y, n * sizeof(double));
    }
}

// out [n] = sum of weights [count] times rows [count, n], in ascending order of rows.
static void weighted_sum(const double* const* rows, const double* weights, long count, long n, double* out) {
    long i = 0;
    for (; i + LANES <= n; i += LANES) {
        D sum[REGISTERS] = {};
        for (long r = 0; r < count; r++)
            UNROLL_FOR (int j = 0; j < REGISTERS; j++) sum[j] += weights[r] * read<D>(rows[r] + i + j * WIDE);
        UNROLL_FOR (int j = 0; j < REGISTERS; j++) write(out + i + j * WIDE, sum[j]);
    }
    for (; i < n; i++) {
        out[i] = 0.0;
        for (long r = 0; r < count; r++) out[i] += weights[r] * rows[r][i];
    }
}

// Each weight divided by the exponential number of its uniform number.
INLINE void exponential_scores(const double* units, const double* weights, double* scores) {
    constexpr int COUNT = STEP / WIDE;
    D x[COUNT];
    EACH (j) x[j] = read<D>(units + j * WIDE);
    minus_log<COUNT>(x);
    EACH (j) write(scores + j * WIDE, read<D>(weights + j * WIDE) / x[j]);
}

static double first_uniform(const RandomStream& stream, uint64_t block) {
    uint64_t words[4 * BLOCKS];
    philox(stream, block + 1, words);
    return unit(U{} + words[0])[0];
}

static long exponential_sample(const double* weights, long vocab, const RandomStream& stream) {
    double units[CHUNK], scores[CHUNK], tail[CHUNK], best = 0.0;
    long token = -1;
    for (long start = 0; start < vocab; start += CHUNK) {
        const long n = vocab - start < CHUNK ? vocab - start : CHUNK;
        const double* part = weights + start;
        if (n < CHUNK) {
            memset(tail, 0, sizeof tail);
            part = (const double*)memcpy(tail, part, n * sizeof(double));
        }
        const double max_weight = max_positive(part, CHUNK);
        if (!(max_weight > 0.0)) continue;
        for (long i = 0; i < CHUNK; i += 4 * BLOCKS) {
            uint64_t words[4 * BLOCKS];
            philox(stream, (uint64_t)(start + i) / 4 + 1, words);
            UNROLL_FOR (int j = 0; j < 4 * BLOCKS; j += WIDE) write(units + i + j, unit(read<U>(words + j)));
        }
        // -log u is above 1 - u, so no score is above this bound.
        if (max_weight < best * (1.0 - max_positive(units, CHUNK))) continue;
        for (long i = 0; i < CHUNK; i += STEP) exponential_scores(units + i, part + i, scores + i);
        const double maximum = max_positive(scores, CHUNK);
        if (maximum > best) {
            best = maximum;
            for (token = start; scores[token - start] != maximum;) token++;
        }
    }
    return token;
}

// out = max(0, scale target - q). Returns the sum of out.
static double residual(const double* target, const double* q, double scale, long n, double* out) {
    D part[REGISTERS] = {};
    long i = 0;
    for (; i + LANES <= n; i += LANES)
        UNROLL_FOR (int j = 0; j < REGISTERS; j++) {
            const D difference =
                elementwise_max(scale * read<D>(target + i + j * WIDE) - read<D>(q + i + j * WIDE), D{});
            write(out + i + j * WIDE, difference);
            part[j] += difference;
        }
    double sum = total(part);
    for (; i < n; i++) {
        const double difference = scale * target[i] - q[i];
        sum += out[i] = difference > 0.0 ? difference : 0.0;
    }
    return sum;
}

}  // namespace

}  // namespace cospec
