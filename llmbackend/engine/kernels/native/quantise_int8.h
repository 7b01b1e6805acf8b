// int8 quantisation: a row of weights or of activations becomes integers and one scale.
//
// Used for packing weights here, and for activations in linear_int8.h. Invariants: integers and scales are the same on
// every instruction set; a row with a NaN or an infinity gets the scale NaN.
//
// Weights: q = round(x * 127 / max|x|), ties to even. Activations: the same with a narrow limit in place of max|x|.
// Real models have rows with a few elements that are tens to thousands of times larger than the others ("massive
// activations", arXiv 2402.17762); a scale for those would round all others to zero. So the limit follows the typical
// magnitude, and an element beyond it keeps its whole integer in two parts: 127 among the int8, the rest in a list.
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

struct Magnitudes {
    float largest;  // one of these, if the row has an infinity or a NaN
    float mean;
    float typical;  // a mean that is robust against a few huge elements
};

// x: a pointer, or a row of tiles. Element i is added to sum i % 64, for every vector width. Of each two sums i and i +
// 32, the smaller one counts twice in the typical magnitude.
template <class X>
inline Magnitudes magnitudes(X x, int k) {
    constexpr int kSums = 64, kVectors = kSums / kLanes;
    Ints best[2] = {};
    Floats sums[kVectors] = {};
    // Compared as integers, magnitudes keep their order, and infinities and NaNs are the largest.
    auto take = [&](int j, Floats v) {
        const Ints magnitude = (Ints)v & 0x7fffffff;
        best[j % 2] = magnitude > best[j % 2] ? magnitude : best[j % 2];
        sums[j] += (Floats)magnitude;
    };
    int i = 0;
    for (; i + kSums <= k; i += kSums)
        for (int j = 0; j < kVectors; j++) take(j, load(x + (i + j * kLanes)));
    for (int j = 0; i < k; i += kLanes, j++) take(j, load_some(x + i, std::min(kLanes, k - i)));
    Floats smaller[kVectors / 2];
    for (int j = 0; j < kVectors / 2; j++) {
        smaller[j] = min(sums[j], sums[j + kVectors / 2]);
        sums[j] += sums[j + kVectors / 2];
    }
    for (int half = kVectors / 4; half > 0; half /= 2)
        for (int j = 0; j < half; j++) sums[j] += sums[j + half], smaller[j] += smaller[j + half];
    int32_t bits = 0;
    for (const Ints& b : best)
        for (int lane = 0; lane < kLanes; lane++) bits = std::max(bits, b[lane]);
    float largest;
    std::memcpy(&largest, &bits, 4);
    return {largest, sum(sums[0]) / static_cast<float>(k), sum(smaller[0]) * 2 / static_cast<float>(k)};
}

// A row's scale, and the factor that quantises it. All zeros (or subnormal): both zero. Not finite: NaN.
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

// The narrow limit in typical magnitudes; Gaussian rows stay below both. A lower one rounds finer but makes more
// elements wide. With 8-bit weights, whose own rounding is coarser, the higher one costs no significant accuracy.
constexpr float kNarrow = 12.0f;
constexpr float kNarrowFine = 7.0f;
constexpr int kWideEvery = 32;   // at most one element of this many is wide, which limits the cost

// The magnitude that becomes 127 in a row of activations. It is at least the mean, so a row's integers have a magnitude
// of at most 127 on average, and its products with weights add up to less than 2^31 for a k up to 130,000. No integer
// exceeds 127 * 2^15, because `quantise_row` rounds only below 2^22; for a k up to 2^15, the mean alone ensures that.
inline float narrow_limit(const Magnitudes& row, float narrow) {
    return std::min(std::max({row.typical * narrow, row.mean, row.largest / 32768.0f}), row.largest);
}

// The excess of an element over 127 or -127.
struct Wide {
    int32_t k;
    int32_t rest;
};

// Calls put(i, q) with the quantised vector of x[i..]; beyond k, q is zero.
template <class X, class Put>
inline void quantise_row(X x, int k, float factor, Put&& put) {
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
        const Scale chosen(magnitudes(w, k).largest);
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
            if (panel == n / kColumns)  // the last, partial panel
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
