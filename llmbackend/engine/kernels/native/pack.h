// Packs weights into panels of 32 output columns, the layout that the linear layer's kernels stream (see LinearOp).
//
// Used when a model is loaded, once per weight. Invariant: every element of the packed memory is written, the padding
// with zeros; a weight that fits the packed type is stored exactly, others are rounded to nearest.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "numbers.h"
#include "pack_int4.h"
#include "quantise_int8.h"
#include "step.h"
#include "team.h"

namespace llmb {

constexpr int kPanel = 32;   // columns
constexpr int kPairPad = 32;  // bfloat16 panels have a multiple of this many k

constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }
inline int num_panels(int n) { return divide_up(n, kPanel); }
inline int padded_k(int k, int multiple) { return (k + multiple - 1) / multiple * multiple; }

// Elements per panel.
inline size_t panel_size(const float*, int k) { return static_cast<size_t>(k) * kPanel; }
inline size_t panel_size(const bf16*, int k) { return static_cast<size_t>(padded_k(k, kPairPad)) * kPanel; }

// Index of element (k, column) in its panel.
inline size_t panel_index(const float*, int k, int column) { return static_cast<size_t>(k) * kPanel + column; }
inline size_t panel_index(const bf16*, int k, int column) {
    return (static_cast<size_t>(k / 2) * kPanel + column) * 2 + k % 2;
}

// One panel from `columns` rows of the weight, in steps of a few k, so that what is read and written stays in the L1
// cache.
template <class From, class To>
void pack_panel(const From* weight, int64_t stride, int columns, int k, To* panel) {
    constexpr int kStep = 32;
    const int k_end = static_cast<int>(panel_size(panel, k) / kPanel);
    for (int begin = 0; begin < k_end; begin += kStep) {
        const int end = std::min(begin + kStep, k_end);
        for (int column = 0; column < kPanel; column++) {
            const From* row = weight + column * stride;
            const int have = column < columns ? std::clamp(k, begin, end) : begin;
            for (int i = begin; i < have; i++) set(panel[panel_index(panel, i, column)], to_float(row[i]));
            for (int i = have; i < end; i++) set(panel[panel_index(panel, i, column)], 0.0f);
        }
    }
}

// The same without conversion: adjacent pairs in a row stay pairs, so a panel is a transposed matrix of pairs.
inline void pack_panel(const bf16* weight, int64_t stride, int columns, int k, bf16* panel) {
    constexpr int kStep = 16;  // pairs
    const int pairs = k / 2, pairs_end = padded_k(k, kPairPad) / 2;
    for (int begin = 0; begin < pairs_end; begin += kStep) {
        for (int column = 0; column < kPanel; column++) {
            uint32_t step[kStep] = {};
            if (column < columns) {
                const bf16* row = weight + column * stride + 2 * begin;
                if (begin + kStep <= pairs) {
                    std::memcpy(step, row, sizeof step);
                } else if (2 * begin < k) {
                    std::memcpy(step, row, (k - 2 * begin) * sizeof(bf16));
                }
            }
            bf16* to = panel + (static_cast<size_t>(begin) * kPanel + column) * 2;
            for (int pair = 0; pair < kStep; pair++) std::memcpy(to + pair * kPanel * 2, &step[pair], sizeof step[pair]);
        }
    }
}

template <class From, class To>
void pack_panels(Worker& worker, const From* weight, int n, int k, int64_t stride, To* packed) {
    worker.share(num_panels(n), 1, [&](int begin, int end) {
        for (int panel = begin; panel < end; panel++) {
            const int columns = std::min(n - panel * kPanel, kPanel);
            pack_panel(weight + static_cast<int64_t>(panel) * kPanel * stride, stride, columns, k,
                       packed + panel * panel_size(packed, k));
        }
    });
}

template <class From>
void pack_from(Worker& worker, const From* weight, int n, int k, int64_t stride, void* packed, Type packed_type) {
    if (packed_type == Type::kFloat32) pack_panels(worker, weight, n, k, stride, static_cast<float*>(packed));
    if (packed_type == Type::kBfloat16) pack_panels(worker, weight, n, k, stride, static_cast<bf16*>(packed));
}

// scale and sums: as in step.h.
inline void pack(Worker& worker, const void* weight, Type type, int n, int k, int64_t stride, void* packed,
                 Type packed_type, float* scale, int32_t* sums) {
    if (packed_type == Type::kInt8) return pack_int8(worker, weight, type, n, k, stride, packed, scale, sums);
    if (packed_type == Type::kInt4 || packed_type == Type::kInt4Min)
        return pack_int4(worker, weight, type, n, k, stride, packed, reinterpret_cast<uint16_t*>(scale),
                         packed_type == Type::kInt4 ? nullptr : reinterpret_cast<uint16_t*>(sums));
    if (type == Type::kFloat32)
        return pack_from(worker, static_cast<const float*>(weight), n, k, stride, packed, packed_type);
    pack_from(worker, static_cast<const bf16*>(weight), n, k, stride, packed, packed_type);
}

}  // namespace llmb
