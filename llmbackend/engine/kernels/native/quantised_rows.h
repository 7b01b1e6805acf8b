// Rows of activations as int8 integers with one scale each (quantise_int8.h), in the order that a kernel reads.
//
// Used by the int8 linear layers. Invariants: a row depends only on that row of x; its integers are the same in every
// order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "memory.h"
#include "numbers.h"
#include "quantise_int8.h"
#include "quantise_tiles.h"
#include "step.h"
#include "tile_rows.h"

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(LLMB_EMULATE_AVX_VNNI)
#define LLMB_HAS_VNNI 1
#endif

namespace llmb::int8 {

// q + kUnsignedOffset as bytes, for instructions whose first factor is unsigned.
constexpr int kUnsignedOffset = 128;
inline void store_quantised(uint8_t* p, Ints q) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)(q + kUnsignedOffset)));
#elif defined(__AVX2__)
    const __m256i words = _mm256_packs_epi32((__m256i)(q + kUnsignedOffset), _mm256_setzero_si256());
    const __m256i bytes = _mm256_packus_epi16(words, _mm256_setzero_si256());
    const int32_t low = _mm256_extract_epi32(bytes, 0), high = _mm256_extract_epi32(bytes, 4);
    std::memcpy(p, &low, 4);
    std::memcpy(p + 4, &high, 4);
#else
    for (int i = 0; i < kLanes; i++) p[i] = static_cast<uint8_t>(q[i] + kUnsignedOffset);
#endif
}

inline void store_quantised(int8_t* p, Ints q) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)q));
#else
    for (int i = 0; i < kLanes; i++) p[i] = static_cast<int8_t>(q[i]);
#endif
}

// Quads in the order 0 2 1 3, to match the even and odd bytes of the weights in pairs.
inline void store_quantised(int16_t* p, Ints q) {
    constexpr int kOrder[4] = {0, 2, 1, 3};
    for (int i = 0; i < kLanes; i++) p[(i & ~3) + kOrder[i & 3]] = static_cast<int16_t>(q[i]);
}

// The order for the kernels on vectors: row by row. The stride is an odd number of cache lines, so that a block of rows
// is spread over all cache sets.
struct VectorOrder {
#if defined(LLMB_HAS_VNNI)
    using Stored = uint8_t;
#else
    using Stored = int16_t;
#endif
    static size_t stride_of(int k) { return (padded_k(k) * sizeof(Stored) / 64 | 1) * 64 / sizeof(Stored); }
    static int padded_rows(int rows) { return rows + kRowsRead; }
    static Stored* row(Stored* data, int row, size_t stride) { return data + row * stride; }
};

struct TileOrder {
    using Stored = uint8_t;
    static size_t stride_of(int k) { return padded_k(k); }
    static int padded_rows(int rows) { return (rows + amx::kTileRows - 1) / amx::kTileRows * amx::kTileRows; }
    static TileRow<Stored> row(Stored* data, int row, size_t stride) { return {data, row, static_cast<int>(stride)}; }
};

template <class Order>
struct QuantisedRows {
    using Stored = typename Order::Stored;
    Stored* data;
    float* scale;
    int32_t* num_wide;
    Wide* wide;  // [rows][most_wide]
    size_t stride;
    int most_wide;
    float narrow;  // kNarrow or kNarrowFine

    QuantisedRows(Carver& memory, int rows, int k, float narrow = kNarrow)
        : stride(Order::stride_of(k)), most_wide(k / kWideEvery), narrow(narrow) {
        data = memory.take<Stored>(Order::padded_rows(rows) * stride);
        scale = memory.take<float>(rows);
        num_wide = memory.take<int32_t>(rows);
        wide = memory.take<Wide>(static_cast<size_t>(rows) * most_wide);
    }

    static size_t bytes(int rows, int k) {
        Carver counted(nullptr);
        const QuantisedRows taken(counted, rows, k);
        return counted.used();
    }

    const Wide* wide_of(int row) const { return wide + static_cast<size_t>(row) * most_wide; }

    void fill(const LinearOp& op, int row) {
        const size_t at = static_cast<size_t>(row) * op.x_stride;
        if (op.x_type == Type::kFloat32) fill(row, static_cast<const float*>(op.x) + at, op.k);
        else if (op.x_type == Type::kBfloat16) fill(row, static_cast<const bf16*>(op.x) + at, op.k);
        else fill(row, TileRow<const bf16>(static_cast<const bf16*>(op.x), row, op.x_stride), op.k);
    }

    // Adds the excess of wide elements over 127 to the sums of their groups of this many k.
    void add_rests(int row, int group, int32_t* sums) const {
        for (int i = 0; i < num_wide[row]; i++) sums[wide_of(row)[i].k / group] += wide_of(row)[i].rest;
    }

  private:
#if defined(__AVX512F__)
    template <class X>
    static constexpr bool kByLine = std::is_same_v<X, TileRow<const bf16>> && std::is_same_v<Order, TileOrder>;
#else
    template <class X>
    static constexpr bool kByLine = false;
#endif

    template <class X>
    void fill(int row, X x, int k) {
        const Magnitudes magnitude = magnitudes(x, k);
        float limit = narrow_limit(magnitude, narrow);
        while (limit < magnitude.largest && !fill_wide(row, x, k, limit)) limit *= 1.5f;
        if (!(limit < magnitude.largest)) fill_narrow(row, x, k, magnitude.largest);
    }

    template <class X>
    void fill_narrow(int row, X x, int k, float limit) {
        const Scale chosen(limit);
        scale[row] = chosen.scale;
        num_wide[row] = 0;
        const auto out = Order::row(data, row, stride);
        if constexpr (kByLine<X>) LineQuantiser(x, out, chosen.factor).narrow(k);
        else quantise_row(x, k, chosen.factor, [&](int i, Ints q) { store_quantised(out + i, q); });
    }

    // False = too many elements are beyond the limit.
    template <class X>
    bool fill_wide(int row, X x, int k, float limit) {
        const Scale chosen(limit);
        scale[row] = chosen.scale;
        const auto out = Order::row(data, row, stride);
        Wide* own = wide + static_cast<size_t>(row) * most_wide;
        if constexpr (kByLine<X>) num_wide[row] = LineQuantiser(x, out, chosen.factor).with_wide(k, limit, own, most_wide);
        else num_wide[row] = quantise_with_wide(x, k, chosen.factor, out, own);
        return num_wide[row] <= most_wide;
    }

    // Returns how many elements are beyond the limit; `own` has space for most_wide.
    template <class X, class Out>
    int quantise_with_wide(X x, int k, float factor, Out out, Wide* own) const {
        int count = 0;
        quantise_row(x, k, factor, [&](int i, Ints q) {
            Ints most = q > 127 ? Ints{} + 127 : q;
            most = most < -127 ? Ints{} - 127 : most;
            store_quantised(out + i, most);
            const Ints rest = q - most;
            for (uint32_t lanes = not_zero(rest); lanes != 0; lanes &= lanes - 1) {
                const int lane = __builtin_ctz(lanes);
                if (count++ < most_wide) own[count - 1] = {i + lane, rest[lane]};
            }
        });
        return count;
    }
};

}  // namespace llmb::int8
