// 4-bit weights in groups of 32 along k: their layout, and rounding to it.
//
// Used by pack.h and linear_int4.h. Invariant: numbers and scales are the same on every instruction set.
//
// The 16 steps of a group range from its smallest element to its largest (kInt4Min), or from the element with the
// largest magnitude, which becomes -8, through zero (kInt4). The other elements are rounded to the nearest step.
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

constexpr int kGroup = 32;                                   // k
constexpr int kZero = 8;                                     // the number that represents 0
constexpr int kGroupBytes = int8::kColumns * kGroup / 2;     // per panel

inline int num_groups(int k) { return int8::padded_k(k) / kGroup; }

// One group of one column: w = scale * (number - zero) or, for kInt4Min, scale * number + min.
struct Group {
    uint8_t numbers[kGroup];  // beyond the group's elements, the number nearest to 0
    uint16_t scale;           // float16
    uint16_t min = 0;
};

template <class W>
Group round_group(const W* weights, int count, bool has_min) {
    float smallest = 0, largest = 0, farthest = 0;
    for (int i = 0; i < count; i++) {
        const float w = to_float(weights[i]);
        smallest = i == 0 ? w : std::min(smallest, w);
        largest = i == 0 ? w : std::max(largest, w);
        if (std::fabs(w) > std::fabs(farthest)) farthest = w;
    }
    Group group;
    group.scale = to_float16(has_min ? (largest - smallest) / 15.0f : farthest / -kZero);
    if (has_min) group.min = to_float16(smallest);
    const float scale = to_float(group.scale), factor = scale == 0 ? 0.0f : 1.0f / scale;
    const float begin = to_float(group.min);
    for (int i = 0; i < kGroup; i++) {
        const float steps = ((i < count ? to_float(weights[i]) : 0.0f) - begin) * factor;
        group.numbers[i] = static_cast<uint8_t>(std::clamp(std::nearbyint(steps) + (has_min ? 0 : kZero), 0.0f, 15.0f));
    }
    return group;
}

// Stores the numbers of one group of one column in its panel: low nibbles contain the first quad of eight.
inline void put_group(const uint8_t* numbers, int column, uint8_t* group) {
    for (int i = 0; i < kGroup; i += 8)
        for (int byte = 0; byte < 4; byte++)
            group[(i / 8 * int8::kColumns + column) * 4 + byte] =
                static_cast<uint8_t>(numbers[i + byte] | numbers[i + 4 + byte] << 4);
}

// mins: null = without minima.
template <class W>
void pack_column(const W* weights, int k, int column, uint8_t* panel, uint16_t* scales, uint16_t* mins) {
    for (int i = 0; i < num_groups(k); i++) {
        const int begin = std::min(i * kGroup, k);
        const Group group = round_group(weights + begin, std::min(kGroup, k - begin), mins != nullptr);
        scales[i * int8::kColumns + column] = group.scale;
        if (mins) mins[i * int8::kColumns + column] = group.min;
        put_group(group.numbers, column, panel + static_cast<size_t>(i) * kGroupBytes);
    }
}

}  // namespace llmb::int4

namespace llmb {

// In panels as in step.h; mins: null for kInt4. The memory must be zeroed, which provides the scales and minima of the
// last panel's padding.
inline void pack_int4(Worker& worker, const void* weight, Type type, int n, int k, int64_t stride, void* packed,
                      uint16_t* scale, uint16_t* mins) {
    using namespace int4;
    const size_t groups = num_groups(k);
    worker.share((n + int8::kColumns - 1) / int8::kColumns, 1, [&](int begin, int end) {
        for (int column = begin * int8::kColumns; column < std::min(n, end * int8::kColumns); column++) {
            const size_t panel = column / int8::kColumns;
            uint8_t* to = static_cast<uint8_t*>(packed) + panel * groups * kGroupBytes;
            const size_t at = panel * groups * int8::kColumns;
            const auto pack = [&](const auto* weights) {
                pack_column(weights + column * stride, k, column % int8::kColumns, to, scale + at, mins ? mins + at : nullptr);
            };
            if (type == Type::kFloat32) pack(static_cast<const float*>(weight));
            else pack(static_cast<const bf16*>(weight));
        }
    });
}

}  // namespace llmb
