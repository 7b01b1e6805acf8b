// y = x·Wᵀ for float32 and bfloat16 weights, with float32 fused multiply-adds.
//
// For: linear.h. Does not know: int8, tiles. Invariant: an output element is one chain of fma over k ascending from zero,
// whatever the number of rows, threads, chunks or blocks: partial sums are stored and resumed as float32, which is exact.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "epilogue.h"
#include "numbers.h"
#include "pack.h"
#include "step.h"
#include "team.h"

namespace llmb {

// A block of rows whose sums over k are held in registers: kBlockRows rows, kBlockVectors vectors of columns.
#if defined(__AVX512F__)
constexpr int kBlockRows = 12;
#else
constexpr int kBlockRows = 6;
#endif
constexpr int kBlockVectors = 2;
constexpr int kBlockColumns = kBlockVectors * kLanes;

constexpr int kChunkRows = 132;   // of x at a time, so that a block of x stays in the L2 cache
constexpr int kOuterK = 1024;     // likewise
constexpr int kInnerK = 256;      // of a panel at a time, so that it stays in the L1 cache while row after row needs it
constexpr int kPiecePanels = 16;  // at most in one piece of work

// Rows of x as the kernels read them.
struct RowsOfX {
    const float* data;
    int64_t stride;
};

// The weights of vector v of columns for k and k + 1.
inline void load_two(const float* w, int v, Floats& first, Floats& second) {
    first = load(w + v * kLanes);
    second = load(w + kPanel + v * kLanes);
}
inline void load_two(const bf16* w, int v, Floats& first, Floats& second) {
    const Ints pairs = load_pairs(w + 2 * v * kLanes);
    first = even(pairs);
    second = odd(pairs);
}

// Of a last k without a partner.
inline Floats load_one(const float* w, int v) { return load(w + v * kLanes); }
inline Floats load_one(const bf16* w, int v) { return even(load_pairs(w + 2 * v * kLanes)); }

// sums[r][column] (+)= over k of x[r][k] * w[k][column], for R rows and kBlockColumns columns.
template <class W, int R>
void multiply_block(RowsOfX x, const W* w, int k, float* sums, bool resume) {
    Floats acc[R][kBlockVectors];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < kBlockVectors; v++) acc[r][v] = resume ? load(sums + r * kPanel + v * kLanes) : Floats{};
    int i = 0;
    for (; i + 1 < k; i += 2, w += 2 * kPanel) {
        Floats first[kBlockVectors], second[kBlockVectors];
        for (int v = 0; v < kBlockVectors; v++) load_two(w, v, first[v], second[v]);
        for (int r = 0; r < R; r++) {
            const Floats a = splat(x.data[r * x.stride + i]);
            for (int v = 0; v < kBlockVectors; v++) acc[r][v] = fma(a, first[v], acc[r][v]);
        }
        for (int r = 0; r < R; r++) {
            const Floats b = splat(x.data[r * x.stride + i + 1]);
            for (int v = 0; v < kBlockVectors; v++) acc[r][v] = fma(b, second[v], acc[r][v]);
        }
    }
    if (i < k)
        for (int r = 0; r < R; r++)
            for (int v = 0; v < kBlockVectors; v++)
                acc[r][v] = fma(splat(x.data[r * x.stride + i]), load_one(w, v), acc[r][v]);
    for (int r = 0; r < R; r++)
        for (int v = 0; v < kBlockVectors; v++) store(sums + r * kPanel + v * kLanes, acc[r][v]);
}

template <class W>
using BlockFunction = void (*)(RowsOfX, const W*, int, float*, bool);

template <class W>
BlockFunction<W> block_function(int rows) {
    static constexpr auto table = []<int... R>(std::integer_sequence<int, R...>) {
        return std::array<BlockFunction<W>, kBlockRows>{multiply_block<W, R + 1>...};
    }(std::make_integer_sequence<int, kBlockRows>{});
    return table[rows - 1];
}

// Elements of a panel per column: first half of a pair layout's element (k, column) for even k.
inline size_t column_offset(const float*, int column) { return column; }
inline size_t column_offset(const bf16*, int column) { return 2 * column; }

