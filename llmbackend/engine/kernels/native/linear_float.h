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

// The weights of vector v of columns for an even k, and for the k after it.
inline Floats load_first(const float* w, int v) { return load(w + v * kLanes); }
inline Floats load_second(const float* w, int v) { return load(w + kPanel + v * kLanes); }
inline Floats load_first(const bf16* w, int v) { return even(load_pairs(w + 2 * v * kLanes)); }
inline Floats load_second(const bf16* w, int v) { return odd(load_pairs(w + 2 * v * kLanes)); }

// Weights that will be needed next, fetched into the L2 cache bit by bit while others are multiplied.
struct Ahead {
    const char* at;
    int step;  // bytes for each two k

    template <int kLines>
    void fetch() {
        for (int line = 0; line < kLines; line++) __builtin_prefetch(at + 64 * line, 0, 2);
        at += step;
    }
};

// f(0) ... f(N - 1), written out before anything is optimised: only then does an array that f indexes become registers.
#define LLMB_INLINE __attribute__((always_inline))
template <int N, class F>
LLMB_INLINE inline void repeat(F f) {
    [&]<int... I>(std::integer_sequence<int, I...>) LLMB_INLINE {
        (f(std::integral_constant<int, I>{}), ...);
    }(std::make_integer_sequence<int, N>{});
}

// The rows of a block as the compiler shall address them: three rows share a pointer, which it cannot see through.
// Otherwise it keeps a pointer for each row and runs out of registers.
template <int R>
struct RowPointers {
    static constexpr int kPointers = (R + 2) / 3;
    const float* at[kPointers];
    int64_t stride;

    LLMB_INLINE explicit RowPointers(RowsOfX x) : stride(x.stride) {
        repeat<kPointers>([&](auto p) LLMB_INLINE { at[p] = x.data + 3 * p * stride; });
    }
    template <int kRow>
    LLMB_INLINE Floats first() const {
        return splat(at[kRow / 3][kRow % 3 * stride]);
    }
    template <int kRow>
    LLMB_INLINE Floats second() const {
        return splat(at[kRow / 3][kRow % 3 * stride + 1]);
    }
    LLMB_INLINE void advance() {
        repeat<kPointers>([&](auto p) LLMB_INLINE {
            at[p] += 2;
            asm("" : "+r"(at[p]));
        });
    }
};

// The running sums of a block: R rows times V vectors of columns, in registers.
template <int R, int V>
struct BlockSums {
    Floats acc[R][V];

    LLMB_INLINE void begin(const float* sums, bool resume) {
        repeat<R * V>([&](auto i) LLMB_INLINE {
            acc[i / V][i % V] = resume ? load(sums + i / V * kPanel + i % V * kLanes) : Floats{};
        });
    }
    // Adds the product of one k: of x_of(row) and w_of(vector).
    template <class X, class Weights>
    LLMB_INLINE void add(X x_of, Weights w_of) {
        Floats w[V];
        repeat<V>([&](auto v) LLMB_INLINE { w[v] = w_of(v); });
        repeat<R>([&](auto r) LLMB_INLINE {
            const Floats x = x_of(r);
            repeat<V>([&](auto v) LLMB_INLINE { acc[r][v] = fma(x, w[v], acc[r][v]); });
        });
    }
    LLMB_INLINE void end(float* sums) const {
        repeat<R * V>([&](auto i) LLMB_INLINE { store(sums + i / V * kPanel + i % V * kLanes, acc[i / V][i % V]); });
    }
};

