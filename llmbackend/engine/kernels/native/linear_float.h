// y = x·Wᵀ for float32 and bfloat16 weights: widened to float32, or by the CPU's dot products if x is bfloat16 too.
//
// Used by linear.h. Invariant: an output element is one chain over ascending k from zero, for any number of rows,
// threads, chunks or blocks: partial sums are stored and resumed as float32, which is exact.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "linear_block.h"
#include "linear_piece.h"
#include "numbers.h"
#include "pack.h"
#include "step.h"
#include "team.h"

namespace llmb::panels {

constexpr int kChunkRows = 132;  // rows of x at a time: with kOuterK of k, half of the L2 cache
constexpr int kInnerK = 448;     // k of a panel at a time, which then stays in the L1 cache for all rows

// Offset in a panel of `column` for an even k.
inline size_t column_offset(const float*, int column) { return column; }
inline size_t column_offset(const bf16*, int column) { return 2 * column; }

// One chunk of rows of x times a range of k of weights of type W.
template <class X, class W>
struct Chunk {
    using Weight = W;
    RowsOf<X> x;
    int rows;
    int k;

    // Whether weights are used only once while streaming, so that caching parts of them is useless.
    bool streams() const { return std::is_same_v<X, bf16> && rows <= kStreamRows; }
};

// sums (+)= all rows times k_begin..k_end of one panel, in blocks of nearly equal height. w: the panel at k_begin;
// next: the weights after these.
template <class X, class W>
void multiply_panel(const Chunk<X, W>& chunk, int k_begin, int k_end, const W* w, float* sums, const W* next) {
    constexpr int kColumnBlocks = kPanel / kBlockColumns;
    const int blocks = (chunk.rows + kBlockRows - 1) / kBlockRows;
    const int all_bytes = kPanel * 2 * static_cast<int>(sizeof(W));
    const int step_bytes = chunk.streams() ? 0 : all_bytes / (blocks * kColumnBlocks);
    const int part = part_of_k(k_end - k_begin, chunk.streams() ? k_end : kInnerK);
    for (int k = k_begin; k < k_end; k += part, w += part * kPanel) {
        const int inner = std::min(part, k_end - k);
        const char* target = reinterpret_cast<const char*>(k + part < k_end ? w + part * kPanel : next);
        for (int block = 0; block < blocks; block++) {
            const int begin = chunk.rows * block / blocks;
            const int end = chunk.rows * (block + 1) / blocks;
            const auto multiply = block_function<X, W>(end - begin);
            for (int column = 0; column < kPanel; column += kBlockColumns, target += inner / 2 * step_bytes)
                multiply(chunk.x.from(begin, k), w + column_offset(w, column), inner, sums + begin * kPanel + column,
                         k > 0, {target, step_bytes});
        }
    }
}

template <class W, class X>
void linear_rows(Worker& worker, const LinearOp& op, RowsOf<X> x, int rows, float* sums) {
    const int chunks = (rows + kChunkRows - 1) / kChunkRows;
    const int count = num_panels(op.n);
    const size_t panel_bytes = panel_size(static_cast<const W*>(nullptr), op.k) * sizeof(W);
    worker.share(count, piece_panels(worker, count, panel_bytes), [&](int begin, int end) {
        for (int chunk = 0; chunk < chunks; chunk++) {
            const int first = static_cast<int>(static_cast<int64_t>(rows) * chunk / chunks);
            const int last = static_cast<int>(static_cast<int64_t>(rows) * (chunk + 1) / chunks);
            linear_piece(op, Chunk<X, W>{x.from(first, 0), last - first, op.k}, first, begin, end, sums);
        }
    });
}

// Whether dot products of pairs compute it: depends only on types, never on the number of rows.
inline bool runs_on_dots([[maybe_unused]] const LinearOp& op) {
#if defined(LLMB_BF16_DOTS)
    return op.weight_type == Type::kBfloat16 && op.x_type == Type::kBfloat16;
#else
    return false;
#endif
}

// Otherwise a bfloat16 x is widened first, to rows of this many float32.
inline int64_t widened_stride(int k) { return padded_k(k, 16) + 16; }

inline size_t widened_bytes(const LinearOp& op, int rows) {
    return op.x_type == Type::kBfloat16 && !runs_on_dots(op) ? sizeof(float) * widened_stride(op.k) * rows : 0;
}

inline RowsOf<float> float_rows(Worker& worker, const LinearOp& op, int rows, char* scratch) {
    if (op.x_type == Type::kFloat32) return {static_cast<const float*>(op.x), op.x_stride};
    auto* wide = reinterpret_cast<float*>(scratch);
    const int64_t stride = widened_stride(op.k);
    worker.share(rows, 1, [&](int begin, int end) {
        for (int row = begin; row < end; row++) {
            const bf16* from = static_cast<const bf16*>(op.x) + static_cast<int64_t>(row) * op.x_stride;
            for (int i = 0; i < op.k; i++) wide[row * stride + i] = to_float(from[i]);
        }
    });
    worker.barrier();
    return {wide, stride};
}

inline size_t float_sums_bytes(int rows) { return sums_bytes(std::min(rows, kChunkRows)); }

inline size_t linear_float_scratch_bytes(const LinearOp& op, int rows, int num_threads) {
    return widened_bytes(op, rows) + num_threads * float_sums_bytes(rows);
}

inline void linear_float(Worker& worker, const LinearOp& op, int rows, char* scratch) {
    auto* sums = reinterpret_cast<float*>(scratch + widened_bytes(op, rows) + worker.rank * float_sums_bytes(rows));
#if defined(LLMB_BF16_DOTS)
    if (runs_on_dots(op))
        return linear_rows<bf16>(worker, op, RowsOf<bf16>{static_cast<const bf16*>(op.x), op.x_stride}, rows, sums);
#endif
    const RowsOf<float> x = float_rows(worker, op, rows, scratch);
    if (op.weight_type == Type::kFloat32) linear_rows<float>(worker, op, x, rows, sums);
    if (op.weight_type == Type::kBfloat16) linear_rows<bf16>(worker, op, x, rows, sums);
}

}  // namespace llmb::panels
