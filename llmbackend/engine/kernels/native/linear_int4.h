// y = x·Wᵀ on vectors or tiles with 4-bit weights in groups of 32 along k, and activations that are quantised row by row on
// the fly (quantised_rows.h).
//
// Used by linear.h. Invariants: a group's sum is an integer and exact; then acc = fma(sum, scale, acc) for ascending
// groups, wide elements after them, and y = fma(acc, scale of the row, bias). So outputs do not depend on the division
// into rows and columns, or on the instruction set, if it has fused operations.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "epilogue.h"
#include "epilogue_int8.h"
#include "float16.h"
#include "linear_block.h"
#include "linear_int8.h"
#include "memory.h"
#include "numbers.h"
#include "pack_int4.h"
#include "panel_product.h"
#include "quantised_rows.h"
#include "step.h"
#include "team.h"
#include "tile_groups.h"

namespace llmb::int4 {

using int8::load_int;
using int8::padded_k;
using int8::Wide;

// Rows of x as signed bytes, in the order of k.
struct SignedOrder {
    using Stored = int8_t;
    static size_t stride_of(int k) { return (padded_k(k) / 64 | 1) * 64; }
    static int padded_rows(int rows) { return rows + kRowsRead; }
    static Stored* row(Stored* data, int row, size_t stride) { return data + row * stride; }
};

inline int32_t sum_of_bytes(const int8_t* bytes, int count) {
    int32_t total = 0;
    for (int i = 0; i < count; i++) total += bytes[i];
    return total;
}

inline int32_t bits_of(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

// to[i] = from[order[i]]
template <class X>
void gather(X from, const int32_t* order, int k, float* to) {
    for (int i = 0; i < k; i++) to[i] = to_float(from[order[i]]);
}

// The quantised rows, and for each group the factor of the weights' zero or minimum. A group's sums of products start
// at -kZero * Σx, as integers; zero points are multiplied by -Σx, minima by Σx as float32. Σx includes the excess of
// wide elements over 127, except with kInt4Zero, whose -Σx must fit in 16 bits.
struct GroupedRows : int8::QuantisedRows<SignedOrder> {
    int32_t* begins;  // [rows][groups]; for kInt4Min: bits of float32
    int groups;
    float* ordered;  // [k], of this thread: a row in the weights' order, if they have one

    GroupedRows(Carver& memory, int rows, int k, float* ordered = nullptr)
        : QuantisedRows(memory, rows, k, int8::kNarrowFine), groups(num_groups(k)), ordered(ordered) {
        begins = memory.take<int32_t>(static_cast<size_t>(rows) * groups);
    }
    static size_t bytes(int rows, int k) {
        Carver counted(nullptr);
        const GroupedRows taken(counted, rows, k);
        return counted.used();
    }
    void fill(const LinearOp& op, int row) {
        QuantisedRows::fill(op.order ? in_order(op, row) : op, row);
        const int8_t* own = data + row * stride;
        int32_t* own_begins = begins + static_cast<size_t>(row) * groups;
        for (int group = 0; group < groups; group++) own_begins[group] = sum_of_bytes(own + group * kGroup, kGroup);
        if (op.weight_type != Type::kInt4Zero) add_rests(row, kGroup, own_begins);
        for (int group = 0; group < groups; group++) {
            int32_t& begin = own_begins[group];
            if (op.weight_type == Type::kInt4Min) begin = bits_of(static_cast<float>(begin));
            else begin *= op.weight_type == Type::kInt4Zero ? -1 : -kZero;
        }
    }

  private:
    // The same operation on this one row in the weights' order, whatever its index.
    LinearOp in_order(LinearOp op, int row) const {
        const size_t at = static_cast<size_t>(row) * op.x_stride;
        if (op.x_type == Type::kFloat32) gather(static_cast<const float*>(op.x) + at, op.order, op.k, ordered);
        else if (op.x_type == Type::kBfloat16) gather(static_cast<const bf16*>(op.x) + at, op.order, op.k, ordered);
        else gather(TileRow<const bf16>(static_cast<const bf16*>(op.x), row, op.x_stride), op.order, op.k, ordered);
        op.x = ordered;
        op.x_type = Type::kFloat32;
        op.x_stride = 0;
        return op;
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// The sum of one group: unsigned numbers of the weights times signed ones of x, a quad of k at a time.

#if defined(LLMB_HAS_VNNI)
struct GroupSum {
    Ints sum = {};
    void begin(const int32_t* whole) { sum = Ints{} + *whole; }
    void add(Ints numbers, Ints x) { sum = int8::dot(sum, numbers, x); }
    Ints total() const { return sum; }
};
#elif defined(__AVX2__)
// In 16 bits: 8 times two products of up to 15 * 127.
struct GroupSum {
    Ints first = {};
    void begin(const int32_t* whole) { first = Ints{} + *whole; }
#if defined(__AVX512BW__)
    __m512i sum = {};
    void add(Ints numbers, Ints x) { sum = _mm512_add_epi16(sum, _mm512_maddubs_epi16((__m512i)numbers, (__m512i)x)); }
    Ints total() const { return first + (Ints)_mm512_madd_epi16(sum, _mm512_set1_epi16(1)); }
#else
    __m256i sum = {};
    void add(Ints numbers, Ints x) {
        sum = (__m256i)pinned((Ints)_mm256_add_epi16(sum, _mm256_maddubs_epi16((__m256i)numbers, (__m256i)x)));
    }
    Ints total() const { return first + (Ints)_mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
#endif
};
#else
struct GroupSum {
    Ints sum = {};
    void begin(const int32_t* whole) { sum = Ints{} + *whole; }
    void add(Ints numbers, Ints x) {
        for (int byte = 0; byte < 32; byte += 8) sum += (numbers >> byte & 15) * (x << (24 - byte) >> 24);
    }
    Ints total() const { return sum; }
};
#endif

// One byte per column.
inline Ints load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
    Ints bytes;
    for (int i = 0; i < kLanes; i++) bytes[i] = p[i];
    return bytes;
#endif
}

// sum + zeros * factor; both fit in 16 bits, and zeros are not negative.
inline Ints add_zeros(Ints sum, Ints zeros, int32_t factor) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)zeros, _mm512_set1_epi32(factor));
#elif defined(__AVX512BW__)
    return sum + (Ints)_mm512_madd_epi16((__m512i)zeros, _mm512_set1_epi32(factor));
#elif defined(__AVX2__)
    return sum + (Ints)_mm256_madd_epi16((__m256i)zeros, _mm256_set1_epi32(factor));
#else
    return sum + zeros * factor;
#endif
}

// Rows whose sums fit in registers, and the vectors of columns for that many rows. kInMemory: with 16 registers, more
// columns fit if the sums of previous groups are kept in memory.
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(LLMB_HAS_VNNI)
constexpr int kMaxBlock = 4;
constexpr int vectors_of(int) { return 2; }
constexpr bool kInMemory = true;
#else
#if defined(__AVX512F__)
constexpr int kMaxBlock = 12;
#else
constexpr int kMaxBlock = 6;
#endif
constexpr int vectors_of(int rows) { return rows <= kMaxBlock / 2 ? 2 : 1; }
constexpr bool kInMemory = false;
#endif

// Forces x out of registers at this point.
template <bool kStore, class T>
LLMB_INLINE inline void keep_in_memory(T& x) {
    if constexpr (kStore) asm volatile("" : "+m"(x));
}

// One weight's part of one panel.
struct Panel {
    const uint8_t* numbers;
    const uint16_t* scales;
    const uint16_t* mins = nullptr;  // for kInt4Min
    const uint8_t* zeros = nullptr;  // for kInt4Zero

