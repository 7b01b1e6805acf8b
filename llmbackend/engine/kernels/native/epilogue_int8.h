// From the integer sums of an int8 linear layer to float32.
//
// Used by the int8 linear kernels, before epilogue.h. Invariant: the float arithmetic is one fixed chain per element.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "epilogue.h"
#include "numbers.h"
#include "pack.h"
#include "quantise_int8.h"
#include "step.h"

namespace llmb::int8 {

constexpr int kQuadBytes = kPanel * 4;  // of a panel

// The parameters of one weight's columns in one panel, zero beyond n.
struct Columns {
    alignas(64) float scale[kPanel] = {};
    alignas(64) float bias[kPanel] = {};
    alignas(64) int32_t correction[kPanel] = {};  // the part of the sums caused by the offset of the stored x

    Columns() = default;
    Columns(const LinearOp& op, bool second, int panel, int offset) {
        const int first = panel * kPanel, count = std::min(op.n - first, kPanel);
        const float* all_bias = second ? op.bias2 : op.bias;
        std::memcpy(scale, (second ? op.scale2 : op.scale) + first, count * 4);
        if (all_bias) std::memcpy(bias, all_bias + first, count * 4);
        const int32_t* sums = (second ? op.sums2 : op.sums) + first;
        for (int i = 0; i < count; i++) correction[i] = offset * sums[i];
    }

    // x·Wᵀ + bias. sums_of returns the address of the sums from a column on.
    template <class Sums>
    PanelRow result(Sums&& sums_of, float x_scale) const {
        PanelRow row;
        for (int v = 0; v < kPanelVectors; v++) {
            const Ints whole = load_ints(sums_of(v * kLanes)) - load_ints(correction + v * kLanes);
            const Floats exact = __builtin_convertvector(whole, Floats);
            row.v[v] = fma(exact, load(scale + v * kLanes) * x_scale, load(bias + v * kLanes));
        }
        return row;
    }
};

// Adds the excess of a wide element over 127 to a row's sums of one panel.
template <class Sums>
inline void add_wide(const int8_t* panel, const Wide& wide, Sums&& sums_of) {
    const int8_t* quad = panel + static_cast<ptrdiff_t>(wide.k / 4) * kQuadBytes;
    const int left = 24 - wide.k % 4 * 8;  // shifts the weight's byte to the top of its 32 bits
    for (int v = 0; v < kPanelVectors; v++) {
        auto* sums = sums_of(v * kLanes);
        const Ints total = load_ints(sums) + ((load_ints(quad + v * kLanes * 4) << left) >> 24) * wide.rest;
        std::memcpy(sums, &total, sizeof total);
    }
}

}  // namespace llmb::int8
