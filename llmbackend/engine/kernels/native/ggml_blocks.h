// Unpacks blocks of weights in GGUF formats: numbers, scales and minima.
//
// Used by pack_ggml.h. Source: ggml's block_q4_K and the like. All their integers are little-endian; a float16 scale is
// named d there, a minimum m or dmin.
#pragma once

#include <cstdint>
#include <cstring>

#include "float16.h"
#include "ggml_forms.h"
#include "numbers.h"
#include "step.h"

namespace llmb::ggml {

struct Block {
    uint8_t numbers[kSuper];
    int8_t scales[16];  // of groups, in super-blocks
    int8_t mins[16];
    uint16_t scale;     // float16, or bfloat16 for MXFP4
    uint16_t min;       // float16; for super-blocks, the file's positive dmin
};

// Bytes per block in the file.
constexpr int file_bytes(Type type) {
    switch (type) {
        case Type::kQ5_0: return 22;
        case Type::kQ5_1: return 24;
        case Type::kQ8_0: return 34;
        case Type::kQ2_K: return 84;
        case Type::kQ3_K: return 110;
        case Type::kQ4_K: return 144;
        case Type::kQ5_K: return 176;
        case Type::kQ6_K: return 210;
        case Type::kIq4Nl: return 18;
        case Type::kIq4Xs: return 136;
        default: return 17;
    }
}

inline uint16_t load_word(const uint8_t* p) {
    uint16_t word;
    std::memcpy(&word, p, sizeof word);
    return word;
}

// Nibbles: the low ones, then the high ones.
inline void take_halves(const uint8_t* bytes, int count, uint8_t* numbers) {
    for (int i = 0; i < count; i++) numbers[i] = bytes[i] & 15, numbers[count + i] = bytes[i] >> 4;
}

// Bits 0 and 1 of 32 bytes, then bits 2 and 3, and so on.
inline void take_quarters(const uint8_t* bytes, uint8_t* numbers) {
    for (int i = 0; i < 128; i++) numbers[i] = bytes[i % 32] >> i / 32 * 2 & 3;
}

// 6-bit scales and minima of 8 groups: bits 0 to 3 of the last four are in separate bytes, bits 4 and 5 above the first
// four.
inline void take_six_bits(const uint8_t* p, Block& block) {
    for (int i = 0; i < 4; i++) {
        block.scales[i] = p[i] & 63;
        block.mins[i] = p[i + 4] & 63;
        block.scales[i + 4] = static_cast<int8_t>((p[i + 8] & 15) | p[i] >> 6 << 4);
        block.mins[i + 4] = static_cast<int8_t>(p[i + 8] >> 4 | p[i + 4] >> 6 << 4);
    }
}

inline void take_q5(const uint8_t* p, int head, Block& block) {
    uint32_t fifth;
    std::memcpy(&fifth, p + head, sizeof fifth);
    take_halves(p + head + 4, 16, block.numbers);
    for (int i = 0; i < kUnit; i++) block.numbers[i] |= static_cast<uint8_t>((fifth >> i & 1) << 4);
    block.scale = load_word(p);
    block.min = load_word(p + 2);
}

inline void take_q8_0(const uint8_t* p, Block& block) {
    for (int i = 0; i < kUnit; i++) block.numbers[i] = p[2 + i] ^ 128;
    block.scale = load_word(p);
}

inline void take_q2_k(const uint8_t* p, Block& block) {
    for (int i = 0; i < 16; i++) block.scales[i] = p[i] & 15, block.mins[i] = p[i] >> 4;
    for (int half = 0; half < 2; half++) take_quarters(p + 16 + 32 * half, block.numbers + 128 * half);
    block.scale = load_word(p + 80);
    block.min = load_word(p + 82);
}

inline void take_q3_k(const uint8_t* p, Block& block) {
    for (int half = 0; half < 2; half++) take_quarters(p + 32 + 32 * half, block.numbers + 128 * half);
    for (int i = 0; i < kSuper; i++) block.numbers[i] |= static_cast<uint8_t>((p[i % 32] >> i / 32 & 1) << 2);
    const uint8_t* scales = p + 96;
    for (int i = 0; i < 16; i++)
        block.scales[i] = static_cast<int8_t>(((scales[i % 8] >> i / 8 * 4 & 15) | (scales[8 + i % 4] >> i / 4 * 2 & 3) << 4) - 32);
    block.scale = load_word(p + 108);
}

inline void take_q4_k(const uint8_t* p, Block& block) {
    take_six_bits(p + 4, block);
    for (int i = 0; i < 4; i++) take_halves(p + 16 + 32 * i, 32, block.numbers + 64 * i);
    block.scale = load_word(p);
    block.min = load_word(p + 2);
}

inline void take_q5_k(const uint8_t* p, Block& block) {
    take_six_bits(p + 4, block);
    for (int i = 0; i < 4; i++) take_halves(p + 48 + 32 * i, 32, block.numbers + 64 * i);
    for (int i = 0; i < kSuper; i++) block.numbers[i] |= static_cast<uint8_t>((p[16 + i % 32] >> i / 32 & 1) << 4);
    block.scale = load_word(p);
    block.min = load_word(p + 2);
}

inline void take_q6_k(const uint8_t* p, Block& block) {
    for (int half = 0; half < 2; half++) {
        uint8_t upper[128], *numbers = block.numbers + 128 * half;
        take_halves(p + 64 * half, 64, numbers);
        take_quarters(p + 128 + 32 * half, upper);
        for (int i = 0; i < 128; i++) numbers[i] |= static_cast<uint8_t>(upper[i] << 4);
    }
    std::memcpy(block.scales, p + 192, 16);
    block.scale = load_word(p + 208);
}

inline void take_iq4_nl(const uint8_t* p, Block& block) {
    take_halves(p + 2, 16, block.numbers);
    block.scale = load_word(p);
}

inline void take_iq4_xs(const uint8_t* p, Block& block) {
    const int upper = load_word(p + 2);
    for (int i = 0; i < 8; i++) {
        take_halves(p + 8 + 16 * i, 16, block.numbers + kUnit * i);
        block.scales[i] = static_cast<int8_t>(((p[4 + i / 2] >> i % 2 * 4 & 15) | (upper >> 2 * i & 3) << 4) - 32);
    }
    block.scale = load_word(p);
}

// The scale is a power of two; a number is twice its value in the table.
inline void take_mxfp4(const uint8_t* p, Block& block) {
    take_halves(p + 1, 16, block.numbers);
    block.scale = static_cast<uint16_t>(p[0] > 1 ? (p[0] - 1) << 7 : 0x20 << p[0]);
}

inline void take_block(Type type, const uint8_t* p, Block& block) {
    switch (type) {
        case Type::kQ5_0: return take_q5(p, 2, block);
        case Type::kQ5_1: return take_q5(p, 4, block);
        case Type::kQ8_0: return take_q8_0(p, block);
        case Type::kQ2_K: return take_q2_k(p, block);
        case Type::kQ3_K: return take_q3_k(p, block);
        case Type::kQ4_K: return take_q4_k(p, block);
        case Type::kQ5_K: return take_q5_k(p, block);
        case Type::kQ6_K: return take_q6_k(p, block);
        case Type::kIq4Nl: return take_iq4_nl(p, block);
        case Type::kIq4Xs: return take_iq4_xs(p, block);
        default: return take_mxfp4(p, block);
    }
}

// The dequantized elements of a block.
inline void values_of(const Form& form, const Block& block, float* values) {
    const float scale = form.brain_scale ? to_float(bf16{block.scale}) : to_float(block.scale);
    const float min = form.mins ? to_float(block.min) : 0.0f;
    const int size = form.is_super() ? form.group : form.block;
    for (int begin = 0; begin < form.block; begin += size) {
        const int group = begin / size;
        const float own_scale = form.is_super() ? scale * static_cast<float>(block.scales[group]) : scale;
        const float own_min = !form.mins || !form.is_super() ? min : -min * static_cast<float>(block.mins[group]);
        const uint8_t* table = form.table == Table::kNone ? nullptr : values_of(form.table);
        for (int i = begin; i < begin + size; i++) {
            const int number = table ? table[block.numbers[i]] : block.numbers[i];
            values[i] = own_scale * static_cast<float>(number - form.zero) + own_min;
        }
    }
}

}  // namespace llmb::ggml
