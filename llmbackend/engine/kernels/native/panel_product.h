// Rows times panels of a linear layer with quantised rows and float32 sums: the code shared by its kernels.
//
// Used by linear_int4.h and linear_ggml.h. Invariant: an element's operations depend only on its own sums, whatever the
// division into blocks, chunks and tasks.
#pragma once

#include <algorithm>
#include <limits>

#include "epilogue.h"
#include "linear_piece.h"
#include "numbers.h"
#include "pack.h"
#include "step.h"
#include "team.h"

namespace llmb {

inline PanelRow scaled(const float* sums, float scale, const FloatColumns& columns) {
    PanelRow row;
    for (int v = 0; v < kPanelVectors; v++)
        row.v[v] = fma(load(sums + v * kLanes), splat(scale), load(columns.bias + v * kLanes));
    return row;
}

// Adds a row's wide elements (quantise_int8.h) to its sums of one panel, which are in registers meanwhile.
template <class Rows, class Add>
LLMB_INLINE inline void add_each_wide(const Rows& x, int row, float* sums, Add&& add) {
    const int count = x.num_wide[row];
    if (count == 0) return;
    PanelRow own;
    for (int v = 0; v < kPanelVectors; v++) own.v[v] = load(sums + v * kLanes);
    for (int i = 0; i < count; i++) add(x.wide_of(row)[i], own);
    for (int v = 0; v < kPanelVectors; v++) store(sums + v * kLanes, own.v[v]);
}

// Rows first..last-1 times one panel, in blocks of nearly equal height. multiply(row, rows, second, sums): computes the
// sums [rows][kPanel] of a block, of the second weight or the first. scales: of all rows.
template <int kMaxBlock, class Multiply>
void multiply_blocks(const LinearOp& op, int first, int last, int panel, const float* scales, Multiply&& multiply) {
    const int height = divide_up(last - first, divide_up(last - first, kMaxBlock));
    const bool two = is_gated(op.epilogue);
    const FloatColumns bias(op, false, panel), bias2(op, two, panel);
    for (int row = first; row < last; row += height) {
        const int rows = std::min(height, last - row);
        alignas(64) float sums[kMaxBlock][kPanel], sums2[kMaxBlock][kPanel];
        LoraRows added[divide_up(kMaxBlock, kLoraBlock)], added2[divide_up(kMaxBlock, kLoraBlock)];
        for (int begin = 0; begin < rows; begin += kLoraBlock) {
            const int count = std::min(kLoraBlock, rows - begin);
            added[begin / kLoraBlock].begin(op, false, panel, row + begin, count);
            added2[begin / kLoraBlock].begin(op, true, panel, row + begin, two ? count : 0);
        }
        multiply(row, rows, false, sums);
        if (two) multiply(row, rows, true, sums2);
        for (int r = 0; r < rows; r++) {
            PanelRow result = scaled(sums[r], scales[row + r], bias);
            added[r / kLoraBlock].add(r % kLoraBlock, result.v);
            if (two) {
                PanelRow other = scaled(sums2[r], scales[row + r], bias2);
                added2[r / kLoraBlock].add(r % kLoraBlock, other.v);
                result = combine(op, result, other);
            }
            write_panel_row(op, row + r, panel, result);
        }
    }
}

// The same, in blocks for vectors, and in larger blocks if there are enough rows: for tiles, or if kUnpacks for vectors that
// unpack the weights once per larger block, whose rows are then a multiple of kMaxBlock.
constexpr int kLargeBlock = 64;
template <int kMaxBlock>
constexpr int kFewestUnpacked = 3 * kMaxBlock;
template <int kMaxBlock, bool kUnpacks, class Multiply>
void multiply_rows(const LinearOp& op, int first, int last, int panel, const float* scales, Multiply&& multiply) {
#if defined(LLMB_HAS_TILES)
    static_assert(kMaxBlock < amx::kTileRows);
    constexpr int kFewest = amx::kTileRows, kMultiple = 1;
#else
    constexpr int kFewest = kUnpacks ? kFewestUnpacked<kMaxBlock> : std::numeric_limits<int>::max(), kMultiple = kMaxBlock;
#endif
    while (last - first >= kFewest) {
        const int rows = std::min(kLargeBlock, last - first) / kMultiple * kMultiple;
        multiply_blocks<kLargeBlock>(op, first, first + rows, panel, scales, multiply);
        first += rows;
    }
    if (first < last) multiply_blocks<kMaxBlock>(op, first, last, panel, scales, multiply);
}

// Calls run(first row, last row, panel) for all chunks of rows and all panels, in tasks shared by threads.
template <class Plan, class Run>
void share_panels(Worker& worker, const LinearOp& op, const Plan& plan, size_t panel_bytes, Run&& run) {
    const int count = num_panels(op.n);
    const int grain = panels::piece_panels(worker, plan.rows, count, panel_bytes);
    worker.share(count * plan.chunks, grain, [&](int begin, int end) {
        for (int i = begin; i < end; i++) {
            const int first = i / count * plan.chunk_rows;
            run(first, std::min(first + plan.chunk_rows, plan.rows), i % count);
        }
    });
}

}  // namespace llmb
