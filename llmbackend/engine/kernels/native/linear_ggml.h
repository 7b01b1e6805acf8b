// y = x·Wᵀ on vectors or tiles with weights of GGUF types (ggml_forms.h), and activations that are quantised row by row on
// the fly (quantised_rows.h).
//
// Used by linear.h. Invariant: the sums of a group and, in super-blocks of 256 k, their combinations with integer
// scales and minima are integers and exact; then acc = fma(sum, scale, acc) for ascending blocks, then minima, wide
// elements after all blocks, and y = fma(acc, scale of the row, bias). So outputs do not depend on the division into
// rows and columns, or on the instruction set, if it has fused operations.
//
// No integer overflows: a group's sum is at most 32 * 255 * 127; times a scale of 32, or 16 * 63 * 127 times one of
// 128, and added up over 256 k, it is less than 2^28, and so is what the zero subtracts from it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "epilogue.h"
#include "epilogue_int8.h"
#include "float16.h"
#include "ggml_forms.h"
#include "integer_dots.h"
#include "linear_int4.h"
#include "linear_int8.h"
#include "memory.h"
#include "numbers.h"
#include "panel_product.h"
#include "quantised_rows.h"
#include "step.h"
#include "team.h"
#include "tile_groups.h"

namespace llmb::ggml {

using int4::keep_in_memory;
using int8::kNearBytes;
using int8::kStreamRows;
using int8::load_int;
using int8::Wide;
using panels::repeat;

// Rows whose sums, of groups and of a super-block, fit in registers, with kVectors vectors of columns.
#if defined(__AVX512F__)
constexpr int kMaxBlock = 8;
constexpr int vectors_of(int) { return 2; }
#elif defined(__AVX2__)
constexpr int kMaxBlock = kByPairs ? 4 : 6;
constexpr int vectors_of(int rows) { return kByPairs || rows <= 3 ? 2 : 1; }
#else
constexpr int kMaxBlock = 4;
constexpr int vectors_of(int) { return 1; }
#endif

// Whether many rows are worth unpacking a panel once: with AVX2 alone, where a register's products take two instructions and
// unpacking numbers of 6 bits takes seven. With AVX512_VNNI it is slower (0.75 to 0.95 x), since a block has more rows.
constexpr bool kUnpacks = int4::kInMemory;

// Whether numbers are unpacked to 16 bits: products of larger ones take fewer instructions so.
constexpr bool unpacks_shorts(const Form& form) { return kUnpacks && is_offset(form.largest()) && !form.is_super(); }

// The quantised rows, and the sums of their integers, by which zeros and minima are multiplied.
struct Rows : int8::QuantisedRows<int4::SignedOrder> {
    // Initial values of a row's products, or factors of the minima: [rows][per_row].
    //   without minima  -zero * sum of a group; in super-blocks as `begin_of` says
    //   with minima     the sum of a block as float32; in super-blocks the sums of two groups, as int16
    // The sum of a block includes what wide elements have beyond 127; in super-blocks, terms of their own add that.
    int32_t* sums;
    int per_row;
    int blocks;
    Form form;
    int16_t* shorts = nullptr;  // with unpacks_shorts, of many rows: the integers, quads in the order 0 2 1 3

    Rows(Carver& memory, int rows, const LinearOp& op) : QuantisedRows(memory, rows, op.k, int8::kNarrowFine), form(form_of(op.weight_type)) {
        blocks = op.k / form.block;
        per_row = blocks * form.sums();
        sums = memory.take<int32_t>(static_cast<size_t>(rows) * per_row);
        if (unpacks_shorts(form) && rows >= kFewestUnpacked<kMaxBlock>) shorts = memory.take<int16_t>(rows * stride);
    }
    static size_t bytes(int rows, const LinearOp& op) {
        Carver counted(nullptr);
        const Rows taken(counted, rows, op);
        return counted.used();
    }
    const int32_t* sums_of(int row) const { return sums + static_cast<size_t>(row) * per_row; }

