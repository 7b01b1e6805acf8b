// y = x·Wᵀ with int8 weights and activations that are quantised row by row as they come.
//
// For: linear.h. Does not know: where weights come from, or what other operations there are. Invariants: sums over K are
// integers and therefore exact, so no way of cutting rows, columns or K into blocks, and no instruction set, changes an
// output; the float arithmetic around them is one fixed chain per output element. A row of x with a NaN or an infinity
// becomes a row of NaN and touches no other row.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "amx.h"
#include "epilogue.h"
#include "numbers.h"
#include "quantise_int8.h"
#include "step.h"
#include "team.h"

namespace llmb {
namespace int8 {

using amx::kTileBytes, amx::kTileRows;

constexpr int kKBlock = 6144;                     // elements of K at a time: a panel's part stays in the L2 cache
constexpr int kChunkBytes = 384 << 10;            // quantised rows at a time: they stay in the L2 cache beside it
constexpr int kOwnCopyRows = 2;                   // up to so many rows, every thread quantises all: no barrier

inline int divide_up(int a, int b) { return (a + b - 1) / b; }

inline int32_t load_int(const void* p) {
    int32_t x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

inline Ints load_ints(const void* p) {
    Ints x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

// ---------------------------------------------------------------------------------------------------------------------
// Quantising the rows of x.

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(LLMB_EMULATE_AVX_VNNI)
#define LLMB_HAS_VNNI 1
#endif

// How q is stored for the kernel: with VNNI as q + 128 (its first factor is unsigned), else as int16 quads in the order
// 0 2 1 3, which the even and odd bytes of the weights meet in pairs.
#if defined(LLMB_HAS_VNNI)
using Stored = uint8_t;
constexpr int kOffset = 128;
inline void store_quantised(Stored* p, Ints q) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)(q + kOffset)));
#else
    const __m256i words = _mm256_packs_epi32((__m256i)(q + kOffset), _mm256_setzero_si256());
    const __m256i bytes = _mm256_packus_epi16(words, _mm256_setzero_si256());
    const int32_t low = _mm256_extract_epi32(bytes, 0), high = _mm256_extract_epi32(bytes, 4);
    std::memcpy(p, &low, 4);
    std::memcpy(p + 4, &high, 4);
#endif
}
#else
using Stored = int16_t;
constexpr int kOffset = 0;
inline void store_quantised(Stored* p, Ints q) {
    constexpr int kOrder[4] = {0, 2, 1, 3};
    for (int i = 0; i < kLanes; i++) p[(i & ~3) + kOrder[i & 3]] = static_cast<Stored>(q[i]);
}
#endif

// The quantised rows. Their stride is an odd number of cache lines, so that a block of rows spreads over all cache sets.
struct QuantisedRows {
    Stored* data;
    float* scale;
    int32_t* num_wide;
    Wide* wide;  // [rows][most_wide]
    size_t stride;
    int most_wide;

    static size_t stride_of(int k) { return (padded_k(k) * sizeof(Stored) / 64 | 1) * 64 / sizeof(Stored); }
    static size_t bytes(int rows, int k) {
        return rows * stride_of(k) * sizeof(Stored) + (rows * (8 + k / kWideEvery * sizeof(Wide)) + 63) / 64 * 64;
    }

    QuantisedRows(char* memory, int rows, int k)
        : data(reinterpret_cast<Stored*>(memory)),
          scale(reinterpret_cast<float*>(memory + rows * stride_of(k) * sizeof(Stored))),
          num_wide(reinterpret_cast<int32_t*>(scale + rows)),
          wide(reinterpret_cast<Wide*>(num_wide + rows)),
          stride(stride_of(k)),
          most_wide(k / kWideEvery) {}

    template <class X>
    void fill(int row, const X* x, int k) {
        const Magnitudes magnitude = magnitudes(x, k);
        float limit = narrow_limit(magnitude);
        while (limit < magnitude.largest && !fill_wide(row, x, k, limit)) limit *= 1.5f;
        if (!(limit < magnitude.largest)) fill_narrow(row, x, k, magnitude.largest);
    }

