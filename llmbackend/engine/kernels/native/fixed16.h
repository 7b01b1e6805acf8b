// 16-bit fixed point for keys and values: a head's numbers at one position are integers times one power of two.
//
// Written by rotary.h, read by attention. Invariants: what is written depends only on that head and position, and is
// finite; a key's integers have a norm of at most 2^15 and a value's are below it, so the 32-bit sums of attention
// cannot overflow, and are exact in any order.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "numbers.h"
#include "quantised_rows.h"

#if defined(LLMB_HAS_VNNI) || (defined(__AVX2__) && !defined(__AVX512F__))
#define LLMB_FIXED_POINT_KV 1
#endif

namespace llmb {

// An element is integer * 2^(E - 142). The lowest bits of a key's first 16 elements encode its E and that of the
// position's value, where a vector contains those of many positions. A head has at least 16 elements.
struct fixed16 {
    int16_t bits;
};

constexpr int kExponentBits = 8;
constexpr int kUnitBias = 142;       // 127 + 15
constexpr int kLeastExponent = 32;   // smaller numbers are zero
constexpr float kFixedLargest = 1125899906842624.0f;  // 2^50: keeps the sum of squares of a head's elements finite

inline float float_of(int32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// The nearest number within the range; 0 for a NaN.
inline Floats within_range(Floats x) {
    const Floats bounded = max(min(x, splat(kFixedLargest)), splat(-kFixedLargest));
    return x == x ? bounded : Floats{};
}

// Calls f(d, vector) for all elements of a head; the last vector is padded with zeros.
template <class F>
inline void each_vector(const float* x, int dim, F&& f) {
    for (int d = 0; d < dim; d += kLanes) f(d, load_some(x + d, std::min(kLanes, dim - d)));
}

inline Floats magnitude(Floats x) { return max(x, -x); }

// The exponent byte of a float32.
inline int exponent_of(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits >> 23 & 255;
}

// The smallest E with |x| < 2^(E - 127): for a key, of its norm, ...
inline int key_exponent(const float* k, int dim) {
    Floats squares{};
    each_vector(k, dim, [&](int, Floats x) { squares = fma(within_range(x), within_range(x), squares); });
    return std::max(kLeastExponent, (exponent_of(sum(squares)) + 129) / 2);  // of the root, rounded up
}

// ... for a value, of its largest element.
inline int value_exponent(const float* v, int dim) {
    Floats largest{};
    each_vector(v, dim, [&](int, Floats x) { largest = max(largest, magnitude(within_range(x))); });
    return std::max(kLeastExponent, exponent_of(max(largest)) + 1);
}

// Calls put(d, integer) for all elements.
template <class Put>
inline void each_integer(const float* x, int dim, float factor, Put&& put) {
    const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
    const Ints largest = Ints{} + 32767;
    each_vector(x, dim, [&](int d, Floats v) {
        const Ints rounded = (Ints)(within_range(v) * factor + magic) - (Ints)magic;
        const Ints integers = rounded > largest ? largest : rounded;
        for (int i = 0; i < std::min(kLanes, dim - d); i++) put(d + i, integers[i]);
    });
}

inline float unit_factor(int exponent) { return float_of((127 + kUnitBias - exponent) << 23); }

// The integers of a key; bit i of its exponent is the lowest bit of element 2i, that of its value's exponent the lowest
// bit of element 2i + 1.
template <class Put>
inline void encode_key(const float* k, int dim, int value_exponent, Put&& put) {
    const int exponent = key_exponent(k, dim);
    each_integer(k, dim, unit_factor(exponent), [&](int d, int integer) {
        if (d < 2 * kExponentBits) integer = (integer & ~1) | ((d % 2 ? value_exponent : exponent) >> d / 2 & 1);
        put(d, fixed16{static_cast<int16_t>(integer)});
    });
}

// Converts a query to integers for products with keys: their norm is below 2^16, minus what rounding may add.
struct QueryScale {
    float factor;
    float unit;  // the value of a product of an integer with 2^15; NaN if a number is not finite

    QueryScale(const float* q, int dim) {
        constexpr float kMostNorm = 65000.0f, kMost = 32767.0f, kNextToZero = 1e-18f;
        Floats squares{}, largest{};
        each_vector(q, dim, [&](int, Floats x) {
            squares = fma(x, x, squares);
            largest = max(largest, magnitude(x));
        });
        const float norm = std::sqrt(sum(squares));
        const bool finite = norm <= FLT_MAX;
        factor = finite && norm > kNextToZero ? std::min(kMostNorm / norm, kMost / max(largest)) : 0.0f;
        unit = !finite ? __builtin_nanf("") : factor > 0.0f ? 1.0f / (factor * 32768.0f) : 0.0f;
    }
};

#if defined(LLMB_FIXED_POINT_KV)
// sum + the products of the pairs of 16-bit integers in a and b.
inline Ints dot_pairs(Ints a, Ints b, Ints sum) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__)
    return (Ints)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#else
    return (Ints)((Bits)sum + (Bits)_mm256_madd_epi16((__m256i)a, (__m256i)b));  // as documented, for tests on any CPU
#endif
}

inline Ints load_pairs(const fixed16* p) { return load_pairs(reinterpret_cast<const bf16*>(p)); }

// The values of 2^15 at kLanes adjacent positions, found in their keys [dim/2][block_size][2]. Those of values are
// finite even in memory that was never written, because a weight of zero would not mask them.
inline void load_units(const fixed16* keys, int block_size, float* key_units, float* value_units) {
    Ints exponents{};
    for (int bit = 0; bit < kExponentBits; bit++)
        exponents |= (load_pairs(keys + static_cast<size_t>(bit) * 2 * block_size) & 0x00010001) << bit;
    const Ints most = Ints{} + 254, of_values = exponents >> 16 & 255;
    store(key_units, (Floats)((exponents & 255) << 23));
    store(value_units, (Floats)((of_values < most ? of_values : most) << 23));
}
#endif

}  // namespace llmb