// All rows times k of one panel; blocks of rows as even in size as can be.
template <class W>
void multiply_panel(RowsOfX x, int rows, const W* w, int k, float* sums, bool resume) {
    const int blocks = (rows + kBlockRows - 1) / kBlockRows;
    for (int i = 0; i < k; i += kInnerK) {
        const int inner = std::min(kInnerK, k - i);
        for (int block = 0; block < blocks; block++) {
            const int begin = rows * block / blocks;
            const int end = rows * (block + 1) / blocks;
            const auto multiply = block_function<W>(end - begin);
            for (int column = 0; column < kPanel; column += kBlockColumns)
                multiply({x.data + begin * x.stride + i, x.stride}, w + i * kPanel + column_offset(w, column), inner,
                         sums + begin * kPanel + column, resume || i > 0);
        }
    }
}

// A piece of work: some panels, some rows.
template <class W>
void linear_piece(const LinearOp& op, RowsOfX x, int first_row, int rows, int begin, int end, float* sums) {
    const auto* weights = static_cast<const W*>(op.weight);
    const auto* weights2 = static_cast<const W*>(op.weight2);
    const size_t size = panel_size(weights, op.k);
    const int weight_count = weights2 ? 2 : 1;
    for (int k = 0; k < op.k; k += kOuterK) {
        const int outer = std::min(kOuterK, op.k - k);
        for (int panel = begin; panel < end; panel++) {
            float* own = sums + static_cast<size_t>(panel - begin) * weight_count * rows * kPanel;
            float* own2 = own + static_cast<size_t>(rows) * kPanel;
            const size_t offset = panel * size + static_cast<size_t>(k) * kPanel;
            multiply_panel({x.data + k, x.stride}, rows, weights + offset, outer, own, k > 0);
            if (weights2) multiply_panel({x.data + k, x.stride}, rows, weights2 + offset, outer, own2, k > 0);
            if (k + outer == op.k) finish_panel(op, panel, first_row, rows, own, own2);
        }
    }
}

inline size_t piece_sums_bytes(int rows) {
    return sizeof(float) * kPiecePanels * 2 * std::min(rows, kChunkRows) * kPanel;
}

template <class W>
void linear_rows(Worker& worker, const LinearOp& op, RowsOfX x, int rows, char* scratch) {
    float* sums = reinterpret_cast<float*>(scratch + worker.rank * piece_sums_bytes(rows));
    const int chunks = (rows + kChunkRows - 1) / kChunkRows;
    worker.share(num_panels(op.n), 4, [&](int begin, int end) {
        for (int chunk = 0; chunk < chunks; chunk++) {
            const int first = static_cast<int>(static_cast<int64_t>(rows) * chunk / chunks);
            const int last = static_cast<int>(static_cast<int64_t>(rows) * (chunk + 1) / chunks);
            linear_piece<W>(op, {x.data + first * x.stride, x.stride}, first, last - first, begin, end, sums);
        }
    });
}

// A bfloat16 x is widened first, to rows of this many float32.
inline int64_t widened_stride(int k) { return padded_k(k, 16) + 16; }

inline size_t widened_bytes(const LinearOp& op, int rows) {
    return op.x_type == Type::kBfloat16 ? sizeof(float) * widened_stride(op.k) * rows : 0;
}

inline RowsOfX rows_of_x(Worker& worker, const LinearOp& op, int rows, char* scratch) {
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

inline size_t linear_float_scratch_bytes(const LinearOp& op, int rows, int num_threads) {
    return widened_bytes(op, rows) + num_threads * piece_sums_bytes(rows);
}

inline void linear_float(Worker& worker, const LinearOp& op, int rows, char* scratch) {
    const RowsOfX x = rows_of_x(worker, op, rows, scratch);
    char* rest = scratch + widened_bytes(op, rows);
    if (op.weight_type == Type::kFloat32) linear_rows<float>(worker, op, x, rows, rest);
    if (op.weight_type == Type::kBfloat16) linear_rows<bf16>(worker, op, x, rows, rest);
}

}  // namespace llmb
