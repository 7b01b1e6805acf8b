// y = x·Wᵀ for float32 and bfloat16 weights, with float32 fused multiply-adds.
//
// For: linear.h. Does not know: int8, tiles. Invariant: an output element is one chain of fma over k ascending from zero,
// for any number of rows, threads, chunks or blocks: partial sums are stored and resumed as float32, which is exact.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "linear_piece.h"
#include "numbers.h"
#include "pack.h"
#include "step.h"
#include "team.h"

namespace llmb::panels {

// A block of rows whose sums over k are held in registers: kBlockRows rows, kBlockVectors vectors of columns.
#if defined(__AVX512F__)
constexpr int kBlockRows = 12;
#else
constexpr int kBlockRows = 6;
#endif
constexpr int kBlockVectors = 2;
constexpr int kBlockColumns = kBlockVectors * kLanes;

constexpr int kChunkRows = 132;  // of x at a time: with kOuterK of k, half of the L2 cache
constexpr int kNearPairs = 8;    // of k: so far ahead weights are brought from the L2 to the L1 cache
constexpr int kInnerK = 448;     // of a panel at a time, which then stays in the L1 cache for all rows

// Rows of x as the kernels read them.
struct RowsOfX {
    const float* data;
    int64_t stride;

    RowsOfX from(int row, int k) const { return {data + row * stride + k, stride}; }
};

// The weights of vector v of columns for an even k, and for the k after it.
inline Floats load_first(const float* w, int v) { return load(w + v * kLanes); }
inline Floats load_second(const float* w, int v) { return load(w + kPanel + v * kLanes); }
inline Floats load_first(const bf16* w, int v) { return even(load_pairs(w + 2 * v * kLanes)); }
inline Floats load_second(const bf16* w, int v) { return odd(load_pairs(w + 2 * v * kLanes)); }

// Calls f(0) ... f(N - 1), unrolled before optimisation: only then does an array that f indexes become registers.
#define LLMB_INLINE __attribute__((always_inline))
template <int N, class F>
LLMB_INLINE inline void repeat(F f) {
    [&]<int... I>(std::integer_sequence<int, I...>) LLMB_INLINE {
        (f(std::integral_constant<int, I>{}), ...);
    }(std::make_integer_sequence<int, N>{});
}

// How the compiler addresses the rows of a block: three rows share a pointer that is opaque to it. Otherwise it would
// keep a pointer for each row and run out of registers.
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
    // CPUs prefetch the other line of a pair by themselves; prefetching each pays only where nothing else is to be done.
    constexpr int kFetchEvery = R > 4 ? 128 : 64;
    BlockSums<R, kBlockVectors> block;
    block.begin(sums, resume);
    RowPointers<R> rows(x);
    for (int i = 0; i < k / 2; i++, w += 2 * kPanel, rows.advance()) {
        block.add([&](auto r) LLMB_INLINE { return rows.template first<r>(); },
                  [&](auto v) LLMB_INLINE { return load_first(w, v); });
        ahead.fetch<kPanel * 2 * sizeof(W), kFetchEvery>();
        for (int line = 0; line < static_cast<int>(2 * kPanel * sizeof(W)); line += 64)
            __builtin_prefetch(reinterpret_cast<const char*>(w + kNearPairs * 2 * kPanel) + line, 0, 3);
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

// One chunk of rows of x times k of weights of type W.
template <class W>
struct Chunk {
    using Weight = W;
    RowsOfX x;
    int rows;
    int k;

    int sum_rows() const { return rows; }
};

// sums (+)= all rows times k_begin..k_end of one panel, in blocks of rows as even in size as can be. `w` is the panel's
// k_begin; `next` are the weights after these.
template <class W>
void multiply_panel(const Chunk<W>& chunk, int k_begin, int k_end, const W* w, float* sums, const W* next) {
    constexpr int kColumnBlocks = kPanel / kBlockColumns;
    const int blocks = (chunk.rows + kBlockRows - 1) / kBlockRows;
    const int step_bytes = kPanel * 2 * static_cast<int>(sizeof(W)) / (blocks * kColumnBlocks);
    const int part = part_of_k(k_end - k_begin, kInnerK);
    for (int k = k_begin; k < k_end; k += part, w += part * kPanel) {
        const int inner = std::min(part, k_end - k);
        const char* target = reinterpret_cast<const char*>(k + part < k_end ? w + part * kPanel : next);
        for (int block = 0; block < blocks; block++) {
            const int begin = chunk.rows * block / blocks;
            const int end = chunk.rows * (block + 1) / blocks;
            const auto multiply = block_function<W>(end - begin);
            for (int column = 0; column < kPanel; column += kBlockColumns, target += inner / 2 * step_bytes)
                multiply(chunk.x.from(begin, k), w + column_offset(w, column), inner, sums + begin * kPanel + column,
                         k > 0, {target, step_bytes});
        }
    }
}

template <class W>
void linear_rows(Worker& worker, const LinearOp& op, RowsOfX x, int rows, float* sums) {
    const int chunks = (rows + kChunkRows - 1) / kChunkRows;
    share_panels(worker, op, panel_size(static_cast<const W*>(nullptr), op.k) * sizeof(W), [&](int begin, int end) {
        for (int chunk = 0; chunk < chunks; chunk++) {
            const int first = static_cast<int>(static_cast<int64_t>(rows) * chunk / chunks);
            const int last = static_cast<int>(static_cast<int64_t>(rows) * (chunk + 1) / chunks);
            linear_piece(op, Chunk<W>{x.from(first, 0), last - first, op.k}, first, begin, end, sums);
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

inline size_t float_sums_bytes(int rows) { return sums_bytes(std::min(rows, kChunkRows)); }

inline size_t linear_float_scratch_bytes(const LinearOp& op, int rows, int num_threads) {
    return widened_bytes(op, rows) + num_threads * float_sums_bytes(rows);
}

inline void linear_float(Worker& worker, const LinearOp& op, int rows, char* scratch) {
    const RowsOfX x = rows_of_x(worker, op, rows, scratch);
    auto* sums = reinterpret_cast<float*>(scratch + widened_bytes(op, rows) + worker.rank * float_sums_bytes(rows));
    if (op.weight_type == Type::kFloat32) linear_rows<float>(worker, op, x, rows, sums);
    if (op.weight_type == Type::kBfloat16) linear_rows<bf16>(worker, op, x, rows, sums);
}

}  // namespace llmb::panels
