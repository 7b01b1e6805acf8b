// Permutes columns and multiplies them by factors.
//
// Used by recurrent layers whose projections interleave several outputs. Invariant: a token's result depends only on
// that token.
#pragma once

#include "rows.h"
#include "step_recurrent.h"
#include "team.h"

namespace llmb {

inline void arrange(Worker& worker, const ArrangeOp& op, const Step& step) {
    worker.share(step.num_tokens, kRowGrain, [&](int begin, int end) {
        for (int token = begin; token < end; token++) {
            const float* x = op.x + static_cast<int64_t>(token) * op.x_stride;
            float* out = op.out + static_cast<int64_t>(token) * op.out_stride;
            for (int i = 0; i < op.columns; i++) {
                const float value = x[op.order ? op.order[i] : i];
                out[i] = op.factors ? value * op.factors[i] : value;
            }
        }
    });
}

}  // namespace llmb