    template <class X>
    void fill_narrow(int row, const X* x, int k, float limit) {
        const Scale chosen(limit);
        scale[row] = chosen.scale;
        num_wide[row] = 0;
        Stored* out = data + row * stride;
        quantise_row(x, k, chosen.factor, [&](int i, Ints q) { store_quantised(out + i, q); });
    }

    // False: too many elements are beyond the limit.
    template <class X>
    bool fill_wide(int row, const X* x, int k, float limit) {
        const Scale chosen(limit);
        scale[row] = chosen.scale;
        Stored* out = data + row * stride;
        Wide* own = wide + static_cast<size_t>(row) * most_wide;
        int count = 0;
        quantise_row(x, k, chosen.factor, [&](int i, Ints q) {
            Ints narrow = q > 127 ? Ints{} + 127 : q;
            narrow = narrow < -127 ? Ints{} - 127 : narrow;
            store_quantised(out + i, narrow);
            const Ints rest = q - narrow;
            if (!any(rest)) return;
            for (int lane = 0; lane < kLanes; lane++)
                if (rest[lane] != 0 && count++ < most_wide) own[count - 1] = {i + lane, rest[lane]};
        });
        num_wide[row] = count;
        return count <= most_wide;
    }

    void fill(const LinearOp& op, int row) {
        const size_t at = static_cast<size_t>(row) * op.x_stride;
        if (op.x_type == Type::kFloat32) fill(row, static_cast<const float*>(op.x) + at, op.k);
        else fill(row, static_cast<const bf16*>(op.x) + at, op.k);
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Multiplying: sums[row][column] (+)= Σ stored x * weight, over some quads of K and one panel; `fresh`: sums begin here.

// Weights that will be wanted next. Each step of four quads asks the memory for a few lines of them, so that the memory
// is busy all the time, and not only while the first block of rows meets a new panel.
struct Ahead {
    const int8_t* from;
    int lines;  // per step

    void fetch() {
        for (int i = 0; i < lines; i++) __builtin_prefetch(from + i * 64, 0, 2);
        from += lines * 64;
    }
};

constexpr int kStepQuads = 4;
constexpr int kQuadBytes = kPanel * 4;  // of a panel
constexpr int kNearBytes = 2048;        // the distance from which the L1 cache is filled
// Up to so many rows, weights stream by faster if nothing but the CPU itself fetches them (see linear_block.h).
#if defined(LLMB_BF16_DOTS)
constexpr int kStreamRows = 4;
#else
constexpr int kStreamRows = 0;
#endif

inline void fetch_near(const int8_t* weights) {
    for (int i = 0; i < kQuadBytes; i += 64) __builtin_prefetch(weights + kNearBytes + i, 0, 3);
}

#if defined(LLMB_HAS_VNNI)

// sum + x·w in each quad of unsigned x and signed w; kMaxBlock: rows whose sums fit the registers.
#if defined(__AVX512VNNI__)
constexpr int kMaxBlock = 12;
inline Ints dot(Ints sum, Ints x, Ints w) { return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)w); }
#elif defined(__AVXVNNI__)
constexpr int kMaxBlock = 6;
inline Ints dot(Ints sum, Ints x, Ints w) {
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)x, (__m256i)w);
}
#else
// What is documented for the instruction, for tests on any CPU.
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

// In 16 bits: products of two of them cannot overflow on their way to the sums, as products in 8 bits would.
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
    Ints times(const Quad& quad, Ints sum) const { return sum + add_pairs(even, quad.even) + add_pairs(odd, quad.odd); }
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

// Two vectors of columns at a time, whose sums stay in registers.
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
inline MultiplyBlock registers_block(int rows) { return block_of(rows, std::make_integer_sequence<int, kMaxBlock>()); }

