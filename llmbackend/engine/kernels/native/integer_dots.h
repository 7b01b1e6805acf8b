// Sums of products of small integers: unsigned numbers of 2 to 8 bits times signed bytes, and pairs of 16 bits.
//
// Used by linear_ggml.h. Invariant: every sum is exact, so all instruction sets give the same result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "epilogue_int8.h"
#include "linear_int8.h"
#include "numbers.h"

namespace llmb {

using Shorts = int16_t __attribute__((vector_size(sizeof(Ints))));
using UnsignedShorts = uint16_t __attribute__((vector_size(sizeof(Ints))));

// sum + the products of the pairs of 16 bits in each lane.
LLMB_INLINE inline Ints pair_dot(Ints sum, Ints a, Ints b) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__)
    return (Ints)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#elif defined(__AVX512BW__)
    return sum + (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return sum + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// sum + the products of the quads of bytes in each lane, unsigned numbers times signed x.
LLMB_INLINE inline Ints quad_dot(Ints sum, Ints numbers, Ints x) {
#if defined(LLMB_HAS_VNNI)
    return int8::dot(sum, numbers, x);
#else
    const Shorts even = (Shorts)x << 8 >> 8, odd = (Shorts)x >> 8;
    const UnsignedShorts low = (UnsignedShorts)numbers & 255, high = (UnsignedShorts)numbers >> 8;
    return pair_dot(pair_dot(sum, (Ints)low, (Ints)even), (Ints)high, (Ints)odd);
#endif
}

// The table's entry for each byte, 0 to 15.
LLMB_INLINE inline Ints look_up(const uint8_t* table, Ints bytes) {
#if defined(__AVX512BW__)
    const __m512i entries = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    return (Ints)_mm512_shuffle_epi8(entries, (__m512i)bytes);
#elif defined(__AVX2__)
    const __m256i entries = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    return (Ints)_mm256_shuffle_epi8(entries, (__m256i)bytes);
#else
    alignas(sizeof(Ints)) uint8_t each[sizeof(Ints)];
    std::memcpy(each, &bytes, sizeof each);
    for (uint8_t& byte : each) byte = table[byte];
    return load_ints(each);
#endif
}

// Pairs of signed bytes as pairs of 16 bits.
LLMB_INLINE inline Ints load_byte_pairs(const uint8_t* p) {
#if defined(__AVX512BW__)
    return (Ints)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    Shorts pairs;
    for (int i = 0; i < 2 * kLanes; i++) pairs[i] = static_cast<int8_t>(p[i]);
    return (Ints)pairs;
#endif
}

// The low or high halves of lanes, widened.
LLMB_INLINE inline Ints half_of(Ints pairs, int upper) { return upper ? pairs >> 16 : pairs << 16 >> 16; }

#if defined(__AVX2__) && !defined(LLMB_HAS_VNNI)
constexpr bool kByPairs = true;
#else
constexpr bool kByPairs = false;
#endif

// A run: the sum of some quads, numbers of at most kLargest times x. By dot products, in kChains parts, so that more
// products are in flight.
template <int kLargest, int kChains>
struct DotSum {
    Ints sums[kChains];

    LLMB_INLINE void begin(Ints whole) {
        for (Ints& sum : sums) sum = Ints{};
        sums[0] = whole;
    }
    LLMB_INLINE void add(int i, Ints numbers, Ints x) { sums[i % kChains] = quad_dot(sums[i % kChains], numbers, x); }
    LLMB_INLINE Ints total() const { return kChains == 2 ? sums[0] + sums[kChains - 1] : sums[0]; }

    // The factor for `scaled`.
    LLMB_INLINE static Ints scale_of(Ints pairs, int upper) { return half_of(pairs, upper); }
    template <bool kBegun>
    LLMB_INLINE Ints scaled(Ints whole, Ints scale) const { return whole + total() * scale; }
};

// If products do not fit in 16 bits, kOffset is subtracted from the numbers, which makes them signed bytes.
constexpr int kOffset = 128;
constexpr bool is_offset(int largest) { return kByPairs && largest >= kOffset; }

// Quads per run: the largest divisor of `quads` that cannot overflow.
constexpr int run_quads(int largest, int quads) {
    if (!kByPairs) return quads;
    int most = is_offset(largest) ? 1 : ((1 << 15) - 1) / (largest * 127 * 2);
    if (most > quads) most = quads;
    while (quads % most != 0) most--;
    return most;
}

#if defined(__AVX2__)
// The same with 16-bit products, in runs short enough not to overflow.
template <int kLargest>
struct PairSum {
    Ints first;
    Shorts sum;

    LLMB_INLINE void begin(Ints whole) {
        first = whole;
        sum = Shorts{};
    }
    LLMB_INLINE void add(int, Ints numbers, Ints x) {
        if constexpr (is_offset(kLargest)) {
            const Ints own = numbers ^ static_cast<int32_t>(0x80808080u);
            sum += products(magnitudes(own), with_signs(x, own));
        } else {
            sum = (Shorts)pinned((Ints)(sum + products(numbers, x)));
        }
    }

    LLMB_INLINE static Ints scale_of(Ints pairs, int upper) {
        return upper ? (pairs >> 16 & 0xffff) | (pairs & -0x10000) : (pairs & 0xffff) | pairs << 16;
    }
    LLMB_INLINE Ints total() const { return pinned(pair_dot(first, (Ints)sum, (Ints)(Shorts{} + 1))); }
    template <bool kBegun>
    LLMB_INLINE Ints scaled(Ints whole, Ints scale) const {
        return pinned(pair_dot(kBegun ? pair_dot(whole, first, scale) : whole, (Ints)sum, scale));
    }

  private:
#if defined(__AVX512BW__)
    LLMB_INLINE static Shorts products(Ints numbers, Ints x) { return (Shorts)_mm512_maddubs_epi16((__m512i)numbers, (__m512i)x); }
    LLMB_INLINE static Ints magnitudes(Ints x) { return (Ints)_mm512_abs_epi8((__m512i)x); }
    LLMB_INLINE static Ints with_signs(Ints x, Ints of) {
        return (Ints)_mm512_mask_sub_epi8((__m512i)x, _mm512_movepi8_mask((__m512i)of), __m512i{}, (__m512i)x);
    }
#else
    LLMB_INLINE static Shorts products(Ints numbers, Ints x) { return (Shorts)_mm256_maddubs_epi16((__m256i)numbers, (__m256i)x); }
    LLMB_INLINE static Ints magnitudes(Ints x) { return (Ints)_mm256_abs_epi8((__m256i)x); }
    LLMB_INLINE static Ints with_signs(Ints x, Ints of) { return (Ints)_mm256_sign_epi8((__m256i)x, (__m256i)of); }
#endif
};

template <int kLargest, int kChains>
using RunSum = std::conditional_t<kByPairs, PairSum<kLargest>, DotSum<kLargest, kChains>>;
#else
template <int kLargest, int kChains>
using RunSum = DotSum<kLargest, kChains>;
#endif

// Initial value of a group's sum of numbers up to `largest`, such that `scaled` adds -zero * sum_of_x times the scale. With
// pairs: half of it (it is even) in each half of a lane, or nothing if the offset already replaces the zero.
inline int32_t begin_of(int zero, int32_t sum_of_x, int largest) {
    if (is_offset(largest)) return 0;
    const int32_t begin = -zero * sum_of_x;
    return kByPairs ? static_cast<int32_t>((static_cast<uint32_t>(begin / 2) & 0xffff) * 0x10001u) : begin;
}

}  // namespace llmb