    void fill(const LinearOp& op, int row) {
        QuantisedRows::fill(op, row);
        int32_t* own = sums + static_cast<size_t>(row) * per_row;
        if (form.is_super()) fill_super(data + row * stride, op.k, own);
        else fill_plain(row, own);
        if (shorts) fill_shorts(data + row * stride, op.k, shorts + row * stride);
    }

  private:
    static void fill_shorts(const int8_t* x, int k, int16_t* own) {
        for (int i = 0; i < k; i += 4) {
            own[i] = x[i];
            own[i + 1] = x[i + 2];
            own[i + 2] = x[i + 1];
            own[i + 3] = x[i + 3];
        }
    }

    void fill_plain(int row, int32_t* own) const {
        for (int i = 0; i < blocks; i++) own[i] = is_offset(form.largest()) ? 0 : int4::sum_of_bytes(data + row * stride + i * kUnit, kUnit);
        add_rests(row, kUnit, own);
        for (int i = 0; i < blocks; i++)
            own[i] = form.mins ? int4::bits_of(static_cast<float>(own[i])) : -form.zero * own[i];
    }

    void fill_super(const int8_t* x, int k, int32_t* own) const {
        for (int group = 0; group < k / form.group; group++) {
            const int32_t total = int4::sum_of_bytes(x + group * form.group, form.group);
            const int16_t narrow = static_cast<int16_t>(total);
            if (form.mins) std::memcpy(reinterpret_cast<char*>(own) + 2 * group, &narrow, sizeof narrow);
            else own[group] = begin_of(form.zero, total, form.largest());
        }
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// The contents of a panel, as vectors of columns.

// Quad i of a unit.
template <Form kForm>
LLMB_INLINE inline Ints numbers_of(const uint8_t* unit, int column, int i) {
    const uint8_t* low_row = unit + (kForm.high + i * kForm.low / 8) * Form::kRowBytes + column * 4;
    if constexpr (kForm.low == 8) return load_ints(low_row);
    Ints numbers = load_ints(low_row) >> i * kForm.low % 8 & static_cast<int32_t>(0x01010101u * ((1u << kForm.low) - 1));
    if constexpr (kForm.table != Table::kNone) return look_up(values_of(kForm.table), numbers);
    if constexpr (kForm.high > 0) {
        const Ints high = load_ints(unit + i * kForm.high / 8 * Form::kRowBytes + column * 4);
        const int left = kForm.low - i * kForm.high % 8;
        numbers |= (left < 0 ? high >> -left : high << left) & static_cast<int32_t>(0x01010101u * (((1u << kForm.high) - 1) << kForm.low));
    }
    return numbers;
}

template <Form kForm>
LLMB_INLINE inline void fetch_unit(const uint8_t* unit) {
    for (size_t byte = 0; byte < kForm.unit_bytes(); byte += 64) __builtin_prefetch(unit + kNearBytes + byte, 0, 3);
}

// Quads begin..end-1 of a unit, as bytes: [quad][column][4].
template <Form kForm>
LLMB_INLINE inline void unpack(const uint8_t* unit, int begin, int end, char* to) {
#pragma GCC unroll 8
    for (int quad = begin; quad < end; quad++)
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVectors; v++, to += sizeof(Ints)) {
            const Ints numbers = numbers_of<kForm>(unit, v * kLanes, quad);
            std::memcpy(to, &numbers, sizeof numbers);
        }
}

template <Form kForm>
LLMB_INLINE inline Floats scales_of(const uint8_t* block, int column) {
    const uint8_t* at = block + column * 2;
    if constexpr (kForm.brain_scale) return load(reinterpret_cast<const bf16*>(at));
    else return load_float16(reinterpret_cast<const uint16_t*>(at));
}

template <Form kForm>
LLMB_INLINE inline Floats mins_of(const uint8_t* block, int column) {
    return load_float16(reinterpret_cast<const uint16_t*>(block + kForm.min_at() + column * 2));
}

// The integers of two groups, in the low and in the high half of a lane: those of scales,
template <Form kForm>
LLMB_INLINE inline Ints group_scales(const uint8_t* block, int column, int pair) {
    return load_byte_pairs(block + kForm.group_at(pair) + column * 2);
}

// and those of minima.
template <Form kForm>
LLMB_INLINE inline Ints group_mins(const uint8_t* block, int column, int pair) {
    return load_byte_pairs(block + kForm.group_min_at(pair) + column * 2);
}

// ---------------------------------------------------------------------------------------------------------------------
// Units of 256 k, with their numbers as bytes.
struct Unpacked {
    static constexpr int kUnits = kSuper / kUnit;
    static constexpr size_t kUnitBytes = static_cast<size_t>(kUnit) * int8::kColumns;
    alignas(64) char units[kUnits][kUnitBytes];