#if defined(LLMB_HAS_TILES) && defined(__AVX512VNNI__)

// 16 or 32 rows, in tiles: sums in 0 to 3, x in 4 and 5, weights in 6 and 7.
template <int kRows>
void multiply_tiles(const Stored* x, size_t stride, const int8_t* panel, int quads, Ahead ahead, int32_t* sums,
                    bool fresh) {
    constexpr bool kTwo = kRows > kTileRows;
    constexpr int kHalf = kTileBytes / 4;  // columns of a tile
    constexpr size_t kSumStride = kPanel * 4;
    int32_t* lower = sums + kTileRows * kPanel;
    if (fresh) {
        tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    } else {
        tile_load<0>(sums, kSumStride), tile_load<1>(sums + kHalf, kSumStride);
        if (kTwo) tile_load<2>(lower, kSumStride), tile_load<3>(lower + kHalf, kSumStride);
    }
    for (int quad = 0; quad < quads; quad += kTileRows) {
        for (int i = 0; i < kTileRows; i += kStepQuads) ahead.fetch();
        for (int i = 0; i < kTileRows; i++) fetch_near(panel + (quad + i) * kQuadBytes);
        tile_load<6>(panel + quad * kQuadBytes, kQuadBytes);
        tile_load<4>(x + quad * 4, stride);
        tile_dot_u8_s8<0, 4, 6>();
        tile_load<7>(panel + quad * kQuadBytes + kTileBytes, kQuadBytes);
        tile_dot_u8_s8<1, 4, 7>();
        if (kTwo) {
            tile_load<5>(x + kTileRows * stride + quad * 4, stride);
            tile_dot_u8_s8<2, 5, 6>();
            tile_dot_u8_s8<3, 5, 7>();
        }
    }
    tile_store<0>(sums, kSumStride), tile_store<1>(sums + kHalf, kSumStride);
    if (kTwo) tile_store<2>(lower, kSumStride), tile_store<3>(lower + kHalf, kSumStride);
}

constexpr int kFewRows = 4;    // up to so many, registers keep pace with the memory, and tiles would be mostly empty
constexpr int kTallest = 2 * kTileRows;  // rows of a block
constexpr int kRowMultiple = kTileRows;  // kernels may read, and write sums of, so many rows more than there are, less one

inline MultiplyBlock best_block(int rows) {
    return rows <= kFewRows ? registers_block(rows) : rows <= kTileRows ? multiply_tiles<16> : multiply_tiles<32>;
}

#else

constexpr int kTallest = kMaxBlock;
constexpr int kRowMultiple = 1;

inline MultiplyBlock best_block(int rows) { return registers_block(rows); }

#endif

// ---------------------------------------------------------------------------------------------------------------------
// Finishing: from integer sums to y.

// One panel's columns of one weight, those beyond n zero.
struct Columns {
    alignas(64) float scale[kPanel] = {};
    alignas(64) float bias[kPanel] = {};
    alignas(64) int32_t correction[kPanel] = {};  // the part of the sums that comes from the offset of the stored x

    Columns(const float* all_scale, const float* all_bias, const int32_t* all_sums, int first, int count) {
        std::memcpy(scale, all_scale + first, count * 4);
        if (all_bias) std::memcpy(bias, all_bias + first, count * 4);
        if constexpr (kOffset != 0)
            for (int i = 0; i < count; i++) correction[i] = kOffset * all_sums[first + i];
    }

