// The linear layer: y = epilogue(x·Wᵀ) for weights packed in panels of 32 output columns.
//
// Used by the program's runner. Invariant: an output row depends, bit by bit, only on its own row of x.
#pragma once

#include <cstddef>

#include "linear_float.h"
#include "linear_ggml.h"
#include "linear_int4.h"
#include "linear_int8.h"
#include "linear_tile.h"
#include "step.h"
#include "team.h"

namespace llmb {

// Whether tiles compute it. For bfloat16 this depends only on types, never on the number of rows; int8 sums are exact,
// and for few rows vectors keep up with memory, while tiles would be mostly empty.
inline bool runs_on_tiles([[maybe_unused]] const LinearOp& op, [[maybe_unused]] const Step& step) {
#if defined(LLMB_HAS_TILES)
    if (op.weight_type == Type::kInt8) return num_rows(op.rows, step) > panels::kFewRows;
    return op.weight_type == Type::kBfloat16 && op.x_type != Type::kFloat32;
#else
    return false;
#endif
}

inline size_t linear_scratch_bytes(const LinearOp& op, const Step& step, int num_threads) {
#if defined(LLMB_HAS_TILES)
    if (runs_on_tiles(op, step)) return linear_tile_scratch_bytes(op, step, num_threads);
#endif
    if (is_ggml(op.weight_type)) return linear_ggml_scratch_bytes(op, step, num_threads);
    if (is_int4(op.weight_type)) return linear_int4_scratch_bytes(op, step, num_threads);
    if (op.weight_type == Type::kInt8) return linear_int8_scratch_bytes(op, step, num_threads);
    return panels::linear_float_scratch_bytes(op, num_rows(op.rows, step), num_threads);
}

inline void linear(Worker& worker, const LinearOp& op, const Step& step, char* scratch) {
#if defined(LLMB_HAS_TILES)
    if (runs_on_tiles(op, step)) return linear_tile(worker, op, step, scratch);
#endif
    if (is_ggml(op.weight_type)) return linear_ggml(worker, op, step, scratch);
    if (is_int4(op.weight_type)) return linear_int4(worker, op, step, scratch);
    if (op.weight_type == Type::kInt8) return linear_int8(worker, op, step, scratch);
    panels::linear_float(worker, op, num_rows(op.rows, step), scratch);
}

}  // namespace llmb