    // Of blocks first..last-1.
    template <Form kForm>
    void fill(const uint8_t* panel, int first, int last) {
        char* to = units[0];
        for (int block = first; block < last; block++)
            for (int i = 0; i < kForm.units(); i++, to += kUnitBytes) {
                const uint8_t* unit = panel + block * kForm.bytes() + kForm.unit_at(i);
                fetch_unit<kForm>(unit);
                unpack<kForm>(unit, 0, kUnit / 4, to);
            }
    }
};

// The product of kRows rows and kVectors vectors of columns from `column` on, without the rows' scales. kUnpacked: numbers
// are read from `unpacked`, which has those of the blocks that `run` gets.
template <Form kForm, int kRows, int kVectors, bool kUnpacked = false>
struct Tile {
    static constexpr bool kStores = int4::kInMemory && kRows >= 3;

    const Rows& x;
    int row;
    int column;
    const Unpacked* unpacked = nullptr;

    using Runs = RunSum<kForm.largest(), !kForm.is_super() && kRows <= 2 ? 2 : 1>[kRows][kVectors];

    LLMB_INLINE const uint8_t* unit_of(const uint8_t* block, int index, int unit) const {
        constexpr int kBlocks = kSuper / kForm.block;
        if constexpr (kUnpacked) return reinterpret_cast<const uint8_t*>(unpacked->units[index % kBlocks * kForm.units() + unit]);
        return block + kForm.unit_at(unit);
    }

    LLMB_INLINE static Ints quad_of(const uint8_t* unit, int column, int i) {
        if constexpr (kUnpacked) return load_ints(unit + (i * int8::kColumns + column) * 4);
        return numbers_of<kForm>(unit, column, i);
    }

    // Multiplies kQuads quads of a unit from quad kBegin on.
    template <int kBegin, int kQuads>
    LLMB_INLINE void multiply(const uint8_t* unit, const int8_t* rows, Runs& runs) const {
        repeat<kQuads>([&](auto i) LLMB_INLINE {
            Ints numbers[kVectors];
            repeat<kVectors>([&](auto v) LLMB_INLINE { numbers[v] = quad_of(unit, column + v * kLanes, kBegin + i); });
            repeat<kRows>([&](auto r) LLMB_INLINE {
                const Ints quad = Ints{} + load_int(rows + r * x.stride + (kBegin + i) * 4);
                repeat<kVectors>([&](auto v) LLMB_INLINE { runs[r][v].add(i, numbers[v], quad); });
            });
        });
    }

    LLMB_INLINE void fetch(const uint8_t* unit) const {
        if constexpr (kRows > kStreamRows && !kUnpacked)
            for (int i = 0; i < kForm.low + kForm.high; i++)
                for (int v = 0; v < kVectors; v++)
                    __builtin_prefetch(unit + i * Form::kRowBytes + (column + v * kLanes) * 4 + kNearBytes, 0, 3);
    }

    LLMB_INLINE void add_block(const uint8_t* block, int index, Floats (&acc)[kRows][kVectors]) const {
        keep_in_memory<kStores>(acc);
        if constexpr (kForm.is_super()) add_super(block, index, acc);
        else add_plain(block, index, acc);
    }

