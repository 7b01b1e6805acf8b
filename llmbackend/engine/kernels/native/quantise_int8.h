// Symmetric int8: a row of numbers, of weights or of activations, becomes integers in -127..127 and one scale.
//
// For: packing weights here, activations in linear_int8.h. Does not know: products. Invariants: q = round(x *
// 127 / max|x|), ties to even, the same on every instruction set; a row with a NaN or an infinity gets the scale NaN.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "numbers.h"
#include "step.h"
#include "team.h"

namespace llmb {
namespace int8 {

constexpr int kColumns = 32;  // of a panel of packed weights

inline int padded_k(int k) { return (k + 63) / 64 * 64; }

// `count` (1..kLanes) numbers, the rest zero.
template <class X>
inline Floats load_some(const X* p, int count) {
    if (count == kLanes) return load(p);
    alignas(64) X some[kLanes] = {};
    std::memcpy(some, p, count * sizeof(X));
    return load(some);
}

// Compared as integers, magnitudes keep their order, and infinities and NaNs are the largest.
template <class X>
inline float largest_magnitude(const X* x, int k) {
    Ints best[4] = {};
    auto take = [&](Ints& b, Floats v) {
        const Ints magnitude = (Ints)v & 0x7fffffff;
        b = magnitude > b ? magnitude : b;
    };
    int i = 0;
    for (; i + 4 * kLanes <= k; i += 4 * kLanes)
        for (int j = 0; j < 4; j++) take(best[j], load(x + i + j * kLanes));
    for (; i < k; i += kLanes) take(best[0], load_some(x + i, std::min(kLanes, k - i)));
    int32_t bits = 0;
    for (const Ints& b : best)
        for (int lane = 0; lane < kLanes; lane++) bits = std::max(bits, b[lane]);
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    return magnitude;
}

// A row's scale, and the factor that quantises it. Nothing but zeros (or next to it): both zero. Not finite: a NaN.
struct Scale {
    float scale;
    float factor;

    explicit Scale(float magnitude) {
        const bool finite = magnitude <= 3.402823466e38f;
        const bool zero = magnitude < 1e-35f;
        scale = !finite ? __builtin_nanf("") : zero ? 0.0f : magnitude / 127.0f;
        factor = !finite || zero ? 0.0f : 127.0f / magnitude;
    }
};

// Calls put(i, q) with the quantised vector of x[i..]; beyond k, q is zero.
template <class X, class Put>
inline void quantise_row(const X* x, int k, float factor, Put&& put) {
    const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
    auto rounded = [&](Floats v) { return (Ints)(v * factor + magic) - (Ints)magic; };
    int i = 0;
    for (; i + kLanes <= k; i += kLanes) put(i, rounded(load(x + i)));
    if (i < k) put(i, rounded(load_some(x + i, k - i))), i += kLanes;
    for (const int end = padded_k(k); i < end; i += kLanes) put(i, Ints{});
}

}  // namespace int8

// Symmetric int8 per output channel, in panels as step.h describes them.
inline void pack_int8(Worker& worker, const void* weight, Type type, int n, int k, int64_t stride, void* packed,
                      float* scale, int32_t* sums) {
    using namespace int8;
    auto pack_column = [&](const auto* w, int column) {
        const Scale chosen(largest_magnitude(w, k));
        char* out = static_cast<char*>(packed) + static_cast<size_t>(column / kColumns) * kColumns * padded_k(k);
        int32_t total = 0;
        quantise_row(w, k, chosen.factor, [&](int i, Ints q) {
            for (int lane = 0; lane < kLanes; lane++) {
                const int8_t value = static_cast<int8_t>(q[lane]);
                out[((i + lane) / 4 * kColumns + column % kColumns) * 4 + (i + lane) % 4] = value;
                total += value;
            }
        });
        scale[column] = chosen.scale;
        sums[column] = total;
    };
    worker.share((n + kColumns - 1) / kColumns, 1, [&](int begin, int end) {
        for (int panel = begin; panel < end; panel++) {
            if (panel == n / kColumns)  // the last panel, not full
                std::memset(static_cast<char*>(packed) + static_cast<size_t>(panel) * kColumns * padded_k(k), 0,
                            static_cast<size_t>(kColumns) * padded_k(k));
            for (int column = panel * kColumns; column < std::min(n, (panel + 1) * kColumns); column++) {
                if (type == Type::kFloat32) pack_column(static_cast<const float*>(weight) + column * stride, column);
                else pack_column(static_cast<const bf16*>(weight) + column * stride, column);
            }
        }
    });
}

}  // namespace llmb
