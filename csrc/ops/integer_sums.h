// How the products of a part of a block are summed, for a weight format F.
//
// A part has F::SUB inputs of one row, and sixteen outputs. Its sum starts at - F::OFFSET * sum of the inputs, takes
// pairs of words of weights, and ends as sixteen exact 32-bit integers.
#pragma once
#include <type_traits>

#include "ops/integer_simd.h"

namespace cospec {
namespace {

#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)

// Byte I of a quad of inputs.
template <int I> INLINE int32_t byte_of(uint32_t quad) { return (int32_t)(quad << (24 - 8 * I)) >> 24; }
// Two numbers of 16 bits.
INLINE int32_t pair_of(int32_t low, int32_t high) { return (int32_t)((uint32_t)low & 0xffff | (uint32_t)high << 16); }

// The compiler neither moves loads over this line nor adds in another order. Otherwise it keeps the broadcast inputs of
// all rows for the other half of a panel, more than there are registers, and a tile of four rows takes a third longer.
INLINE void in_this_order(Ints& sums) {
    __m256i a = sums.a, b = sums.b;
    asm volatile("" : "+x"(a), "+x"(b) : : "memory");
    sums = {a, b};
}

// Integers up to 63. Products are summed in 16 bits, as even and odd pairs of inputs. Sums may wrap around on the way,
// because what they end with fits.
template <class F> struct SmallSums {
    static constexpr int INPUT_BYTES = 1;
    // Pairs of words that a sum takes: each adds 4 products to the even and to the odd pairs.
    static constexpr int FARTHEST = F::LARGEST - F::OFFSET > F::OFFSET ? F::LARGEST - F::OFFSET : F::OFFSET;
    static constexpr int PAIRS = F::SUB / 2 * FARTHEST * 127 < 1 << 15 ? F::SUB / 8 : F::SUB / 16;
    static_assert(8 * PAIRS / 2 * FARTHEST * 127 < 1 << 15, "sums fit into 16 bits");
    static_assert(8 * PAIRS == F::SUB || F::OFFSET == 0, "an offset is taken off once");
    static void arrange(const int8_t* inputs, int8_t* to) { memcpy(to, inputs, 32); }
    static int32_t start(const int8_t* inputs) {
        int even = 0, odd = 0;
        for (int i = 0; i < F::SUB && F::OFFSET; i += 4) {
            const uint32_t quad = quad_at(inputs + i);
            even += byte_of<0>(quad) + byte_of<1>(quad), odd += byte_of<2>(quad) + byte_of<3>(quad);
        }
        return pair_of(-F::OFFSET * even, -F::OFFSET * odd);
    }
    template <int PAIR, int ROWS>
    INLINE void add(Ints (&sums)[ROWS][1], const Bytes (&words)[1][2], const int8_t* x) {
        UNROLL_FOR (int i = 0; i < 2; i++) {
            const Bytes word = words[0][i];
            UNROLL_FOR (int r = 0; r < ROWS; r++) {
                Ints& own = sums[r][0];
                const __m256i quad = _mm256_set1_epi32((int)quad_at(x + 32 * r + 8 * PAIR + 4 * i));
                own.a = _mm256_add_epi16(own.a, _mm256_maddubs_epi16(word.a, quad));
                own.b = _mm256_add_epi16(own.b, _mm256_maddubs_epi16(word.b, quad));
                in_this_order(own);
            }
        }
    }
    INLINE void end(Ints& sums) {
        const __m256i ones = _mm256_set1_epi16(1);
        sums = {_mm256_madd_epi16(sums.a, ones), _mm256_madd_epi16(sums.b, ones)};
    }
};

// Larger integers, all with the offset 128. A weight's 16 bits hold an even weight w, unsigned, and above it an odd
// weight v without its offset. With inputs x and y, (256 v + w) * x + v * (y - 256 x) = w x + v y. So only the odd
// weights are unpacked, and y - 256 x fits into 16 bits. Only even weights keep their offset.
template <class F> struct LargeSums {
    static constexpr int INPUT_BYTES = 2, PAIRS = F::SUB / 8;
    static_assert(F::OFFSET == 128 && F::SUB <= 32, "sums fit into 32 bits");
    // Of four inputs x, y, x', y' the words x, x' and, 32 bytes further, y - 256 x, y' - 256 x'.
    static void arrange(const int8_t* inputs, int8_t* to) {
        for (int i = 0; i < 32; i += 4) {
            const uint32_t quad = quad_at(inputs + i);
            const int32_t x = byte_of<0>(quad), y = byte_of<1>(quad), x2 = byte_of<2>(quad), y2 = byte_of<3>(quad);
            const int32_t even = pair_of(x, x2), odd = pair_of(y - 256 * x, y2 - 256 * x2);
            memcpy(to + i, &even, 4);
            memcpy(to + 32 + i, &odd, 4);
        }
    }
    static int32_t start(const int8_t* inputs) {
        int even = 0;
        for (int i = 0; i < F::SUB; i += 4) even += byte_of<0>(quad_at(inputs + i)) + byte_of<2>(quad_at(inputs + i));
        return -F::OFFSET * even;
    }
    template <int PAIR, int ROWS>
    INLINE void add(Ints (&sums)[ROWS][1], const Bytes (&words)[1][2], const int8_t* x) {
        UNROLL_FOR (int i = 0; i < 2; i++) {
            const __m256i signs = _mm256_set1_epi16((short)0x8000);
            const Bytes both = {_mm256_xor_si256(words[0][i].a, signs), _mm256_xor_si256(words[0][i].b, signs)};
            const Bytes odd = {_mm256_srai_epi16(both.a, 8), _mm256_srai_epi16(both.b, 8)};
            UNROLL_FOR (int r = 0; r < ROWS; r++) {
                Ints& own = sums[r][0];
                const int8_t* quad = x + 64 * r + 8 * PAIR + 4 * i;
                const __m256i x0 = _mm256_set1_epi32((int)quad_at(quad));
                const __m256i x1 = _mm256_set1_epi32((int)quad_at(quad + 32));
                own.a = _mm256_add_epi32(own.a, _mm256_madd_epi16(both.a, x0));
                own.b = _mm256_add_epi32(own.b, _mm256_madd_epi16(both.b, x0));
                own.a = _mm256_add_epi32(own.a, _mm256_madd_epi16(odd.a, x1));
                own.b = _mm256_add_epi32(own.b, _mm256_madd_epi16(odd.b, x1));
                in_this_order(own);
            }
        }
    }
    INLINE void end(Ints&) {}
};

template <class F> struct PartSums : std::conditional_t<fits_16_bits(F::LARGEST), SmallSums<F>, LargeSums<F>> {};

#else

template <class F> struct PartSums {
    static constexpr int INPUT_BYTES = 1, PAIRS = F::SUB / 8;
    static void arrange(const int8_t* inputs, int8_t* to) { memcpy(to, inputs, 32); }
    static int32_t start(const int8_t* inputs) {
        int sum = 0;
        for (int i = 0; i < F::SUB; i++) sum += inputs[i];
        return dot_takes_offset(F::LARGEST) ? 0 : -F::OFFSET * sum;
    }
    template <int PAIR, int ROWS, int HALVES>
    INLINE void add(Ints (&sums)[ROWS][HALVES], const Bytes (&words)[HALVES][2], const int8_t* x) {
        UNROLL_FOR (int r = 0; r < ROWS; r++)
            UNROLL_FOR (int h = 0; h < HALVES; h++)
                sums[r][h] = dot<F::LARGEST>(words[h][0], words[h][1], x + 32 * r + 8 * PAIR, sums[r][h]);
    }
    INLINE void end(Ints&) {}
};

#endif

}  // namespace

}  // namespace cospec
