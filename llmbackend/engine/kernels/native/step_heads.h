// What Python hands over for a linear layer that each head has one of, for its own part of a row.
//
// For: Python and the kernels, as step.h. Does not know: how operations are computed.
#pragma once

#include <cstdint>

#include "step.h"

namespace llmb {

// `linear` is that of head 0, of all tokens; x and y of the others follow in steps of columns, their panels, scales and sums
// in steps of bytes. x is float32; rows are multiplied as those of experts are.
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