    LLMB_INLINE void add_plain(const uint8_t* block, int index, Floats (&acc)[kRows][kVectors]) const {
        constexpr int kRun = run_quads(kForm.largest(), kUnit / 4);
        const int32_t* sums = x.sums_of(row) + index;
        Ints whole[kRows][kVectors];
        repeat<kRows * kVectors>([&](auto i) LLMB_INLINE {
            whole[i / kVectors][i % kVectors] = kForm.mins ? Ints{} : Ints{} + sums[i / kVectors * x.per_row];
        });
        const uint8_t* unit = unit_of(block, index, 0);
        fetch(unit);
        repeat<kUnit / 4 / kRun>([&](auto part) LLMB_INLINE {
            keep_in_memory<kStores && (kRun > 1)>(whole);
            Runs runs;
            repeat<kRows * kVectors>([&](auto i) LLMB_INLINE {
                runs[i / kVectors][i % kVectors].begin(whole[i / kVectors][i % kVectors]);
            });
            multiply<part * kRun, kRun>(unit, x.data + row * x.stride + index * kUnit, runs);
            repeat<kRows * kVectors>([&](auto i) LLMB_INLINE {
                whole[i / kVectors][i % kVectors] = runs[i / kVectors][i % kVectors].total();
            });
        });
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; v++) {
            const Floats scale = scales_of<kForm>(block, column + v * kLanes);
            const Floats min = kForm.mins ? mins_of<kForm>(block, column + v * kLanes) : Floats{};
#pragma GCC unroll 12
            for (int r = 0; r < kRows; r++) {
                acc[r][v] = fma(__builtin_convertvector(whole[r][v], Floats), scale, acc[r][v]);
                if constexpr (kForm.mins) acc[r][v] = fma((Floats)(Ints{} + sums[r * x.per_row]), min, acc[r][v]);
            }
        }
    }

    // Minima first: reads everything in memory order.
    LLMB_INLINE void add_super(const uint8_t* block, int index, Floats (&acc)[kRows][kVectors]) const {
        const int32_t* sums = x.sums_of(row) + index * kForm.sums();
        if constexpr (kForm.mins) add_mins(block, sums, acc);
        Ints whole[kRows][kVectors] = {};
        const int8_t* rows = x.data + row * x.stride + index * kSuper;
        for (int unit = 0; unit < kForm.units(); unit++) add_unit(block, index, unit, rows + unit * kUnit, sums, whole);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; v++) {
            const Floats scale = scales_of<kForm>(block, column + v * kLanes);
#pragma GCC unroll 12
            for (int r = 0; r < kRows; r++)
                acc[r][v] = fma(__builtin_convertvector(whole[r][v], Floats), scale, acc[r][v]);
        }
    }

    LLMB_INLINE void add_mins(const uint8_t* block, const int32_t* sums, Floats (&acc)[kRows][kVectors]) const {
        Ints whole[kRows][kVectors] = {};
        for (int pair = 0; pair < kForm.pairs(); pair++)
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; v++) {
                const Ints mins = group_mins<kForm>(block, column + v * kLanes, pair);
#pragma GCC unroll 12
                for (int r = 0; r < kRows; r++) whole[r][v] = pair_dot(whole[r][v], mins, Ints{} + sums[r * x.per_row + pair]);
            }
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; v++) {
            const Floats min = -mins_of<kForm>(block, column + v * kLanes);
#pragma GCC unroll 12
            for (int r = 0; r < kRows; r++)
                acc[r][v] = fma(__builtin_convertvector(whole[r][v], Floats), min, acc[r][v]);
        }
    }

    // whole += sums of groups times their integer scales
    LLMB_INLINE void add_unit(
        const uint8_t* block, int index, int number, const int8_t* rows, const int32_t* sums, Ints (&whole)[kRows][kVectors]) const {
        constexpr int kQuads = kForm.group / 4, kRun = run_quads(kForm.largest(), kQuads);
        const uint8_t* unit = unit_of(block, index, number);
        fetch(unit);
        repeat<kUnit / 4 / kRun>([&](auto part) LLMB_INLINE {
            constexpr int kBegin = part * kRun;
            constexpr bool kBegun = !kForm.mins && kBegin % kQuads == 0;
            const int group = (number * kUnit + kBegin * 4) / kForm.group;
            keep_in_memory<kStores && (kRun > 1)>(whole);
            Runs runs;
            repeat<kRows * kVectors>([&](auto i) LLMB_INLINE {
                runs[i / kVectors][i % kVectors].begin(kBegun ? Ints{} + sums[i / kVectors * x.per_row + group] : Ints{});
            });
            multiply<kBegin, kRun>(unit, rows, runs);
            repeat<kVectors>([&](auto v) LLMB_INLINE {
                const Ints scale = runs[0][0].scale_of(group_scales<kForm>(block, column + v * kLanes, group / 2), group % 2);
                repeat<kRows>([&](auto r) LLMB_INLINE {
                    whole[r][v] = runs[r][v].template scaled<kBegun>(whole[r][v], scale);
                });
            });
        });
    }

    // Blocks first..last-1. kUnpacked: adds to `out`.
    void run(const uint8_t* panel, int first, int last, float (*out)[kPanel]) const {
        Floats acc[kRows][kVectors] = {};
        for (int i = 0; i < kRows * kVectors && kUnpacked; i++)
            acc[i / kVectors][i % kVectors] = load(out[i / kVectors] + column + i % kVectors * kLanes);
        for (int i = first; i < last; i++) add_block(panel + i * kForm.bytes(), i, acc);
#pragma GCC unroll 12
        for (int r = 0; r < kRows; r++)
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; v++) store(out[r] + column + v * kLanes, acc[r][v]);
    }
};

