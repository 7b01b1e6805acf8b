// The epilogue of one panel of a linear layer: bias, activation, product, residual sum, and the store.
//
// Used by the linear kernels. Invariant: an element's operations depend only on its own sums; nothing is written past
// the last column or row.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "lora.h"
#include "numbers.h"
#include "pack.h"
#include "step.h"
#include "tile_rows.h"

namespace llmb {

constexpr int kPanelVectors = kPanel / kLanes;

// x / (1 + e^-x)
inline Floats silu(Floats x) { return x / (splat(1.0f) + exp(min(-x, splat(88.0f)))); }

// The tanh form, written with e^x: 0.5 x (1 + tanh u) = x / (1 + e^-2u).
inline Floats gelu(Floats x) {
    const Floats u = x * 0.7978845608f * fma(x * x, splat(0.044715f), splat(1.0f));
    return x / (splat(1.0f) + exp(min(u * -2.0f, splat(88.0f))));
}

// 1 / (1 + e^-x)
inline Floats sigmoid(Floats x) { return splat(1.0f) / (splat(1.0f) + exp(min(-x, splat(88.0f)))); }

// gpt-oss's activation.
inline Floats bounded_swiglu(Floats gate, Floats up) {
    const Floats most = splat(7.0f), a = min(most, gate), b = max(-most, min(most, up));  // NaNs are preserved
    return a * sigmoid(a * 1.702f) * (b + 1.0f);
}

inline bool is_gated(Epilogue epilogue) { return epilogue >= Epilogue::kSiluMul; }

// One row of one panel.
struct PanelRow {
    Floats v[kPanelVectors];
};

inline PanelRow combine(const LinearOp& op, PanelRow row, const PanelRow& other) {
    for (int v = 0; v < kPanelVectors; v++) {
        const Floats gate = row.v[v] * op.factor;
        if (op.epilogue == Epilogue::kSwigluOai) row.v[v] = bounded_swiglu(gate, other.v[v]);
        else row.v[v] = (op.epilogue == Epilogue::kSiluMul ? silu(gate) : gelu(gate)) * other.v[v];
    }
    return row;
}

inline Floats activated(Activation activation, Floats x) {
    const Floats positive = max(x, Floats{});
    return activation == Activation::kGelu ? gelu(x) : positive * positive;
}

inline PanelRow activated(Activation activation, PanelRow row) {
    if (activation == Activation::kNone) return row;
    for (Floats& v : row.v) v = activated(activation, v);
    return row;
}

template <class T>
void store_row(T* y, int columns, const PanelRow& row) {
    alignas(64) T narrow[kPanel];
    T* to = columns == kPanel ? y : narrow;
    for (int v = 0; v < kPanelVectors; v++) store(to + v * kLanes, row.v[v]);
    if (columns < kPanel) std::copy(narrow, narrow + columns, y);
}

inline void add_row(float* y, int columns, float factor, PanelRow row) {
    alignas(64) float narrow[kPanel] = {};
    if (columns < kPanel) std::copy(y, y + columns, narrow);
    const float* old = columns == kPanel ? y : narrow;
    for (int v = 0; v < kPanelVectors; v++) row.v[v] = fma(row.v[v], splat(factor), load(old + v * kLanes));
    store_row(y, columns, row);
}

// Writes or adds a row's activated outputs for one panel. Tiles are filled up to their last column with the zeros of
// the panel's padding.
inline void write_panel_row(const LinearOp& op, int row, int panel, const PanelRow& sums) {
    const PanelRow result = activated(op.activation, sums);
    const int column = panel * kPanel, columns = std::min(op.n - column, kPanel);
    const size_t at = static_cast<size_t>(row) * op.y_stride + column;
    if (op.epilogue == Epilogue::kAdd) add_row(static_cast<float*>(op.y) + at, columns, op.factor, result);
    else if (op.y_type == Type::kFloat32) store_row(static_cast<float*>(op.y) + at, columns, result);
    else if (op.y_type == Type::kBfloat16) store_row(static_cast<bf16*>(op.y) + at, columns, result);
    else store_row(TileRow<bf16>(static_cast<bf16*>(op.y), row, op.y_stride) + column, kPanel, result);
}


// Prefetches a row's part of y, which is added to or written when the sums are done.
inline void fetch_y(const LinearOp& op, int row, int panel) {
    if (op.y_type == Type::kBfloat16Tiles) return;
    const int size = op.y_type == Type::kFloat32 ? 4 : 2;
    char* at = static_cast<char*>(op.y) + (static_cast<int64_t>(row) * op.y_stride + panel * kPanel) * size;
    for (int byte = 0; byte < kPanel * size; byte += 64) __builtin_prefetch(at + byte, 1, 3);
}

// The parameters of one weight's columns in one panel, zero beyond n; for weights without scales, the bias.
struct FloatColumns {
    alignas(64) float bias[kPanel] = {};

    FloatColumns() = default;
    FloatColumns(const LinearOp& op, bool second, int panel) {
        const int first = panel * kPanel;
        const float* all = second ? op.bias2 : op.bias;
        if (all) std::copy(all + first, all + std::min(op.n, first + kPanel), bias);
    }

    // sums_of returns the address of the sums from a column on.
    template <class Sums>
    PanelRow result(Sums&& sums_of) const {
        PanelRow row;
        for (int v = 0; v < kPanelVectors; v++) row.v[v] = load(sums_of(v * kLanes)) + load(bias + v * kLanes);
        return row;
    }
};

// sums [rows][32] of panel `panel`, and sums2 of the second weight if there is one; first_row is the index in y of the
// first row.
inline void finish_panel(const LinearOp& op, int panel, int first_row, int rows, const float* sums,
                         const float* sums2) {
    const bool two = is_gated(op.epilogue);
    const FloatColumns columns(op, false, panel), columns2(op, two, panel);
    for (int block = 0; block < rows; block += kLoraBlock) {
        const int end = std::min(block + kLoraBlock, rows);
        const LoraRows added(op, false, panel, first_row + block, end - block);
        const LoraRows added2(op, true, panel, first_row + block, two ? end - block : 0);
        for (int r = block; r < end; r++) {
            PanelRow row = columns.result([&](int column) { return sums + r * kPanel + column; });
            added.add(r - block, row.v);
            if (two) {
                PanelRow row2 = columns2.result([&](int column) { return sums2 + r * kPanel + column; });
                added2.add(r - block, row2.v);
                row = combine(op, row, row2);
            }
            write_panel_row(op, first_row + r, panel, row);
        }
    }
}

}  // namespace llmb
