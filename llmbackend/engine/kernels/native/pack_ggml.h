// Packs weights of GGUF types into panels, with every number, scale and minimum unchanged.
//
// Used when a model is loaded. Invariant: every byte of the packed memory is written; the padding of the last panel is
// zero.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ggml_blocks.h"
#include "ggml_forms.h"
#include "quantise_int8.h"
#include "step.h"
#include "team.h"

namespace llmb::ggml {

// Adds 8 quads of numbers of one column to a zeroed unit.
inline void put_unit(const Form& form, const uint8_t* numbers, int column, uint8_t* unit) {
    const uint32_t low_mask = 0x01010101u * ((1u << form.low) - 1), high_mask = 0x01010101u * ((1u << form.high) - 1);
    const auto add = [&](int row, uint32_t bits) {
        uint32_t word;
        uint8_t* at = unit + row * Form::kRowBytes + column * 4;
        std::memcpy(&word, at, sizeof word);
        word |= bits;
        std::memcpy(at, &word, sizeof word);
    };
    for (int i = 0; i < kUnit / 4; i++) {
        uint32_t quad;
        std::memcpy(&quad, numbers + i * 4, sizeof quad);
        if (form.high) add(i * form.high / 8, (quad >> form.low & high_mask) << i * form.high % 8);
        add(form.high + i * form.low / 8, (quad & low_mask) << i * form.low % 8);
    }
}

inline void put_block(const Form& form, const Block& block, int column, uint8_t* panel) {
    std::memcpy(panel + column * 2, &block.scale, 2);
    if (form.mins) std::memcpy(panel + form.min_at() + column * 2, &block.min, 2);
    for (int i = 0; i < 2 * form.pairs(); i++) {
        panel[form.group_at(i / 2) + column * 2 + i % 2] = static_cast<uint8_t>(block.scales[i]);
        if (form.mins) panel[form.group_min_at(i / 2) + column * 2 + i % 2] = static_cast<uint8_t>(block.mins[i]);
    }
    for (int i = 0; i < form.units(); i++) put_unit(form, block.numbers + i * kUnit, column, panel + form.unit_at(i));
}

}  // namespace llmb::ggml

namespace llmb {

// blocks: [n][k / block] as in a file; packed: in panels as in step.h.
inline void pack_ggml(Worker& worker, const uint8_t* blocks, Type type, int n, int k, uint8_t* packed) {
    using namespace ggml;
    const Form form = form_of(type);
    const int per_row = k / form.block;
    const size_t panel_bytes = per_row * form.bytes(), row_bytes = static_cast<size_t>(per_row) * file_bytes(type);
    worker.share((n + int8::kColumns - 1) / int8::kColumns, 1, [&](int begin, int end) {
        std::memset(packed + begin * panel_bytes, 0, (end - begin) * panel_bytes);
        for (int column = begin * int8::kColumns; column < std::min(n, end * int8::kColumns); column++)
            for (int i = 0; i < per_row; i++) {
                Block block;
                take_block(type, blocks + column * row_bytes + static_cast<size_t>(i) * file_bytes(type), block);
                put_block(form, block, column % int8::kColumns, packed + column / int8::kColumns * panel_bytes + i * form.bytes());
            }
    });
}

// The values of `count` blocks from a file.
inline void unpack_ggml(const uint8_t* blocks, Type type, int64_t count, float* values) {
    using namespace ggml;
    const Form form = form_of(type);
    for (int64_t i = 0; i < count; i++) {
        Block block;
        take_block(type, blocks + i * file_bytes(type), block);
        values_of(form, block, values + i * form.block);
    }
}

}  // namespace llmb