template <Form kForm, int kRows>
void multiply_panel(const Rows& x, int row, const uint8_t* panel, float (*out)[kPanel]) {
    constexpr int kVectors = vectors_of(kRows);
    for (int column = 0; column < kPanel; column += kVectors * kLanes)
        Tile<kForm, kRows, kVectors>{x, row, column}.run(panel, 0, x.blocks, out);
}

// Adds to `out` the products of kMaxBlock rows and kManyVectors vectors of columns with blocks first..last-1, which were
// unpacked.
constexpr int kManyVectors = vectors_of(kMaxBlock);
template <Form kForm>
void add_unpacked(const Rows& x, int row, int column, const Unpacked& unpacked, const uint8_t* panel, int first, int last,
                  float (*out)[kPanel]) {
    Tile<kForm, kMaxBlock, kManyVectors, true>{x, row, column, &unpacked}.run(panel, first, last, out);
}

// Units of 128 k with their numbers minus kOffset as 16 bits: [quad][even or odd][column][2].
struct UnpackedShorts {
    static constexpr int kUnits = kSuper / kUnit / 2;
    Ints units[kUnits][kUnit / 4][2][kPanelVectors];

    template <Form kForm>
    void fill(const uint8_t* panel, int first, int last) {
        for (int i = first; i < last; i++) {
            const uint8_t* unit = panel + i * kForm.bytes() + kForm.unit_at(0);
            fetch_unit<kForm>(unit);
#pragma GCC unroll 8
            for (int quad = 0; quad < kUnit / 4; quad++)
                for (int v = 0; v < kPanelVectors; v++) {
                    const Shorts pairs = (Shorts)(numbers_of<kForm>(unit, v * kLanes, quad) ^ static_cast<int32_t>(0x80808080u));
                    units[i - first][quad][0][v] = (Ints)(pairs << 8 >> 8);
                    units[i - first][quad][1][v] = (Ints)(pairs >> 8);
                }
        }
    }
};

template <Form kForm>
void add_unpacked(const Rows& x, int row, int column, const UnpackedShorts& unpacked, const uint8_t* panel, int first, int last,
                  float (*out)[kPanel]) {
    constexpr int kVectors = kManyVectors;
    for (int i = first; i < last; i++) {
        const int16_t* rows = x.shorts + row * x.stride + i * kUnit;
        const int32_t* sums = x.sums_of(row) + i;
        Ints whole[kMaxBlock][kVectors];
        repeat<kMaxBlock * kVectors>([&](auto at) LLMB_INLINE {
            whole[at / kVectors][at % kVectors] = Ints{} + sums[at / kVectors * x.per_row];
        });
        repeat<kUnit / 2>([&](auto pair) LLMB_INLINE {
            const Ints* numbers = &unpacked.units[i - first][pair / 2][pair % 2][column / kLanes];
            repeat<kMaxBlock>([&](auto r) LLMB_INLINE {
                const Ints own = Ints{} + load_int(rows + r * x.stride + pair * 2);
                repeat<kVectors>([&](auto v) LLMB_INLINE { whole[r][v] = pinned(pair_dot(whole[r][v], numbers[v], own)); });
            });
        });
        repeat<kVectors>([&](auto v) LLMB_INLINE {
            const Floats scale = scales_of<kForm>(panel + i * kForm.bytes(), column + v * kLanes);
            repeat<kMaxBlock>([&](auto r) LLMB_INLINE {
                float* sum = out[r] + column + v * kLanes;
                store(sum, fma(__builtin_convertvector(whole[r][v], Floats), scale, load(sum)));
            });
        });
    }
}

