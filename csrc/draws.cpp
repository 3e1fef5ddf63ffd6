// Drawing tokens: softmax in double precision, and exponential races with a counter-based generator.
//
// The generator is Philox-4x64 with ten rounds (Salmon et al. 2011), counted as numpy counts it, so that the same key
// gives the same words here and there. Loops are plain and in a fixed order of additions; contraction is off, so every
// instruction set that the compiler clones them for gives the same bits.
#include "draws.h"

#include "ops.h"

#include <math.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

namespace {

constexpr long CHUNK = 256;  // tokens between two looks at whether any weight is left
constexpr int LANES = 8;     // partial sums, whatever the width of the registers
constexpr double TO_UNIT = 0x1p-52, HALF_STEP = 0x1p-53;

inline uint64_t high(uint64_t a, uint64_t b) { return (uint64_t)(((unsigned __int128)a * b) >> 64); }

// The block behind `counter`: four words.
inline void philox(const Stream& stream, uint64_t block, uint64_t* words) {
    uint64_t c0 = stream.counter[0] + block, c1 = stream.counter[1] + (c0 < block), c2 = stream.counter[2], c3 = stream.counter[3];
    uint64_t k0 = stream.key[0], k1 = stream.key[1];
    for (int round = 0; round < 10; round++) {
        const uint64_t h0 = high(0xD2E7470EE14C6C93u, c0), l0 = 0xD2E7470EE14C6C93u * c0;
        const uint64_t h1 = high(0xCA5A826395121157u, c2), l1 = 0xCA5A826395121157u * c2;
        c0 = h1 ^ c1 ^ k0;
        c1 = l1;
        c2 = h0 ^ c3 ^ k1;
        c3 = l0;
        k0 += 0x9E3779B97F4A7C15u;
        k1 += 0xBB67AE8584CAA73Bu;
    }
    words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

// -log(u) of a normal number: log(m 2^e) through atanh of (m - 1) / (m + 1).
inline __attribute__((always_inline)) double minus_log(double u) {
    int64_t bits;
    memcpy(&bits, &u, 8);
    // Shift so that the mantissa falls in [sqrt(1/2), sqrt(2)).
    const int64_t shifted = bits - 0x3fe6a09e667f3bcdLL;
    const int64_t mantissa = (shifted & 0xfffffffffffffLL) + 0x3fe6a09e667f3bcdLL;
    const double e = (double)(shifted >> 52);
    double m;
    memcpy(&m, &mantissa, 8);
    const double f = m - 1.0, s = f / (2.0 + f), z = s * s;
    const double tail = z * (0x1.5555555555593p-1 + z * (0x1.999999997fa04p-2 + z * (0x1.2492494229359p-2 +
                        z * (0x1.c71c51d8e78afp-3 + z * (0x1.7466496cb03dep-3 + z * (0x1.39a09d078c69fp-3 +
                        z * 0x1.2f112df3e5244p-3))))));
    const double half = 0.5 * f * f;
    return -(e * 0x1.62e42feep-1 - ((half - (s * (half + tail) + e * 0x1.a39ef35793c76p-33)) - f));
}

// For each word the weight over -log of the uniform number that it stands for.
CLONES void compete(const uint64_t* words, const double* weights, double* scores) {
    for (long i = 0; i < CHUNK; i++) {
        const double u = (double)(int64_t)(words[i] >> 12) * TO_UNIT + HALF_STEP;
        scores[i] = weights[i] / minus_log(u);
    }
}

CLONES double largest(const double* x) {
    double lane[LANES] = {0};
    for (long i = 0; i < CHUNK; i += LANES)
        for (int j = 0; j < LANES; j++) lane[j] = x[i + j] > lane[j] ? x[i + j] : lane[j];
    double most = lane[0];
    for (double value : lane) most = value > most ? value : most;
    return most;
}

}  // namespace

long race(const double* weights, long vocab, const Stream& stream) {
    uint64_t words[CHUNK];
    double scores[CHUNK], tail[CHUNK];
    double best = 0.0;
    long winner = -1;
    for (long start = 0; start < vocab; start += CHUNK) {
        const long n = vocab - start < CHUNK ? vocab - start : CHUNK;
        const double* part = weights + start;
        if (n < CHUNK) {
            memset(tail, 0, sizeof tail);
            part = (const double*)memcpy(tail, part, n * sizeof(double));
        }
        if (!(largest(part) > 0.0)) continue;
        for (long i = 0; i < CHUNK; i += 4) philox(stream, (uint64_t)(start + i) / 4 + 1, words + i);
        compete(words, part, scores);
        const double most = largest(scores);
        if (most > best) {
            best = most;
            for (winner = start; scores[winner - start] != most;) winner++;
        }
    }
    return winner;
}

namespace {

inline double power(double x) {  // e^x for x <= 0
    const double bounded = x < -708.0 ? -708.0 : x;
    const double shifted = bounded * 0x1.71547652b82fep+0 + 0x1.8p52, n = shifted - 0x1.8p52;
    const double r = (bounded - n * 0x1.62e42feep-1) - n * 0x1.a39ef35793c76p-33;
    double sum = 1.0 / 6227020800.0;
    const double terms[] = {1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0,
                            1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0};
    for (double term : terms) sum = sum * r + term;
    int64_t bits;
    memcpy(&bits, &shifted, 8);
    bits = (bits + 1023) << 52;
    double scale;
    memcpy(&scale, &bits, 8);
    return x < -708.0 ? 0.0 : sum * scale;
}

}  // namespace

namespace {

template <class T>
inline __attribute__((always_inline)) double softmax_of(const T* logits, long vocab, double temperature, double* out) {
    T most = logits[0];
    for (long i = 1; i < vocab; i++) most = logits[i] > most ? logits[i] : most;
    double part[LANES] = {0};
    long i = 0;
    for (; i + LANES <= vocab; i += LANES)
        for (int j = 0; j < LANES; j++) {
            out[i + j] = power(((double)logits[i + j] - most) / temperature);
            part[j] += out[i + j];
        }
    for (int j = 0; i < vocab; i++, j++) {
        out[i] = power(((double)logits[i] - most) / temperature);
        part[j] += out[i];
    }
    const double sum = ((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7]));
    const double factor = 1.0 / sum;
    for (long k = 0; k < vocab; k++) out[k] *= factor;
    return factor;
}

}  // namespace