    // x·Wᵀ + bias
    PanelRow result(const int32_t* sums, float x_scale) const {
        PanelRow row;
        for (int v = 0; v < kPanelVectors; v++) {
            const Ints whole = load_ints(sums + v * kLanes) - load_ints(correction + v * kLanes);
            const Floats exact = __builtin_convertvector(whole, Floats);
            row.v[v] = fma(exact, load(scale + v * kLanes) * x_scale, load(bias + v * kLanes));
        }
        return row;
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Adds what the wide elements of a row have beyond 127 to its sums of one panel.
inline void add_wide(const int8_t* panel, const Wide* wide, int count, int32_t* sums) {
    Ints total[kPanelVectors];
    for (int v = 0; v < kPanelVectors; v++) total[v] = load_ints(sums + v * kLanes);
    for (int i = 0; i < count; i++) {
        const int8_t* quad = panel + wide[i].k / 4 * kQuadBytes;
        const int left = 24 - wide[i].k % 4 * 8;  // brings the weight's byte to the top of its 32 bits
        for (int v = 0; v < kPanelVectors; v++)
            total[v] += ((load_ints(quad + v * kLanes * 4) << left) >> 24) * wide[i].rest;
    }
    std::memcpy(sums, total, sizeof total);
}

// ---------------------------------------------------------------------------------------------------------------------
// The whole operation: chunks of rows times panels of columns, in tasks that threads share.

struct Product {
    const LinearOp& op;
    const QuantisedRows& x;
    int32_t* sums;    // [factors][rows of a chunk or of a block][kPanel], this thread's
    int sums_rows;
    int num_factors;  // weights that are multiplied: 1, or 2 with a gate

    const int8_t* panel_of(int factor, int panel) const {
        const void* weight = factor == 0 ? op.weight : op.weight2;
        return static_cast<const int8_t*>(weight) + static_cast<size_t>(panel) * kPanel * padded_k(op.k);
    }

    // Rows first..last-1 times one panel. `next`: the panel that this thread will meet after it.
    void run(int first, int last, int panel, int next) const {
        const int column = panel * kPanel;
        const int count = std::min(kPanel, op.n - column);
        const Columns one(op.scale, op.bias, op.sums, column, count);
        const Columns two = num_factors == 1 ? one : Columns(op.scale2, op.bias2, op.sums2, column, count);
        const int k = padded_k(op.k);
        for (int begin = 0; begin < k; begin += kKBlock) {
            const int end = std::min(begin + kKBlock, k);
            for_blocks(first, last, [&](int row, int rows, int part, int parts) {
                int32_t* block = sums + (k > kKBlock ? (row - first) * kPanel : 0);
                if (end == k)
                    for (int r = 0; r < rows; r++) fetch_y(op, row + r, column);
                for (int factor = 0; factor < num_factors; factor++) {
                    const int8_t* weights = panel_of(factor, panel) + begin * kPanel;
                    const int8_t* later = end < k ? weights + kKBlock * kPanel : panel_of(factor, next);
                    multiply(row, rows, weights, begin, end, part_of(later, part, parts, end - begin),
                             block + factor * sums_rows * kPanel);
                }
                if (end == k)
                    for (int r = 0; r < rows; r++) finish(row + r, panel, count, one, two, block + r * kPanel);
            });
        }
    }

    void multiply(int row, int rows, const int8_t* weights, int begin, int end, Ahead ahead, int32_t* block) const {
        const MultiplyBlock kernel = best_block(rows);
        kernel(x.data + row * x.stride + begin, x.stride, weights, (end - begin) / 4, ahead, block, begin == 0);
    }

    // What block `part` of `parts` blocks of rows asks for of the weights to come.
    static Ahead part_of(const int8_t* weights, int part, int parts, int k) {
        const int lines = divide_up(kStepQuads * kQuadBytes / 64, parts);
        return {weights + static_cast<size_t>(k / 4 / kStepQuads) * lines * 64 * part, lines};
    }

    // Blocks of equal height, near enough: one of 12 rows and one of 1 would be slower than 7 and 6.
    template <class F>
    static void for_blocks(int first, int last, F&& f) {
        const int blocks = divide_up(last - first, kTallest);
        const int height = divide_up(divide_up(last - first, blocks), kRowMultiple) * kRowMultiple;
        for (int i = 0, row = first; row < last; i++, row += height) f(row, std::min(height, last - row), i, blocks);
    }

    void finish(int row, int panel, int count, const Columns& one, const Columns& two, int32_t* block) const {
        for (int factor = 0; factor < num_factors && x.num_wide[row] > 0; factor++)
            add_wide(panel_of(factor, panel), x.wide + static_cast<size_t>(row) * x.most_wide, x.num_wide[row],
                     block + factor * sums_rows * kPanel);
        PanelRow result = one.result(block, x.scale[row]);
        if (num_factors == 2)
            result = combine(op.epilogue, result, two.result(block + sums_rows * kPanel, x.scale[row]));
        const size_t at = static_cast<size_t>(row) * op.y_stride + panel * kPanel;
        if (op.epilogue == Epilogue::kAdd) add_row(static_cast<float*>(op.y) + at, count, op.factor, result);
        else if (op.y_type == Type::kFloat32) store_row(static_cast<float*>(op.y) + at, count, result);
        else store_row(static_cast<bf16*>(op.y) + at, count, result);
    }
};

// How an operation is cut, and where things lie in its scratch memory. Nothing of it changes a result.
struct Plan {
    int rows;
    int chunks;           // of rows
    int chunk_rows;       // at most
    int num_factors;
    int sums_rows;        // of a thread's sums
    size_t copy_bytes;    // of one copy of the quantised rows
    size_t sums_bytes;    // of a thread's sums
    bool own_copies;      // each thread has its own

    Plan(const LinearOp& op, const Step& step, int num_threads) {
        rows = op.rows == Rows::kTokens ? step.num_tokens : step.num_sampled;
        const size_t k_bytes = std::min<size_t>(padded_k(op.k), kKBlock) * sizeof(Stored);
        const int most = std::max<int>(kChunkBytes / k_bytes / kTallest * kTallest, kTallest);
        chunks = divide_up(rows, most);
        chunk_rows = chunks == 0 ? 0 : divide_up(divide_up(rows, chunks), kRowMultiple) * kRowMultiple;
        num_factors = op.epilogue == Epilogue::kSiluMul || op.epilogue == Epilogue::kGeluMul ? 2 : 1;
        sums_rows = padded_k(op.k) > kKBlock ? chunk_rows + kTallest : kTallest;
        copy_bytes = QuantisedRows::bytes(rows + kRowMultiple - 1, op.k);
        sums_bytes = static_cast<size_t>(num_factors) * sums_rows * kPanel * 4;
        own_copies = num_threads > 1 && rows <= kOwnCopyRows;
    }

    size_t bytes(int num_threads) const { return sums_bytes * num_threads + copy_bytes * (own_copies ? num_threads : 1); }
    char* sums(char* scratch, int rank) const { return scratch + sums_bytes * rank; }
    char* copy(char* scratch, const Worker& worker) const {
        return scratch + sums_bytes * worker.size + (own_copies ? copy_bytes * worker.rank : 0);
    }
};

inline void quantise(Worker& worker, const LinearOp& op, const Plan& plan, QuantisedRows& x) {
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
    int8::QuantisedRows x(plan.copy(scratch, worker), plan.rows, op.k);
    int8::quantise(worker, op, plan, x);
    const int8::Product product{op, x, reinterpret_cast<int32_t*>(plan.sums(scratch, worker.rank)), plan.sums_rows,
                                plan.num_factors};
    const int panels = num_panels(op.n);
    auto run = [&](int i, int next) {
        const int first = i / panels * plan.chunk_rows;
        product.run(first, std::min(first + plan.chunk_rows, plan.rows), i % panels, next % panels);
    };
    tiles_begin();
    int mine = -1;  // taken, but not begun: one task late, a thread knows what it will need next
    worker.share(panels * plan.chunks, 1, [&](int i, int) {
        if (mine >= 0) run(mine, i);
        mine = i;
    });
    if (mine >= 0) run(mine, mine);
    tiles_end();
}

}  // namespace llmb
