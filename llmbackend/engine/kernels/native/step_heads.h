// What Python passes in for a linear layer per head, applied to the head's own part of a row.
//
// Shared by Python and the kernels, like step.h.
#pragma once

#include <cstdint>

#include "step.h"

namespace llmb {

// `linear` is that of head 0, for all tokens; x and y of the others follow at strides of columns, their panels, scales
// and sums at strides of bytes. x is float32; rows are multiplied like those of experts.
struct HeadsOp {
    Kind kind;
    int32_t num_heads;
    LinearOp linear;
    int64_t weight_bytes;
    int64_t scale_bytes;
    int64_t sums_bytes;
    int32_t x_step;
    int32_t y_step;  // a multiple of 32
};

}  // namespace llmb
