// The linear layer: y = epilogue(x·Wᵀ) for weights packed in panels of 32 output columns.
//
// For: the program's runner. Does not know: how each weight type is multiplied. Invariant: an output row depends on its
// own row of x alone, bit by bit.
#pragma once

#include <cstddef>

#include "linear_float.h"
#include "linear_int8.h"
#include "linear_tile.h"
#include "pack.h"
#include "step.h"
#include "team.h"

namespace llmb {

inline int linear_num_rows(const LinearOp& op, const Step& step) {
    return op.rows == Rows::kTokens ? step.num_tokens : step.num_sampled;
}

// Whether tiles compute it: a choice by types alone, never by the number of rows.
inline bool runs_on_tiles([[maybe_unused]] const LinearOp& op) {
#if defined(LLMB_HAS_TILES)
    return op.weight_type == Type::kBfloat16 && op.x_type == Type::kBfloat16;
#else
    return false;
#endif
}

inline size_t linear_scratch_bytes(const LinearOp& op, const Step& step, int num_threads) {
    if (op.weight_type == Type::kInt8) return linear_int8_scratch_bytes(op, step, num_threads);
#if defined(LLMB_HAS_TILES)
    if (runs_on_tiles(op)) return panels::linear_tile_scratch_bytes(op, linear_num_rows(op, step), num_threads);
#endif
    return panels::linear_float_scratch_bytes(op, linear_num_rows(op, step), num_threads);
}

inline void linear(Worker& worker, const LinearOp& op, const Step& step, char* scratch) {
    if (op.weight_type == Type::kInt8) return linear_int8(worker, op, step, scratch);
#if defined(LLMB_HAS_TILES)
    if (runs_on_tiles(op)) return panels::linear_tile(worker, op, linear_num_rows(op, step), scratch);
#endif
    panels::linear_float(worker, op, linear_num_rows(op, step), scratch);
}

}  // namespace llmb