CLONES double softmax(const float* logits, long vocab, double temperature, double* out) {
    return softmax_of(logits, vocab, temperature, out);
}

CLONES double softmax(const double* logits, long vocab, double temperature, double* out) {
    return softmax_of(logits, vocab, temperature, out);
}

CLONES void logarithm(double* x, long count) {
    for (long i = 0; i < count; i++) {
        const double value = x[i];
        const double found = -minus_log(value);
        x[i] = value > 0.0 ? found : value == 0.0 ? -INFINITY : NAN;
    }
}

int team_for(long rows) { return rows > 1 ? pool_threads() : 1; }

// For each row of logits [rows, vocab] the softmax at its temperature, in double precision.
API void cospec_softmax(const float* logits, long rows, long vocab, const double* temperatures, double* out) {
    in_parallel(team_for(rows), [&](const Team& team) {
        for (long row = team.begin(rows); row < team.end(rows); row++)
            softmax(logits + row * vocab, vocab, temperatures[row], out + row * vocab);
    });
}

// The same for rows in double precision.
API void cospec_softmax64(const double* logits, long rows, long vocab, const double* temperatures, double* out) {
    in_parallel(team_for(rows), [&](const Team& team) {
        for (long row = team.begin(rows); row < team.end(rows); row++)
            softmax(logits + row * vocab, vocab, temperatures[row], out + row * vocab);
    });
}

// For each row of weights [rows, vocab] the winner of its race; streams [rows] of key (2 words) and counter (4 words).
API void cospec_race(const double* weights, long rows, long vocab, const uint64_t* streams, int64_t* winners) {
    in_parallel(team_for(rows), [&](const Team& team) {
        for (long row = team.begin(rows); row < team.end(rows); row++) {
            Stream stream;
            memcpy(&stream, streams + 6 * row, sizeof stream);
            winners[row] = race(weights + row * vocab, vocab, stream);
        }
    });
}