// For multiples of kMaxBlock rows.
template <Form kForm>
void multiply_unpacked(const Rows& x, int row, int rows, const uint8_t* panel, float (*out)[kPanel]) {
    std::conditional_t<unpacks_shorts(kForm), UnpackedShorts, Unpacked> unpacked;
    constexpr int kBlocks = unpacked.kUnits / kForm.units();
    std::memset(out, 0, rows * sizeof *out);
    for (int first = 0; first < x.blocks; first += kBlocks) {
        const int last = std::min(first + kBlocks, x.blocks);
        unpacked.template fill<kForm>(panel, first, last);
        for (int r = 0; r < rows; r += kMaxBlock)
            for (int column = 0; column < kPanel; column += kManyVectors * kLanes)
                add_unpacked<kForm>(x, row + r, column, unpacked, panel, first, last, out + r);
    }
}

#if defined(LLMB_HAS_TILES)

// A panel for tile_groups.h. A group is a block of 32 k, or shares an integer scale in a super-block.
template <Form kForm>
struct TiledPanel {
    static_assert(!kByPairs, "sums begin with whole numbers");
    static constexpr int kGroup = kForm.group;
    static constexpr int kInBlock = kForm.block / kGroup;
    static constexpr bool kHasBegins = !kForm.mins || !kForm.is_super();
    const uint8_t* panel;
    int groups;

    const uint8_t* block_of(int group) const { return panel + group / kInBlock * kForm.bytes(); }

    void put(int group, char* to) const {
        const int k = group % kInBlock * kGroup;
        const uint8_t* unit = block_of(group) + kForm.unit_at(k / kUnit);
        if (k % kUnit == 0) fetch_unit<kForm>(unit);
        unpack<kForm>(unit, k % kUnit / 4, (k % kUnit + kGroup) / 4, to);
    }

    struct BlockColumns {
        Floats scale, min;
        LLMB_INLINE Floats add(Ints sum, int32_t begin, Floats acc) const {
            if constexpr (!kForm.mins) sum += begin;
            acc = fma(__builtin_convertvector(sum, Floats), scale, acc);
            if constexpr (kForm.mins) acc = fma((Floats)(Ints{} + begin), min, acc);
            return acc;
        }
    };
    struct GroupColumns {
        Ints scale;
        LLMB_INLINE Ints add(Ints sum, int32_t begin, Ints whole) const {
            return whole + (kForm.mins ? sum : sum + begin) * scale;
        }
    };
    auto columns(int group, int column) const {
        const uint8_t* block = block_of(group);
        if constexpr (kForm.is_super()) {
            const int in_block = group % kInBlock;
            return GroupColumns{half_of(group_scales<kForm>(block, column, in_block / 2), in_block % 2)};
        } else {
            return BlockColumns{scales_of<kForm>(block, column), kForm.mins ? mins_of<kForm>(block, column) : Floats{}};
        }
    }
};

// The float step of a super-block of `rows` rows, minima first. whole: sums of groups times their integer scales.
template <Form kForm>
void add_super_on_tiles(const Rows& x, int row, int rows, const uint8_t* block, int index, const int32_t (*whole)[kPanel],
                        float (*out)[kPanel]) {
    for (int column = 0; column < kPanel; column += kLanes) {
        const Floats scale = scales_of<kForm>(block, column), min = kForm.mins ? -mins_of<kForm>(block, column) : Floats{};
        for (int r = 0; r < rows; r++) {
            const int32_t* sums = x.sums_of(row + r) + index * kForm.sums();
            Floats acc = load(out[r] + column);
            if constexpr (kForm.mins) {
                Ints total = {};
                for (int pair = 0; pair < kForm.pairs(); pair++)
                    total = pair_dot(total, group_mins<kForm>(block, column, pair), Ints{} + sums[pair]);
                acc = fma(__builtin_convertvector(total, Floats), min, acc);
            }
            acc = fma(__builtin_convertvector(load_ints(whole[r] + column), Floats), scale, acc);
            store(out[r] + column, acc);
        }
    }
}