    Panel(const LinearOp& op, bool second, int panel) {
        const size_t groups = num_groups(op.k), at = panel * groups * kPanel;
        numbers = static_cast<const uint8_t*>(second ? op.weight2 : op.weight) + panel * groups * kGroupBytes;
        scales = reinterpret_cast<const uint16_t*>(second ? op.scale2 : op.scale) + at;
        const int32_t* offsets = second ? op.sums2 : op.sums;
        if (op.weight_type == Type::kInt4Min) mins = reinterpret_cast<const uint16_t*>(offsets) + at;
        if (op.weight_type == Type::kInt4Zero) zeros = reinterpret_cast<const uint8_t*>(offsets) + at;
    }
};

using int8::kNearBytes;
using int8::kStreamRows;
using panels::repeat;

// The sums of one group, in kChains parts, to have more products in flight if rows are few.
template <int kRows, int kVectors, int kChains>
struct Sums {
    GroupSum sums[kRows][kVectors][kChains];

    Ints total(int row, int vector) const {
        Ints whole = sums[row][vector][0].total();
        if constexpr (kChains == 2) whole += sums[row][vector][1].total();
        return whole;
    }
};

// out[r][column] = the row's product with kVectors vectors of columns from `column` on, without the row's scale.
template <int kRows, int kVectors, Type kType>
void multiply(const GroupedRows& x, int row, const Panel& panel, int column, float (*out)[kPanel]) {
    constexpr int kChains = kRows <= 2 ? 2 : 1;  // few rows: more sums in flight
    constexpr bool kMins = kType == Type::kInt4Min, kZeros = kType == Type::kInt4Zero;
    Floats acc[kRows][kVectors] = {};
    const int8_t* own = x.data + row * x.stride;
    const int32_t* begins = x.begins + static_cast<size_t>(row) * x.groups;
    for (int group = 0; group < x.groups; group++, begins++) {
        keep_in_memory<kInMemory && kRows >= 3>(acc);
        Sums<kRows, kVectors, kChains> part;
#pragma GCC unroll 12
        for (int r = 0; r < kRows; r++)
            for (int v = 0; v < kVectors && !kMins && !kZeros; v++) part.sums[r][v][0].begin(begins + r * x.groups);
        const uint8_t* numbers = panel.numbers + group * kGroupBytes + column * 4;
        repeat<kGroup / 8>([&](auto i) LLMB_INLINE {
            Ints low[kVectors], high[kVectors];
            repeat<kVectors>([&](auto v) LLMB_INLINE {
                const uint8_t* at = numbers + i * kPanel * 4 + v * kLanes * 4;
                if constexpr (kRows > kStreamRows) __builtin_prefetch(at + kNearBytes, 0, 3);
                const Ints both = load_ints(at);
                low[v] = both & 0x0f0f0f0f;
                high[v] = both >> 4 & 0x0f0f0f0f;
            });
            repeat<kRows>([&](auto r) LLMB_INLINE {
                const int8_t* quads = own + r * x.stride + group * kGroup + i * 8;
                const Ints first = Ints{} + load_int(quads), second = Ints{} + load_int(quads + 4);
                repeat<kVectors>([&](auto v) LLMB_INLINE {
                    part.sums[r][v][0].add(low[v], first);
                    part.sums[r][v][kChains - 1].add(high[v], second);
                });
            });
        });
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; v++) {
            const size_t at = static_cast<size_t>(group) * kPanel + column + v * kLanes;
            const Floats scale = load_float16(panel.scales + at);
            const Floats min = kMins ? load_float16(panel.mins + at) : Floats{};
            const Ints zeros = kZeros ? load_bytes(panel.zeros + at) : Ints{};
#pragma GCC unroll 12
            for (int r = 0; r < kRows; r++) {
                Ints total = part.total(r, v);
                if constexpr (kZeros) total = add_zeros(total, zeros, begins[r * x.groups]);
                acc[r][v] = fma(__builtin_convertvector(total, Floats), scale, acc[r][v]);
                if constexpr (kMins) acc[r][v] = fma((Floats)(Ints{} + begins[r * x.groups]), min, acc[r][v]);
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; v++) store(out[r] + column + v * kLanes, acc[r][v]);
}

template <int kRows, Type kType>
void multiply_panel(const GroupedRows& x, int row, const Panel& panel, float (*out)[kPanel]) {
    constexpr int kVectors = vectors_of(kRows);
    for (int column = 0; column < kPanel; column += kVectors * kLanes)
        multiply<kRows, kVectors, kType>(x, row, panel, column, out);
}

using MultiplyPanel = void (*)(const GroupedRows&, int, const Panel&, float (*)[kPanel]);

template <Type kType>
MultiplyPanel panel_function(int rows) {
    static constexpr auto table = []<int... R>(std::integer_sequence<int, R...>) {
        return std::array<MultiplyPanel, kMaxBlock>{multiply_panel<R + 1, kType>...};
    }(std::make_integer_sequence<int, kMaxBlock>{});
    return table[rows - 1];
}

#if defined(LLMB_HAS_TILES)

// A panel for tile_groups.h.
template <Type kType>
struct TiledPanel {
    static constexpr int kGroup = int4::kGroup;
    static constexpr bool kHasBegins = true;
    const Panel& panel;
    int groups;

    void put(int group, char* to) const {
        const uint8_t* from = panel.numbers + static_cast<size_t>(group) * kGroupBytes;
        for (int i = 0; i < kGroup / 8; i++, to += 2 * kPanel * 4)
            for (int v = 0; v < kPanelVectors; v++, from += sizeof(Ints)) {
                __builtin_prefetch(from + kNearBytes, 0, 3);
                const Ints both = load_ints(from), low = both & 0x0f0f0f0f, high = both >> 4 & 0x0f0f0f0f;
                std::memcpy(to + v * sizeof(Ints), &low, sizeof low);
                std::memcpy(to + kPanel * 4 + v * sizeof(Ints), &high, sizeof high);
            }
    }

    struct Columns {
        Floats scale, min;
        Ints zeros;
        LLMB_INLINE Floats add(Ints sum, int32_t begin, Floats acc) const {
            if constexpr (kType == Type::kInt4) sum += begin;
            if constexpr (kType == Type::kInt4Zero) sum = add_zeros(sum, zeros, begin);
            acc = fma(__builtin_convertvector(sum, Floats), scale, acc);
            if constexpr (kType == Type::kInt4Min) acc = fma((Floats)(Ints{} + begin), min, acc);
            return acc;
        }
    };
    Columns columns(int group, int column) const {
        const size_t at = static_cast<size_t>(group) * kPanel + column;
        const Floats min = kType == Type::kInt4Min ? load_float16(panel.mins + at) : Floats{};
        return {load_float16(panel.scales + at), min, kType == Type::kInt4Zero ? load_bytes(panel.zeros + at) : Ints{}};
    }
};

template <Type kType>
void multiply_on_tiles(const GroupedRows& x, int row, int rows, const Panel& panel, float (*out)[kPanel]) {
    const auto* first = reinterpret_cast<const char*>(x.data + row * x.stride);
    const tile::WholeRows own{static_cast<ptrdiff_t>(x.stride), first};
    const int32_t* begins = x.begins + static_cast<size_t>(row) * x.groups;
    tile::multiply_groups(TiledPanel<kType>{panel, x.groups}, own, rows, begins, out);
}

#endif

// Adds the excess of a wide element over 127, times its weights' numbers, minus their zero points if Σx does not
// include it.
template <Type kType>
LLMB_INLINE inline void add_wide(const Panel& panel, const Wide& wide, PanelRow& sums) {
    const int group = wide.k / kGroup, shift = wide.k % 4 * 8 + wide.k % 8 / 4 * 4;
    const uint8_t* numbers = panel.numbers + static_cast<size_t>(wide.k / 8) * kPanel * 4;
    for (int v = 0; v < kPanelVectors; v++) {
        const size_t at = static_cast<size_t>(group) * kPanel + v * kLanes;
        Ints number = load_ints(numbers + v * kLanes * 4) >> shift & 15;
        if constexpr (kType == Type::kInt4Zero) number -= load_bytes(panel.zeros + at);
        sums.v[v] = fma(__builtin_convertvector(number * wide.rest, Floats), load_float16(panel.scales + at), sums.v[v]);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The whole operation: chunks of rows times panels of columns, in tasks shared by threads.

inline int most_rows(int k) { return int8::most_rows(padded_k(k), kMaxBlock); }

// How an operation is divided, and where its rows are in scratch memory. Does not affect results.
struct Plan : int8::RowPlan {
    size_t ordered_bytes;  // of a thread's row in the weights' order

    Plan(const LinearOp& op, const Step& step, int num_threads)
        : RowPlan(num_rows(op.rows, step), most_rows(op.k), GroupedRows::bytes(num_rows(op.rows, step), op.k), num_threads),
          ordered_bytes(op.order ? sizeof(float) * padded_k(op.k) : 0) {}
    size_t bytes(int num_threads) const { return ordered_bytes * num_threads + copies_bytes(num_threads); }
    float* ordered(char* scratch, int rank) const { return reinterpret_cast<float*>(scratch + ordered_bytes * rank); }
    char* copy(char* scratch, const Worker& worker) const { return copy_of(scratch + ordered_bytes * worker.size, worker.rank); }
};

struct Product {
    const LinearOp& op;
    const GroupedRows& x;

    // Rows first..last-1 times one panel.
    void run(int first, int last, int panel) const {
        const Panel one(op, false, panel), two(op, is_gated(op.epilogue), panel);
        multiply_rows<kMaxBlock, false>(op, first, last, panel, x.scale, [&](int row, int rows, bool second, float (*sums)[kPanel]) {
            multiply_block(row, rows, second ? two : one, sums);
        });
    }

    void multiply_block(int row, int rows, const Panel& panel, float (*sums)[kPanel]) const {
        if (panel.mins) multiply_block<Type::kInt4Min>(row, rows, panel, sums);
        else if (panel.zeros) multiply_block<Type::kInt4Zero>(row, rows, panel, sums);
        else multiply_block<Type::kInt4>(row, rows, panel, sums);
    }

    template <Type kType>
    void multiply_block(int row, int rows, const Panel& panel, float (*sums)[kPanel]) const {
#if defined(LLMB_HAS_TILES)
        if (rows > kMaxBlock) multiply_on_tiles<kType>(x, row, rows, panel, sums);
        else
#endif
            panel_function<kType>(rows)(x, row, panel, sums);
        for (int r = 0; r < rows; r++)
            add_each_wide(x, row + r, sums[r], [&](const Wide& wide, PanelRow& own) LLMB_INLINE { add_wide<kType>(panel, wide, own); });
    }
};

}  // namespace llmb::int4

namespace llmb {

inline bool is_int4(Type type) { return type == Type::kInt4 || type == Type::kInt4Min || type == Type::kInt4Zero; }

inline size_t linear_int4_scratch_bytes(const LinearOp& op, const Step& step, int num_threads) {
    return int4::Plan(op, step, num_threads).bytes(num_threads);
}

inline void linear_int4(Worker& worker, const LinearOp& op, const Step& step, char* scratch) {
    const int4::Plan plan(op, step, worker.size);
    Carver copy(plan.copy(scratch, worker));
    int4::GroupedRows x(copy, plan.rows, op.k, plan.ordered(scratch, worker.rank));
    int8::quantise(worker, op, plan, x);
    const int4::Product product{op, x};
    const size_t panel_bytes = x.groups * int4::kGroupBytes;
    share_panels(worker, op, plan, panel_bytes, [&](int first, int last, int panel) { product.run(first, last, panel); });
}

}  // namespace llmb