// sums[r][column] (+)= over k of x[r][k] * w[k][column], for R rows and kBlockColumns columns.
template <class W, int R>
void multiply_block(RowsOfX x, const W* w, int k, float* sums, bool resume, Ahead ahead) {
    BlockSums<R, kBlockVectors> block;
    block.begin(sums, resume);
    RowPointers<R> rows(x);
    for (int i = 0; i < k / 2; i++, w += 2 * kPanel, rows.advance()) {
        block.add([&](auto r) LLMB_INLINE { return rows.template first<r>(); },
                  [&](auto v) LLMB_INLINE { return load_first(w, v); });
        ahead.fetch<kPanel * 2 * sizeof(W) / 64>();
        block.add([&](auto r) LLMB_INLINE { return rows.template second<r>(); },
                  [&](auto v) LLMB_INLINE { return load_second(w, v); });
    }
    if (k % 2)
        block.add([&](auto r) LLMB_INLINE { return rows.template first<r>(); },
                  [&](auto v) LLMB_INLINE { return load_first(w, v); });
    block.end(sums);
}

template <class W>
using BlockFunction = void (*)(RowsOfX, const W*, int, float*, bool, Ahead);

template <class W>
BlockFunction<W> block_function(int rows) {
    static constexpr auto table = []<int... R>(std::integer_sequence<int, R...>) {
        return std::array<BlockFunction<W>, kBlockRows>{multiply_block<W, R + 1>...};
    }(std::make_integer_sequence<int, kBlockRows>{});
    return table[rows - 1];
}

// Elements of a panel before `column` of an even k.
inline size_t column_offset(const float*, int column) { return column; }
inline size_t column_offset(const bf16*, int column) { return 2 * column; }

// k cut into the fewest parts of at most `most`, as even as can be, all but the last a multiple of 32.
inline int part_of_k(int k, int most) {
    const int parts = (k + most - 1) / most;
    return padded_k((k + parts - 1) / parts, 32);
}

// All rows times k of one panel, in blocks of rows as even in size as can be. `next` are the weights of the next call.
template <class W>
void multiply_panel(RowsOfX x, int rows, const W* w, int k, float* sums, bool resume, const W* next) {
    constexpr int kColumnBlocks = kPanel / kBlockColumns;
    const int blocks = (rows + kBlockRows - 1) / kBlockRows;
    const int step = kPanel * 2 * static_cast<int>(sizeof(W)) / (blocks * kColumnBlocks);
    const int part = part_of_k(k, kInnerK);
    for (int i = 0; i < k; i += part) {
        const int inner = std::min(part, k - i);
        const char* target = reinterpret_cast<const char*>(i + part < k ? w + (i + part) * kPanel : next);
        for (int block = 0; block < blocks; block++) {
            const int begin = rows * block / blocks;
            const int end = rows * (block + 1) / blocks;
            const auto multiply = block_function<W>(end - begin);
            for (int column = 0; column < kPanel; column += kBlockColumns, target += inner / 2 * step)
                multiply({x.data + begin * x.stride + i, x.stride}, w + i * kPanel + column_offset(w, column), inner,
                         sums + begin * kPanel + column, resume || i > 0, {target, step});
        }
    }
}

// A piece of work: some panels, some rows.
template <class W>
void linear_piece(const LinearOp& op, RowsOfX x, int first_row, int rows, int begin, int end, float* sums) {
    const auto* weights = static_cast<const W*>(op.weight);
    const auto* weights2 = static_cast<const W*>(op.weight2);
    const size_t size = panel_size(weights, op.k);
    const int part = part_of_k(op.k, kOuterK);
    const bool whole = part >= op.k;  // then sums need not outlive a panel, and stay in the L1 cache
    for (int k = 0; k < op.k; k += part) {
        const int outer = std::min(part, op.k - k);
        const RowsOfX x_part{x.data + k, x.stride};
        for (int panel = begin; panel < end; panel++) {
            float* own = sums + (whole ? 0 : static_cast<size_t>(panel - begin) * 2 * rows * kPanel);
            float* own2 = own + static_cast<size_t>(rows) * kPanel;
            const size_t at = panel * size + static_cast<size_t>(k) * kPanel;
            const size_t next = panel + 1 < end || whole ? at + size : begin * size + (k + part) * kPanel;
            multiply_panel(x_part, rows, weights + at, outer, own, k > 0, weights + next);
            if (weights2) multiply_panel(x_part, rows, weights2 + at, outer, own2, k > 0, weights2 + next);
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
