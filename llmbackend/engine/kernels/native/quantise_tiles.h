// The int8 integers of a row of bfloat16 tiles, a cache line at a time, for CPUs with AVX-512.
//
// Used by quantised_rows.h. Invariant: computes what quantise_int8.h defines, bit by bit: even and odd elements are
// summed separately, which the order of sums there allows.
#pragma once

#include <bit>

#include "quantise_int8.h"

#if defined(__AVX512F__)

#include "numbers.h"
#include "tile_rows.h"

namespace llmb::int8 {

constexpr int kLine = 32;  // elements

struct EvenOdd {
    Floats even, odd;

    void add(EvenOdd other) { even += other.even, odd += other.odd; }
};

inline Magnitudes magnitudes(TileRow<const bf16> x, int k) {
    const Ints no_signs = Ints{} + 0x7fff7fff;
    __m512i largest = _mm512_setzero_si512();
    const auto magnitudes_at = [&](int i) {
        const Ints pairs = load_pairs(x + i) & no_signs;
        largest = _mm512_max_epu16(largest, (__m512i)pairs);
        return EvenOdd{even(pairs), odd(pairs)};
    };
    EvenOdd sums{}, other{};  // of every other line
    int i = 0;
    for (; i + kLine < k; i += 2 * kLine) sums.add(magnitudes_at(i)), other.add(magnitudes_at(i + kLine));
    if (i < k) sums.add(magnitudes_at(i));
    const __m512i upper = _mm512_and_si512(largest, _mm512_set1_epi32(-65536));
    const uint32_t bits = _mm512_reduce_max_epu32(_mm512_max_epu32(_mm512_slli_epi32(largest, 16), upper));
    float most;
    std::memcpy(&most, &bits, 4);
    const float total = sum(sums.even + other.even) + sum(sums.odd + other.odd);
    const float smaller = sum(min(sums.even, other.even)) + sum(min(sums.odd, other.odd));
    return {most, total / static_cast<float>(k), smaller * 2 / static_cast<float>(k)};
}

// A row's integers plus 128, from `x` to `out`.
class LineQuantiser {
  public:
    LineQuantiser(TileRow<const bf16> x, TileRow<uint8_t> out, float factor) : x_(x), out_(out), factor_(splat(factor)) {}

    void narrow(int k) const {
        int i = 0;
        for (; i < k; i += kLine) put(i, rounded(even(load_pairs(x_ + i))), rounded(odd(load_pairs(x_ + i))));
        if (i < padded_k(k)) put(i, Ints{}, Ints{});
    }

    // For a row with elements beyond `limit`. Their excess over 127 goes to `wide`, as far as it has space; returns
    // their number.
    int with_wide(int k, float limit, Wide* wide, int room) const {
        const __m512i most = _mm512_set1_epi16(static_cast<int16_t>(std::bit_cast<uint32_t>(limit) >> 16));
        const Ints no_signs = Ints{} + 0x7fff7fff;
        int i = 0, count = 0;
        for (; i < k; i += kLine) {
            const Ints pairs = load_pairs(x_ + i);
            Ints first = rounded(even(pairs)), second = rounded(odd(pairs));
            if (__builtin_expect(_mm512_cmpgt_epu16_mask((__m512i)(pairs & no_signs), most) != 0, false)) {
                first = bounded(first, i, wide, room, count);
                second = bounded(second, i + 1, wide, room, count);
            }
            put(i, first, second);
        }
        if (i < padded_k(k)) put(i, Ints{}, Ints{});
        return count;
    }

  private:
    // The integer in the low bits.
    Ints rounded(Floats x) const { return (Ints)(x * factor_ + splat(12582912.0f)); }

    // Even and odd elements of a line, by their lowest bytes.
    void put(int i, Ints first, Ints second) const {
        const Ints bytes = ((first & 0xff) | second << 8) ^ 0x8080;
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out_ + i), _mm512_cvtepi32_epi16((__m512i)bytes));
    }

    // Every other element from `first` on.
    static Ints bounded(Ints x, int first, Wide* wide, int room, int& count) {
        const Ints most = Ints{} + 127, q = x - (Ints)splat(12582912.0f);
        const Ints narrow = (Ints)_mm512_max_epi32(_mm512_min_epi32((__m512i)q, (__m512i)most), (__m512i)-most);
        for (uint32_t beyond = _mm512_cmpneq_epi32_mask((__m512i)q, (__m512i)narrow); beyond != 0; beyond &= beyond - 1) {
            const int lane = __builtin_ctz(beyond);
            if (count++ < room) wide[count - 1] = {first + 2 * lane, q[lane] - narrow[lane]};
        }
        return narrow;
    }

    TileRow<const bf16> x_;
    TileRow<uint8_t> out_;
    Floats factor_;
};

}  // namespace llmb::int8

#endif
