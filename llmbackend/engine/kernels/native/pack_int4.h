// 4-bit weights in groups of 32 along k: their layout, and rounding to it.
//
// Used by pack.h and linear_int4.h. Invariant: numbers and scales are the same on every instruction set.
//
// kInt4: the 16 steps of a group range from the element with the largest magnitude, which becomes -8, through zero.
// kInt4Min: the best of several grids of 16 steps: the one from the smallest element to the largest, and least-squares
// fits that begin with grids of 1 to 0.7 times its width. The best one has the smallest sum of squared errors, each
// weighted by the element's magnitude plus the root mean square of the group. A group that is such a grid is stored
// exactly. Elements are rounded to the nearest step.
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

// scale and min are float16 numbers.
struct Grid {
    float scale, min;
};

// Sums over a group in eight lanes, in the same order on every instruction set.
struct LaneSum {
    static constexpr int kSums = 8;
    float lanes[kSums] = {};
    float total() const {
        return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
    }
};

// Calls work(i, lane of i) for a group's elements, in loops that compilers turn into vectors.
template <class Work>
LLMB_INLINE inline void each_in_lanes(Work&& work) {
    for (int begin = 0; begin < kGroup; begin += LaneSum::kSums)
        for (int lane = 0; lane < LaneSum::kSums; lane++) work(begin + lane, lane);
}

// Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, ties to even.
inline float nearest(float x) { return x + 12582912.0f - 12582912.0f; }

struct GroupFit {
    float weights[kGroup] = {};
    float importance[kGroup] = {};  // 0 beyond count

    template <class W>
    GroupFit(const W* source, int count) {
        LaneSum squares;
        for (int i = 0; i < count; i++) weights[i] = to_float(source[i]);
        each_in_lanes([&](int i, int lane) LLMB_INLINE { squares.lanes[lane] += weights[i] * weights[i]; });
        const float typical = std::sqrt(squares.total() / static_cast<float>(std::max(count, 1)));
        for (int i = 0; i < count; i++) importance[i] = std::fabs(weights[i]) + typical;
    }

    void round(const Grid& grid, float* numbers) const {
        const float factor = grid.scale == 0 ? 0.0f : 1.0f / grid.scale;
        for (int i = 0; i < kGroup; i++)
            numbers[i] = nearest(std::min(std::max(0.0f, (weights[i] - grid.min) * factor), 15.0f));
    }

    float error(const Grid& grid, const float* numbers) const {
        LaneSum sum;
        each_in_lanes([&](int i, int lane) LLMB_INLINE {
            const float difference = grid.scale * numbers[i] + grid.min - weights[i];
            sum.lanes[lane] += importance[i] * difference * difference;
        });
        return sum.total();
    }

    // Least squares for given numbers. Returns `grid` if they are all the same.
    Grid fit(const Grid& grid, const float* numbers) const {
        LaneSum one, q, qq, x, qx;
        each_in_lanes([&](int i, int lane) LLMB_INLINE {
            const float weighted = importance[i] * numbers[i];
            one.lanes[lane] += importance[i];
            q.lanes[lane] += weighted;
            qq.lanes[lane] += weighted * numbers[i];
            x.lanes[lane] += importance[i] * weights[i];
            qx.lanes[lane] += weighted * weights[i];
        });
        const float determinant = one.total() * qq.total() - q.total() * q.total();
        if (!(determinant > 0)) return grid;
        const float scale = (one.total() * qx.total() - q.total() * x.total()) / determinant;
        return {scale, (x.total() - scale * q.total()) / one.total()};
    }
};

inline Grid in_float16(const Grid& grid) { return {to_float(to_float16(grid.scale)), to_float(to_float16(grid.min))}; }

inline Grid best_grid(const GroupFit& group, float smallest, float largest, float* numbers) {
    constexpr float kWidths[] = {1.0f, 0.9f, 0.8f, 0.7f};
    const float middle = 0.5f * smallest + 0.5f * largest, half = 0.5f * largest - 0.5f * smallest;
    Grid best = in_float16({(largest - smallest) / 15.0f, smallest});
    group.round(best, numbers);
    float least = group.error(best, numbers);
    for (const float width : kWidths) {
        float tried[kGroup];
        const Grid narrow{half * width * (2.0f / 15.0f), middle - half * width};
        group.round(narrow, tried);
        const Grid fitted = in_float16(group.fit(narrow, tried));
        group.round(fitted, tried);
        const float error = group.error(fitted, tried);
        if (!(error < least)) continue;
        least = error;
        best = fitted;
        std::copy_n(tried, kGroup, numbers);
    }
    return best;
}

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
    if (has_min) {
        float numbers[kGroup];
        const Grid grid = best_grid(GroupFit(weights, count), smallest, largest, numbers);
        group.scale = to_float16(grid.scale);
        group.min = to_float16(grid.min);
        for (int i = 0; i < kGroup; i++) group.numbers[i] = static_cast<uint8_t>(numbers[i]);
        return group;
    }
    group.scale = to_float16(farthest / -kZero);
    const float scale = to_float(group.scale), factor = scale == 0 ? 0.0f : 1.0f / scale;
    for (int i = 0; i < kGroup; i++) {
        const float steps = (i < count ? to_float(weights[i]) : 0.0f) * factor;
        group.numbers[i] = static_cast<uint8_t>(std::clamp(std::nearbyint(steps) + kZero, 0.0f, 15.0f));
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
