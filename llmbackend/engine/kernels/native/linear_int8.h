// y = x·Wᵀ on vectors with int8 weights, and activations that are quantised row by row on the fly.
//
// Used by linear.h. Invariants: sums over K are integers and therefore exact, so outputs do not depend on the division
// of rows, columns or K into blocks, or on the instruction set. A row of x with a NaN or an infinity becomes a row of
// NaN and affects no other row.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "epilogue.h"
#include "epilogue_int8.h"
#include "linear_piece.h"
#include "memory.h"
#include "numbers.h"
#include "quantise_int8.h"
#include "quantised_rows.h"
#include "step.h"
#include "team.h"

namespace llmb {
namespace int8 {

using VectorRows = QuantisedRows<VectorOrder>;
using Stored = VectorOrder::Stored;
constexpr int kOffset = std::is_same_v<Stored, uint8_t> ? kUnsignedOffset : 0;

constexpr int kKBlock = 6144;                     // elements of K at a time: a panel's part stays in the L2 cache
constexpr int kChunkBytes = 384 << 10;            // quantised rows at a time: they stay in the L2 cache next to it
constexpr int kOwnCopyRows = 2;                   // up to this many rows, every thread quantises all: no barrier

// Maximum rows per chunk, with this many bytes each, in whole blocks.
inline int most_rows(size_t row_bytes, int block_rows) {
    return std::max(static_cast<int>(kChunkBytes / row_bytes) / block_rows * block_rows, block_rows);
}

// How rows are divided into chunks, and how many copies of the quantised rows there are.
struct RowPlan {
    int rows;
    int chunks;         // of rows
    int chunk_rows;     // at most
    size_t copy_bytes;  // of one copy of the quantised rows
    bool own_copies;    // each thread has its own

    RowPlan(int rows, int most_rows, size_t copy_bytes, int num_threads)
        : rows(rows), chunks(divide_up(rows, most_rows)), chunk_rows(chunks == 0 ? 0 : divide_up(rows, chunks)),
          copy_bytes(copy_bytes), own_copies(num_threads > 1 && rows <= kOwnCopyRows) {}

    size_t copies_bytes(int num_threads) const { return copy_bytes * (own_copies ? num_threads : 1); }
    char* copy_of(char* copies, int rank) const { return copies + (own_copies ? copy_bytes * rank : 0); }
};

inline int32_t load_int(const void* p) {
    int32_t x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

// ---------------------------------------------------------------------------------------------------------------------
// Products: sums[row][column] (+)= Σ stored x * weight, over some quads of K and one panel; fresh: sums start here.

// Weights that will be needed next. Each step of four quads prefetches a few lines of them, so that memory is busy all
// the time, and not only while the first block of rows uses a new panel.
struct Ahead {
    const int8_t* from;
    int lines;  // per step

    void fetch() {
        for (int i = 0; i < lines; i++) __builtin_prefetch(from + i * 64, 0, 2);
        from += lines * 64;
    }
};

constexpr int kStepQuads = 4;
constexpr int kNearBytes = 2048;        // prefetch distance for the L1 cache
// Up to this many rows, weights stream faster if only the CPU itself prefetches them (see linear_block.h).
#if defined(LLMB_BF16_DOTS)
constexpr int kStreamRows = 4;
#else
constexpr int kStreamRows = 0;
#endif

inline void fetch_near(const int8_t* weights) {
    for (int i = 0; i < kQuadBytes; i += 64) __builtin_prefetch(weights + kNearBytes + i, 0, 3);
}

#if defined(LLMB_HAS_VNNI)

// sum + x·w in each quad of unsigned x and signed w; kMaxBlock: rows whose sums fit in registers.
#if defined(__AVX512VNNI__)
constexpr int kMaxBlock = 12;
inline Ints dot(Ints sum, Ints x, Ints w) { return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)w); }
#elif defined(__AVXVNNI__)
constexpr int kMaxBlock = 6;
inline Ints dot(Ints sum, Ints x, Ints w) {
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)x, (__m256i)w);
}
#else
// As documented for the instruction, for tests on any CPU.
constexpr int kMaxBlock = 6;
inline Ints dot(Ints sum, Ints x, Ints w) {
    using Shorts = int16_t __attribute__((vector_size(sizeof(Ints))));
    using Unsigned = uint16_t __attribute__((vector_size(sizeof(Ints))));
    const Shorts even = ((Shorts)w << 8) >> 8, odd = (Shorts)w >> 8;
    const Unsigned low = (Unsigned)x & 255, high = (Unsigned)x >> 8;
    return sum + (Ints)_mm256_madd_epi16((__m256i)low, (__m256i)even) +
           (Ints)_mm256_madd_epi16((__m256i)high, (__m256i)odd);
}
#endif

