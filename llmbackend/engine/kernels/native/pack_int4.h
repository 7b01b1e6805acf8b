// Weights of 4 bits in groups of 32 along k: their layout, and rounding to it.
//
// For: pack.h, linear_int4.h. Does not know: products. Invariant: numbers and scales are the same on every instruction
// set.
//
// Of a group, the element with the largest magnitude becomes -8, so its sign is the scale's; the others are rounded to the
// nearest of 16 steps. (Q4_0 of GGUF files is rounded so.)
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "float16.h"
#include "numbers.h"
#include "quantise_int8.h"
#include "step.h"
#include "team.h"

namespace llmb::int4 {

constexpr int kGroup = 32;                                   // of k
constexpr int kZero = 8;                                     // the number that stands for 0
constexpr int kGroupBytes = int8::kColumns * kGroup / 2;     // of a panel

inline int num_groups(int k) { return int8::padded_k(k) / kGroup; }

// One group of one column: its numbers, and its scale as float16. Beyond `count` elements, and where the scale is zero, a
// number stands for 0.
template <class W>
uint16_t round_group(const W* weights, int count, uint8_t* numbers) {
    float largest = 0;
    for (int i = 0; i < count; i++)
        if (std::fabs(to_float(weights[i])) > std::fabs(largest)) largest = to_float(weights[i]);
    const uint16_t stored = to_float16(largest / -kZero);
    const float scale = to_float(stored);
    const float factor = scale == 0 ? 0.0f : 1.0f / scale;
    for (int i = 0; i < kGroup; i++) {
        const float value = i < count ? to_float(weights[i]) * factor : 0.0f;
        numbers[i] = static_cast<uint8_t>(std::clamp(std::nearbyint(value) + kZero, 0.0f, 15.0f));
    }
    return stored;
}

// Puts the numbers of one group of one column into its panel: low halves of bytes have the first quad of eight.
inline void put_group(const uint8_t* numbers, int column, uint8_t* group) {
    for (int i = 0; i < kGroup; i += 8)
        for (int byte = 0; byte < 4; byte++)
            group[(i / 8 * int8::kColumns + column) * 4 + byte] =
                static_cast<uint8_t>(numbers[i + byte] | numbers[i + 4 + byte] << 4);
}

template <class W>
void pack_column(const W* weights, int k, int column, uint8_t* panel, uint16_t* scales) {
    for (int group = 0; group < num_groups(k); group++) {
        uint8_t numbers[kGroup];
        const int begin = std::min(group * kGroup, k);
        scales[group * int8::kColumns + column] = round_group(weights + begin, std::min(kGroup, k - begin), numbers);
        put_group(numbers, column, panel + static_cast<size_t>(group) * kGroupBytes);
    }
}

}  // namespace llmb::int4

namespace llmb {

// In panels as step.h describes them. The memory is zero: the columns that fill up the last panel have scales of zero.
inline void pack_int4(Worker& worker, const void* weight, Type type, int n, int k, int64_t stride, void* packed,
                      uint16_t* scale) {
    using namespace int4;
    const size_t groups = num_groups(k);
    worker.share((n + int8::kColumns - 1) / int8::kColumns, 1, [&](int begin, int end) {
        for (int column = begin * int8::kColumns; column < std::min(n, end * int8::kColumns); column++) {
            const size_t panel = column / int8::kColumns;
            uint8_t* to = static_cast<uint8_t*>(packed) + panel * groups * kGroupBytes;
            uint16_t* scales = scale + panel * groups * int8::kColumns;
            if (type == Type::kFloat32)
                pack_column(static_cast<const float*>(weight) + column * stride, k, column % int8::kColumns, to, scales);
            else
                pack_column(static_cast<const bf16*>(weight) + column * stride, k, column % int8::kColumns, to, scales);
        }
    });
}

}  // namespace llmb
