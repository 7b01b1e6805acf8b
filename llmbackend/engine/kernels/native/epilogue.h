// What happens to the sums of one panel of a linear layer: bias, activation, product, residual sum, and the store.
//
// For: the float32 and the tile kernels. Does not know: how sums come about. Invariant: an element's operations depend on
// its own sums alone; nothing is written past the last column or row.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "numbers.h"
#include "pack.h"
#include "step.h"

namespace llmb {

constexpr int kPanelVectors = kPanel / kLanes;

// x / (1 + e^-x)
inline Floats silu(Floats x) { return x / (splat(1.0f) + exp(min(-x, splat(88.0f)))); }

// The tanh form, written with e^x: 0.5 x (1 + tanh u) = x / (1 + e^-2u).
inline Floats gelu(Floats x) {
    const Floats u = x * 0.7978845608f * fma(x * x, splat(0.044715f), splat(1.0f));
    return x / (splat(1.0f) + exp(min(u * -2.0f, splat(88.0f))));
}

// One row of one panel.
struct PanelRow {
    Floats v[kPanelVectors];
};

inline PanelRow panel_row(const float* sums, const float* bias) {
    PanelRow row;
    for (int v = 0; v < kPanelVectors; v++) row.v[v] = load(sums + v * kLanes) + load(bias + v * kLanes);
    return row;
}

inline PanelRow combine(Epilogue epilogue, PanelRow row, const PanelRow& other) {
    for (int v = 0; v < kPanelVectors; v++)
        row.v[v] = (epilogue == Epilogue::kSiluMul ? silu(row.v[v]) : gelu(row.v[v])) * other.v[v];
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

// Brings one row's part of y near, to be added to or written when the sums are done.
inline void fetch_y(const LinearOp& op, int row, int column) {
    const int size = op.y_type == Type::kFloat32 ? 4 : 2;
    char* at = static_cast<char*>(op.y) + (static_cast<int64_t>(row) * op.y_stride + column) * size;
    for (int byte = 0; byte < kPanel * size; byte += 64) __builtin_prefetch(at + byte, 1, 3);
}

inline void copy_bias(const float* bias, int columns, float* to) {
    std::fill(to, to + kPanel, 0.0f);
    if (bias) std::copy(bias, bias + columns, to);
}

// sums [rows][32] of panel `panel`, and sums2 of the second weight where there is one; first_row is the first one's
// place in y.
inline void finish_panel(const LinearOp& op, int panel, int first_row, int rows, const float* sums,
                         const float* sums2) {
    const int first = panel * kPanel;
    const int columns = std::min(op.n - first, kPanel);
    alignas(64) float bias[kPanel], bias2[kPanel];
    copy_bias(op.bias ? op.bias + first : nullptr, columns, bias);
    copy_bias(op.bias2 ? op.bias2 + first : nullptr, columns, bias2);
    const bool two = op.epilogue == Epilogue::kSiluMul || op.epilogue == Epilogue::kGeluMul;
    for (int r = 0; r < rows; r++) {
        PanelRow row = panel_row(sums + r * kPanel, bias);
        if (two) row = combine(op.epilogue, row, panel_row(sums2 + r * kPanel, bias2));
        const int64_t at = static_cast<int64_t>(first_row + r) * op.y_stride + first;
        if (op.epilogue == Epilogue::kAdd)
            add_row(static_cast<float*>(op.y) + at, columns, op.factor, row);
        else if (op.y_type == Type::kFloat32)
            store_row(static_cast<float*>(op.y) + at, columns, row);
        else
            store_row(static_cast<bf16*>(op.y) + at, columns, row);
    }
}

}  // namespace llmb