// A quad of one row of x, and of a vector of columns.
struct Quad {
    Ints x;
    explicit Quad(const Stored* p) : x(Ints{} + load_int(p)) {}
};
struct Weights {
    Ints w;
    explicit Weights(const int8_t* p) : w(load_ints(p)) {}
    Ints times(const Quad& quad, Ints sum) const { return dot(sum, quad.x, w); }
};

#elif defined(__x86_64__)

#if defined(__AVX512BW__)
constexpr int kMaxBlock = 10;
inline Ints add_pairs(Ints a, Ints b) { return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
#elif defined(__AVX2__)
constexpr int kMaxBlock = 4;
inline Ints add_pairs(Ints a, Ints b) { return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
#else
constexpr int kMaxBlock = 4;
inline Ints add_pairs(Ints a, Ints b) { return (Ints)_mm_madd_epi16((__m128i)a, (__m128i)b); }
#endif

// In 16 bits: sums of two products cannot overflow, as 8-bit products could.
struct Quad {
    Ints even, odd;
    explicit Quad(const Stored* p) : even(Ints{} + load_int(p)), odd(Ints{} + load_int(p + 2)) {}
};
struct Weights {
    using Shorts = int16_t __attribute__((vector_size(sizeof(Ints))));
    Ints even, odd;
    explicit Weights(const int8_t* p) {
        const Shorts both = (Shorts)load_ints(p);
        even = (Ints)((both << 8) >> 8);
        odd = (Ints)(both >> 8);
    }
    Ints times(const Quad& quad, Ints sum) const { return pinned(sum + add_pairs(even, quad.even) + add_pairs(odd, quad.odd)); }
};

#else

constexpr int kMaxBlock = 4;

struct Quad {
    const Stored* x;
    explicit Quad(const Stored* p) : x(p) {}
};
struct Weights {
    const int8_t* w;
    explicit Weights(const int8_t* p) : w(p) {}
    Ints times(const Quad& quad, Ints sum) const {
        for (int i = 0; i < kLanes; i++)
            sum[i] += quad.x[0] * w[i * 4] + quad.x[1] * w[i * 4 + 2] + quad.x[2] * w[i * 4 + 1] + quad.x[3] * w[i * 4 + 3];
        return sum;
    }
};

#endif

// Two vectors of columns at a time, with sums in registers.
template <int kRows>
void multiply_pair(const Stored* x, size_t stride, const int8_t* panel, int quads, Ahead ahead, int32_t* sums, bool fresh) {
    Ints low[kRows], high[kRows];
#pragma GCC unroll 12
    for (int r = 0; r < kRows; r++) {
        low[r] = fresh ? Ints{} : load_ints(sums + r * kPanel);
        high[r] = fresh ? Ints{} : load_ints(sums + r * kPanel + kLanes);
    }
    for (int step = 0; step < quads; step += kStepQuads, panel += kStepQuads * kQuadBytes, x += kStepQuads * 4) {
        if constexpr (kRows > kStreamRows) ahead.fetch();
#pragma GCC unroll 4
        for (int i = 0; i < kStepQuads; i++) {
            const Weights first(panel + i * kQuadBytes), second(panel + i * kQuadBytes + kLanes * 4);
            if constexpr (kRows > kStreamRows) fetch_near(panel + i * kQuadBytes);
#pragma GCC unroll 12
            for (int r = 0; r < kRows; r++) {
                const Quad four(x + r * stride + i * 4);
                low[r] = first.times(four, low[r]);
                high[r] = second.times(four, high[r]);
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; r++) {
        std::memcpy(sums + r * kPanel, &low[r], sizeof(Ints));
        std::memcpy(sums + r * kPanel + kLanes, &high[r], sizeof(Ints));
    }
}

template <int kRows>
void multiply_block(const Stored* x, size_t stride, const int8_t* panel, int quads, Ahead ahead, int32_t* sums, bool fresh) {
    for (int column = 0; column < kPanel; column += 2 * kLanes) {
        multiply_pair<kRows>(x, stride, panel + column * 4, quads, ahead, sums + column, fresh);
        ahead.lines = 0;
    }
}

using MultiplyBlock = void (*)(const Stored*, size_t, const int8_t*, int, Ahead, int32_t*, bool);

template <int... kRows>
MultiplyBlock block_of(int rows, std::integer_sequence<int, kRows...>) {
    static constexpr MultiplyBlock kBlocks[] = {multiply_block<kRows + 1>...};
    return kBlocks[rows - 1];
}
inline MultiplyBlock best_block(int rows) { return block_of(rows, std::make_integer_sequence<int, kMaxBlock>()); }

// ---------------------------------------------------------------------------------------------------------------------
// The whole operation: chunks of rows times panels of columns, in tasks shared by threads.

struct Product {
    const LinearOp& op;
    const VectorRows& x;
    int32_t* sums;    // [factors][rows of a chunk or of a block][kPanel], this thread's
    int sums_rows;
    int num_factors;  // number of weights: 1, or 2 with a gate

    const int8_t* panel_of(int factor, int panel) const {
        const void* weight = factor == 0 ? op.weight : op.weight2;
        return static_cast<const int8_t*>(weight) + static_cast<size_t>(panel) * kPanel * padded_k(op.k);
    }

    // Rows first..last-1 times one panel. next: this thread's next panel.
    void run(int first, int last, int panel, int next) const {
        const Columns one(op, false, panel, kOffset), two(op, num_factors == 2, panel, kOffset);
        const int k = padded_k(op.k);
        for (int begin = 0; begin < k; begin += kKBlock) {
            const int end = std::min(begin + kKBlock, k);
            for_blocks(first, last, [&](int row, int rows, int part, int parts) {
                int32_t* block = sums + (k > kKBlock ? (row - first) * kPanel : 0);
                if (end == k)
                    for (int r = 0; r < rows; r++) fetch_y(op, row + r, panel);
                const LoraRows added(op, false, panel, row, end == k ? rows : 0);
                const LoraRows added2(op, true, panel, row, end == k && num_factors == 2 ? rows : 0);
                for (int factor = 0; factor < num_factors; factor++) {
                    const int8_t* weights = panel_of(factor, panel) + begin * kPanel;
                    const int8_t* later = end < k ? weights + kKBlock * kPanel : panel_of(factor, next);
                    multiply(row, rows, weights, begin, end, part_of(later, part, parts, end - begin),
                             block + factor * sums_rows * kPanel);
                }
                if (end == k)
                    for (int r = 0; r < rows; r++)
                        finish(row + r, panel, one, two, block + r * kPanel, [&](bool second, PanelRow& result) {
                            (second ? added2 : added).add(r, result.v);
                        });
            });
        }
    }

    void multiply(int row, int rows, const int8_t* weights, int begin, int end, Ahead ahead, int32_t* block) const {
        const MultiplyBlock kernel = best_block(rows);
        kernel(x.data + row * x.stride + begin, x.stride, weights, (end - begin) / 4, ahead, block, begin == 0);
    }

    // What block `part` of `parts` blocks of rows prefetches of the next weights.
    static Ahead part_of(const int8_t* weights, int part, int parts, int k) {
        const int lines = divide_up(kStepQuads * kQuadBytes / 64, parts);
        return {weights + static_cast<size_t>(k / 4 / kStepQuads) * lines * 64 * part, lines};
    }

    // Blocks of nearly equal height: one of 12 rows and one of 1 would be slower than 7 and 6.
    template <class F>
    static void for_blocks(int first, int last, F&& f) {
        const int blocks = divide_up(last - first, kMaxBlock);
        const int height = divide_up(last - first, blocks);
        for (int i = 0, row = first; row < last; i++, row += height) f(row, std::min(height, last - row), i, blocks);
    }

    // add(second, row): added to x·Wᵀ + bias.
    template <class Add>
    void finish(int row, int panel, const Columns& one, const Columns& two, int32_t* block, Add&& add) const {
        const auto first = [&](int column) { return block + column; };
        const auto second = [&](int column) { return block + sums_rows * kPanel + column; };
        for (int i = 0; i < x.num_wide[row]; i++) {
            add_wide(panel_of(0, panel), x.wide_of(row)[i], first);
            if (num_factors == 2) add_wide(panel_of(1, panel), x.wide_of(row)[i], second);
        }
        PanelRow result = one.result(first, x.scale[row]);
        add(false, result);
        if (num_factors == 2) {
            PanelRow other = two.result(second, x.scale[row]);
            add(true, other);
            result = combine(op, result, other);
        }
        write_panel_row(op, row, panel, result);
    }
};

// How an operation is divided, and where its sums and rows are in scratch memory. Does not affect results.
struct Plan : RowPlan {
    int num_factors;
    int sums_rows;      // per thread
    size_t sums_bytes;  // per thread

    Plan(const LinearOp& op, const Step& step, int num_threads)
        : RowPlan(num_rows(op.rows, step), most_rows(op.k), VectorRows::bytes(num_rows(op.rows, step), op.k), num_threads),
          num_factors(is_gated(op.epilogue) ? 2 : 1), sums_rows(rows_of_sums(op.k, chunk_rows)),
          sums_bytes(static_cast<size_t>(num_factors) * sums_rows * kPanel * 4) {}

    size_t bytes(int num_threads) const { return sums_bytes * num_threads + copies_bytes(num_threads); }
    char* sums(char* scratch, int rank) const { return scratch + sums_bytes * rank; }
    char* copy(char* scratch, const Worker& worker) const { return copy_of(scratch + sums_bytes * worker.size, worker.rank); }

    // Per chunk.
    static int most_rows(int k) {
        return int8::most_rows(std::min<size_t>(padded_k(k), kKBlock) * sizeof(Stored), kMaxBlock);
    }
    static int rows_of_sums(int k, int chunk_rows) { return padded_k(k) > kKBlock ? chunk_rows + kMaxBlock : kMaxBlock; }
};

// Fills all rows: each thread its own copy, or all threads one, followed by a barrier.
template <class Plan, class Rows>
void quantise(Worker& worker, const LinearOp& op, const Plan& plan, Rows& x) {
    if (plan.own_copies) {
        for (int row = 0; row < plan.rows; row++) x.fill(op, row);
        return;
    }
    worker.share(plan.rows, std::max(1, plan.rows / (4 * worker.size)), [&](int begin, int end) {
        for (int row = begin; row < end; row++) x.fill(op, row);
    });
    worker.barrier();
}

}  // namespace int8

inline size_t linear_int8_scratch_bytes(const LinearOp& op, const Step& step, int num_threads) {
    return int8::Plan(op, step, num_threads).bytes(num_threads);
}

inline void linear_int8(Worker& worker, const LinearOp& op, const Step& step, char* scratch) {
    const int8::Plan plan(op, step, worker.size);
    Carver copy(plan.copy(scratch, worker));
    int8::VectorRows x(copy, plan.rows, op.k);
    int8::quantise(worker, op, plan, x);
    const int8::Product product{op, x, reinterpret_cast<int32_t*>(plan.sums(scratch, worker.rank)), plan.sums_rows,
                                plan.num_factors};
    const int count = num_panels(op.n);
    auto run = [&](int i, int next) {
        const int first = i / count * plan.chunk_rows;
        product.run(first, std::min(first + plan.chunk_rows, plan.rows), i % count, next % count);
    };
    int mine = -1;  // taken but not started: being one task behind, a thread knows what it will need next
    const size_t panel_bytes = static_cast<size_t>(int8::padded_k(op.k)) * kPanel;
    const int grain = panels::piece_panels(worker, plan.rows, count, panel_bytes);
    worker.share(count * plan.chunks, grain, [&](int begin, int end) {
        for (int i = begin; i < end; mine = i++)
            if (mine >= 0) run(mine, i);
    });
    if (mine >= 0) run(mine, mine);
}

}  // namespace llmb