template <Form kForm>
void multiply_on_tiles(const Rows& x, int row, int rows, const uint8_t* panel, float (*out)[kPanel]) {
    using Weights = TiledPanel<kForm>;
    const auto* first = reinterpret_cast<const char*>(x.data + row * x.stride);
    const tile::WholeRows own{static_cast<ptrdiff_t>(x.stride), first};
    const Weights weights{panel, x.blocks * Weights::kInBlock};
    if constexpr (!kForm.is_super()) return tile::multiply_groups(weights, own, rows, x.sums_of(row), out);
    else {
        alignas(64) int32_t whole[kLargeBlock][kPanel];
        tile::GroupedProduct<Weights, int32_t> product(weights, own, rows, x.sums_of(row), whole);
        std::memset(out, 0, rows * sizeof *out);
        tiles_begin(amx::kTileRows, Weights::kGroup);
        for (int block = 0; block < x.blocks; block++) {
            std::memset(whole, 0, rows * sizeof *whole);
            product.run(block * Weights::kInBlock, (block + 1) * Weights::kInBlock);
            add_super_on_tiles<kForm>(x, row, rows, panel + block * kForm.bytes(), block, whole, out);
        }
        tiles_end();
    }
}

#endif

// Adds the excess of a wide element over 127, times its weights; in types with blocks, times their numbers
// (Rows::sums).
template <Form kForm>
LLMB_INLINE inline void add_wide(const uint8_t* panel, const Wide& wide, PanelRow& sums) {
    const uint8_t* block = panel + wide.k / kForm.block * kForm.bytes();
    const int unit = wide.k % kForm.block / kUnit, quad = wide.k % kUnit / 4, group = wide.k % kForm.block / kForm.group;
    const uint8_t* numbers = block + kForm.unit_at(unit);
    const Floats rest = splat(static_cast<float>(wide.rest));
    const auto exact = [](Ints whole) { return __builtin_convertvector(whole, Floats); };
    for (int v = 0; v < kPanelVectors; v++) {
        const int column = v * kLanes;
        Ints whole = numbers_of<kForm>(numbers, column, quad) >> wide.k % 4 * 8 & 255;
        if constexpr (kForm.is_super())
            whole = (whole - kForm.zero) * half_of(group_scales<kForm>(block, column, group / 2), group % 2);
        sums.v[v] = fma(exact(whole) * rest, scales_of<kForm>(block, column), sums.v[v]);
        if constexpr (kForm.is_super() && kForm.mins) {
            const Ints mins = half_of(group_mins<kForm>(block, column, group / 2), group % 2);
            sums.v[v] = fma(exact(-mins) * rest, mins_of<kForm>(block, column), sums.v[v]);
        }
    }
}

template <Form kForm>
void add_all_wide(const Rows& x, int row, const uint8_t* panel, float* sums) {
    add_each_wide(x, row, sums, [&](const Wide& wide, PanelRow& own) LLMB_INLINE { add_wide<kForm>(panel, wide, own); });
}

// The functions for one type of weights.
struct Kernel {
    using Multiply = void (*)(const Rows&, int row, const uint8_t* panel, float (*out)[kPanel]);
    std::array<Multiply, kMaxBlock> by_rows;
    void (*add_all_wide)(const Rows&, int row, const uint8_t* panel, float* sums);
    size_t block_bytes;
    void (*many_rows)(const Rows&, int row, int rows, const uint8_t* panel, float (*out)[kPanel]);  // or null

    template <Form kForm>
    static constexpr Kernel make() {
        return []<int... R>(std::integer_sequence<int, R...>) {
            return Kernel{{multiply_panel<kForm, R + 1>...}, ggml::add_all_wide<kForm>, kForm.bytes(), many_rows_of<kForm>()};
        }(std::make_integer_sequence<int, kMaxBlock>{});
    }

