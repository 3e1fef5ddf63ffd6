// The formats of the KV cache. All code that depends on the format expands the table.
//
// An entry is the key or the value of one token and head. An entry is rounded once, when it is written, and depends on
// its own numbers alone. So all batches, threads and instruction sets read the same entries.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

namespace cospec {

// FORMAT(name, id, Entry): the name is that of the numbers' type in torch.
#define CACHE_FORMATS(FORMAT)                 \
    FORMAT("float32", CACHE_FP32, Fp32Entry)  \
    FORMAT("bfloat16", CACHE_BF16, Bf16Entry) \
    FORMAT("float16", CACHE_FP16, Fp16Entry)  \
    FORMAT("int8", CACHE_INT8, Int8Entry)

#define FORMAT_ID(name, id, ...) id,
enum CacheFormat { CACHE_FORMATS(FORMAT_ID) NUM_CACHE_FORMATS };
#undef FORMAT_ID

inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

// All roundings are to nearest, ties to even, as torch's.
inline uint16_t float_to_bf16(float x) {
    const uint32_t bits = bits_of(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;  // NaN
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline uint16_t float_to_half(float x) {
    const uint32_t sign = bits_of(x) >> 16 & 0x8000, bits = bits_of(x) & 0x7fffffff;
    if (bits > 0x7f800000) return 0x7e00;                      // NaN
    if (bits >= 0x47800000) return (uint16_t)(sign | 0x7c00);  // 65536 and more
    if (bits < 0x38800000)                                     // subnormal: a multiple of 2^-24, as after 0.5
        return (uint16_t)(sign | (bits_of(fabsf(x) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | ((bits + 0xfff + (bits >> 13 & 1) - 0x38000000) >> 13));
}

struct Fp32Entry {
    typedef float Number;
    static constexpr bool scaled = false;  // whether a float32 scale follows the numbers
    static void write(const float* x, long dim, Number* to) { memcpy(to, x, sizeof(float) * dim); }
};

struct Bf16Entry {
    typedef uint16_t Number;
    static constexpr bool scaled = false;
    static void write(const float* x, long dim, Number* to) {
        for (long d = 0; d < dim; d++) to[d] = float_to_bf16(x[d]);
    }
};

struct Fp16Entry {
    typedef uint16_t Number;
    static constexpr bool scaled = false;
    static void write(const float* x, long dim, Number* to) {
        for (long d = 0; d < dim; d++) to[d] = float_to_half(x[d]);
    }
};

// The largest number becomes 127 or -127. An entry with a number that is not finite has the scale NaN.
struct Int8Entry {
    typedef int8_t Number;
    static constexpr bool scaled = true;
    static void write(const float* x, long dim, Number* to) {
        constexpr float LEAST = 1e-30f;  // entries of smaller numbers are 0
        float largest = 0, nonfinite = 0;
        for (long d = 0; d < dim; d++) {
            largest = fabsf(x[d]) > largest ? fabsf(x[d]) : largest;
            nonfinite += x[d] * 0.0f;
        }
        const bool zero = largest < LEAST || nonfinite != 0.0f;
        const float factor = zero ? 0.0f : 127.0f / largest, scale = (zero ? 0.0f : largest / 127.0f) + nonfinite;
        constexpr float MAGIC = 12582912.0f;  // adding it rounds to the nearest whole number, ties to even
        for (long d = 0; d < dim; d++) to[d] = zero ? 0 : (int8_t)((x[d] * factor + MAGIC) - MAGIC);
        memcpy(to + dim, &scale, sizeof scale);
    }
};

template <class Entry> constexpr long entry_bytes(long dim) {
    return dim * (long)sizeof(typename Entry::Number) + (Entry::scaled ? (long)sizeof(float) : 0);
}

inline long entry_bytes(long format, long dim) {
    switch (format) {
#define FORMAT(name, id, Entry) \
    case id: return entry_bytes<Entry>(dim);
        CACHE_FORMATS(FORMAT)
#undef FORMAT
    }
    return 0;
}

}  // namespace cospec
