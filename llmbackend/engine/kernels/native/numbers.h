// Vectors of float32 and related storage types, for the instruction set that this file is compiled for.
//
// Used by all kernels. Invariant: an operation rounds the same way in every function that uses it: the library is
// compiled with -ffp-contract=off, and fma() is fused exactly if the CPU has fused operations.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define LLMB_INLINE __attribute__((always_inline))

namespace llmb {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

using Floats = float __attribute__((vector_size(kLanes * 4)));
using Ints = int32_t __attribute__((vector_size(kLanes * 4)));
using Bits = uint32_t __attribute__((vector_size(kLanes * 4)));  // for sums that wrap around on overflow

// The upper half of a float32.
struct bf16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

// Rounds to nearest, ties to even; NaNs are preserved.
inline bf16 to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
    return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

inline void set(float& to, float from) { to = from; }
inline void set(bf16& to, float from) { to = to_bf16(from); }

inline Floats splat(float x) { return x - Floats{}; }  // subtracting zero changes nothing, not even -0, so it is free

inline Floats load(const float* p) {
    Floats v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
inline void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }

inline Floats load(const bf16* p) {
#if defined(__AVX512F__)
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
#elif defined(__AVX2__)
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
#else
    Floats v;
    for (int i = 0; i < kLanes; i++) v[i] = to_float(p[i]);
    return v;
#endif
}

inline Ints load_ints(const void* p) {
    Ints v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// 0 to kLanes - 1.
inline Ints lane_numbers() {
    Ints v;
    for (int i = 0; i < kLanes; i++) v[i] = i;
    return v;
}

// Rounds like to_bf16; the CPU's own conversion flushes subnormal numbers to zero.
inline void store(bf16* p, Floats v) {
#if defined(__AVX512BF16__)
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)v);
    std::memcpy(p, &rounded, sizeof rounded);
#elif defined(__AVX512F__)
    const __m512i bits = (__m512i)v;
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __m512i chosen = _mm512_mask_blend_epi32(nan, rounded, quiet);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(chosen, 16)));
#else
    for (int i = 0; i < kLanes; i++) p[i] = to_bf16(v[i]);
#endif
}

// a * b + c
inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// The scalar twin of fma().
inline float fma(float a, float b, float c) {
#if defined(__FMA__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

inline Floats max(Floats a, Floats b) { return a > b ? a : b; }
inline Floats min(Floats a, Floats b) { return a < b ? a : b; }

// Halves the vector repeatedly: a fixed order of additions.
inline float sum(Floats v) {
    alignas(64) float lanes[kLanes];
    store(lanes, v);
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

// `count` (1..kLanes) numbers, the rest zero.
template <class X>
inline Floats load_some(const X* p, int count) {
    if (count == kLanes) return load(p);
    alignas(64) X some[kLanes] = {};
    std::memcpy(some, p, count * sizeof(X));
    return load(some);
}

// A sum over x[i]: element i is added to sum i % 64, for every vector width, and the 64 sums are halved repeatedly.
// add(sum, v) adds the terms of v; fill: replaces elements beyond n.
template <class Add>
inline float sum_by_64(const float* x, int n, float fill, Add&& add) {
    constexpr int kSums = 64, kVectors = kSums / kLanes;
    Floats sums[kVectors] = {};
    int i = 0;
    for (; i + kSums <= n; i += kSums)
        for (int j = 0; j < kVectors; j++) sums[j] = add(sums[j], load(x + i + j * kLanes));
    for (int j = 0; i < n; i += kLanes, j++) {
        alignas(64) float some[kLanes];
        store(some, splat(fill));
        std::memcpy(some, x + i, (n - i < kLanes ? n - i : kLanes) * sizeof(float));
        sums[j] = add(sums[j], load(some));
    }
    for (int half = kVectors / 2; half > 0; half /= 2)
        for (int j = 0; j < half; j++) sums[j] += sums[j + half];
    return sum(sums[0]);
}

// The sum of x[i]².
inline float sum_of_squares(const float* x, int n) {
    return sum_by_64(x, n, 0.0f, [](Floats sum, Floats v) { return fma(v, v, sum); });
}

// The sum of (x[i] - mean)².
inline float sum_of_squares_about(const float* x, int n, float mean) {
    return sum_by_64(x, n, mean, [&](Floats sum, Floats v) { return fma(v - splat(mean), v - splat(mean), sum); });
}

inline float sum(const float* x, int n) {
    return sum_by_64(x, n, 0.0f, [](Floats sum, Floats v) { return sum + v; });
}

inline float max(Floats v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float best = v[0];
    for (int i = 1; i < kLanes; i++) best = v[i] > best ? v[i] : best;
    return best;
#endif
}

// Mask of the nonzero lanes, lane 0 in the lowest bit.
inline uint32_t not_zero(Ints v) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)v, (__m512i)v);
#elif defined(__AVX2__)
    return ~_mm256_movemask_ps((__m256)(v == 0)) & 255;
#else
    uint32_t lanes = 0;
    for (int i = 0; i < kLanes; i++) lanes |= static_cast<uint32_t>(v[i] != 0) << i;
    return lanes;
#endif
}

// For a vector of pairs of bf16 (one pair per 32-bit lane): the even and the odd element of each pair, widened.
inline Floats even(Ints pairs) { return (Floats)(pairs << 16); }
inline Floats odd(Ints pairs) { return (Floats)(pairs & static_cast<int32_t>(0xffff0000)); }

inline Ints load_pairs(const bf16* p) {
    Ints v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

#if defined(LLMB_BF16_DOTS)
// c + the products of the pairs in a and b; subnormal numbers count as zero.
inline Floats dot(Ints a, Ints b, Floats c) {
    return (Floats)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
}
#endif

// e^x for x up to 88, exactly 1 for zero and exactly 0 for x below -87.33; relative error below 2e-7 near zero, 2e-6 at
// -87. NaN becomes 0. One definition for all libraries with fused operations.
inline Floats exp(Floats x) {
    const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
    const Floats log2e = splat(1.44269504f);
    const Floats shifted = fma(x, log2e, magic);
    const Floats whole = shifted - magic;
    const Floats f = fma(x, log2e, -whole);
    Floats p = splat(1.326472716e-3f);
    for (float c : {9.671512838e-3f, 5.550733745e-2f, 2.402224208e-1f, 6.931469776e-1f, 1.0f}) p = fma(p, f, splat(c));
    const Floats low = splat(-87.33f);
#if defined(__AVX512F__)
    const __mmask16 counts = _mm512_cmp_ps_mask((__m512)x, (__m512)low, _CMP_GT_OQ);
    return (Floats)_mm512_maskz_scalef_ps(counts, (__m512)p, (__m512)whole);
#else
    const Floats scaled = p * (Floats)(((Bits)shifted - (Bits)magic + 127) << 23);
    return x > low ? scaled : Floats{};
#endif
}

// x, made opaque to the compiler. GCC reassociates integer sums: it computes all products first and, with only 16 registers,
// spills them.
LLMB_INLINE inline Ints pinned(Ints x) {
#if defined(__x86_64__) && !defined(__AVX512F__)
    asm("" : "+x"(x));
#endif
    return x;
}

}  // namespace llmb