    template <Form kForm>
    static constexpr auto many_rows_of() -> decltype(many_rows) {
#if defined(LLMB_HAS_TILES)
        // With groups of 16, three quarters of a tile's depth would be empty: vectors are 1.1 to 1.3 times as fast.
        if constexpr (kForm.group > 16) return multiply_on_tiles<kForm>;
        else return nullptr;
#else
        if constexpr (kUnpacks) return multiply_unpacked<kForm>;
        else return nullptr;
#endif
    }

    template <Type kType>
    static constexpr Kernel kOf = make<form_of(kType)>();

    static const Kernel& of(Type type) {
        switch (type) {
            case Type::kQ5_0: return kOf<Type::kQ5_0>;
            case Type::kQ5_1: return kOf<Type::kQ5_1>;
            case Type::kQ8_0: return kOf<Type::kQ8_0>;
            case Type::kQ2_K: return kOf<Type::kQ2_K>;
            case Type::kQ3_K: return kOf<Type::kQ3_K>;
            case Type::kQ4_K: return kOf<Type::kQ4_K>;
            case Type::kQ5_K: return kOf<Type::kQ5_K>;
            case Type::kQ6_K: return kOf<Type::kQ6_K>;
            case Type::kIq4Nl: return kOf<Type::kIq4Nl>;
            case Type::kIq4Xs: return kOf<Type::kIq4Xs>;
            default: return kOf<Type::kMxfp4>;
        }
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// The whole operation: chunks of rows times panels of columns, in tasks shared by threads.

inline int most_rows(int k) { return int8::most_rows(int8::padded_k(k), kMaxBlock); }

inline int8::RowPlan plan_of(const LinearOp& op, const Step& step, int num_threads) {
    const int rows = num_rows(op.rows, step);
    return {rows, most_rows(op.k), Rows::bytes(rows, op), num_threads};
}

struct Product {
    const LinearOp& op;
    const Rows& x;
    const Kernel& kernel;

    // Rows first..last-1 times one panel.
    void run(int first, int last, int panel) const {
        multiply_rows<kMaxBlock, kUnpacks>(op, first, last, panel, x.scale, [&](int row, int rows, bool second, float (*sums)[kPanel]) {
            multiply_block(row, rows, panel_of(second, panel), sums);
        });
    }

    const uint8_t* panel_of(bool second, int panel) const {
        const void* weight = second ? op.weight2 : op.weight;
        return static_cast<const uint8_t*>(weight) + panel * panel_bytes();
    }

    size_t panel_bytes() const { return x.blocks * kernel.block_bytes; }

    void multiply_block(int row, int rows, const uint8_t* panel, float (*sums)[kPanel]) const {
        if (rows > kMaxBlock && kernel.many_rows) kernel.many_rows(x, row, rows, panel, sums);
        else
            for (int r = 0; r < rows; r += kMaxBlock)
                kernel.by_rows[std::min(kMaxBlock, rows - r) - 1](x, row + r, panel, sums + r);
        for (int r = 0; r < rows; r++) kernel.add_all_wide(x, row + r, panel, sums[r]);
    }
};

}  // namespace llmb::ggml

namespace llmb {

using ggml::is_ggml;

inline size_t linear_ggml_scratch_bytes(const LinearOp& op, const Step& step, int num_threads) {
    return ggml::plan_of(op, step, num_threads).copies_bytes(num_threads);
}

inline void linear_ggml(Worker& worker, const LinearOp& op, const Step& step, char* scratch) {
    const int8::RowPlan plan = ggml::plan_of(op, step, worker.size);
    Carver copy(plan.copy_of(scratch, worker.rank));
    ggml::Rows x(copy, plan.rows, op);
    int8::quantise(worker, op, plan, x);
    const ggml::Product product{op, x, ggml::Kernel::of(op.weight_type)};
    share_panels(worker, op, plan, product.panel_bytes(), [&](int first, int last, int panel) { product.run(first, last, panel); });
}

}  // namespace llmb
