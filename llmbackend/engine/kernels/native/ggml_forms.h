// Weights of GGUF types: how their numbers, scales and minima are arranged in panels.
//
// Used by pack_ggml.h and linear_ggml.h. Invariant: a panel takes as many bytes as its columns do in the file, except
// that scales of less than 8 bits take 8, and the last panel is padded.
//
// A weight is s * (q - zero) or s * q + m. q is unsigned, with 2 to 8 bits, or an index into a table. Types with
// super-blocks of 256 k have s = d * (integer of the group) and m = -dmin * (integer of the group); others have blocks
// of 32 k, with their own s and m.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quantise_int8.h"
#include "step.h"

namespace llmb::ggml {

constexpr int kUnit = 32;    // of k
constexpr int kSuper = 256;  // of k

constexpr bool is_ggml(Type type) { return type >= Type::kQ5_0; }

enum class Table { kNone, kIq4, kMxfp4 };

struct Form {
    int low = 4;          // bits of a number in its first plane
    int high = 0;         // bits of a number above these, in its second plane
    int block = kSuper;   // k per block
    int group = kUnit;    // k per integer scale, in super-blocks
    bool mins = false;
    int zero = 0;         // the number that represents 0
    Table table = Table::kNone;
    bool brain_scale = false;  // scales are bfloat16, not float16

    constexpr bool is_super() const { return block == kSuper; }
    constexpr int units() const { return block / kUnit; }
    constexpr int largest() const { return table == Table::kMxfp4 ? 24 : table == Table::kIq4 ? 255 : (1 << (low + high)) - 1; }

    // Offsets in bytes within a block of a panel, in the order in which it is read: scales, minima, the minima's
    // integers, then for each pair of groups, the scales' integers and the numbers. Integers: [column][2].
    constexpr size_t min_at() const { return int8::kColumns * 2; }
    constexpr size_t group_min_at(int pair) const { return min_at() * (2 + pair); }
    constexpr int sums() const { return mins && is_super() ? pairs() : block / group; }
    constexpr int pairs() const { return is_super() ? block / group / 2 : 0; }
    constexpr int pair_units() const { return is_super() ? 2 * group / kUnit : 1; }
    constexpr size_t head_bytes() const { return min_at() * (mins ? 2 + pairs() : 1); }
    constexpr size_t pair_bytes() const { return (is_super() ? min_at() : 0) + pair_units() * unit_bytes(); }
    constexpr size_t group_at(int pair) const { return head_bytes() + pair * pair_bytes(); }
    constexpr size_t unit_at(int unit) const {
        return group_at(unit / pair_units() + 1) - (pair_units() - unit % pair_units()) * unit_bytes();
    }
    // A unit: rows of [column][4 bytes]. Quad i of the unit has its `high` bits in row i * high / 8, from bit i * high
    // % 8 of the bytes on; the rows of `low` bits follow, likewise.
    constexpr size_t unit_bytes() const { return static_cast<size_t>(low + high) * kRowBytes; }
    constexpr size_t bytes() const { return unit_at(units()) - (is_super() ? min_at() : 0); }

    static constexpr size_t kRowBytes = int8::kColumns * 4;
};

constexpr Form form_of(Type type) {
    switch (type) {
        case Type::kQ5_0: return {.high = 1, .block = kUnit, .zero = 16};
        case Type::kQ5_1: return {.high = 1, .block = kUnit, .mins = true};
        case Type::kQ8_0: return {.low = 8, .block = kUnit, .zero = 128};
        case Type::kQ2_K: return {.low = 2, .group = 16, .mins = true};
        case Type::kQ3_K: return {.low = 2, .high = 1, .group = 16, .zero = 4};
        case Type::kQ4_K: return {.mins = true};
        case Type::kQ5_K: return {.high = 1, .mins = true};
        case Type::kQ6_K: return {.high = 2, .group = 16, .zero = 32};
        case Type::kIq4Nl: return {.block = kUnit, .zero = 128, .table = Table::kIq4};
        case Type::kIq4Xs: return {.zero = 128, .table = Table::kIq4};
        default: return {.block = kUnit, .zero = 12, .table = Table::kMxfp4, .brain_scale = true};
    }
}

// The values of a table's numbers, plus `zero`.
constexpr uint8_t kIq4Values[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t kMxfp4Values[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
constexpr const uint8_t* values_of(Table table) { return table == Table::kMxfp4 ? kMxfp4Values : kIq4Values; }

}  // namespace llmb::ggml
