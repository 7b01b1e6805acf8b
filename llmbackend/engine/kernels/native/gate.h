// Gates on the output of attention or a recurrence, with the norm before or after them.
//
// Used by layers that multiply by silu(z), sigmoid(z) or softplus(z). Invariant: a token's result depends only on that
// token.
#pragma once

#include <cmath>

#include "numbers.h"
#include "rows.h"
#include "scan.h"
#include "step_recurrent.h"
#include "team.h"
#include "tile_rows.h"

namespace llmb {

// Of channels i.. of a group.
inline Floats gate_of(const GateOp& op, const float* z, int i) {
    const Floats x = op.one_per_group ? splat(*z) : load(z + i);
    if (op.function == GateFunction::kSoftplus) return softplus(x);
    return op.function == GateFunction::kSigmoid ? sigmoid(x) : silu(x);
}

inline const float* weight_of(const GateOp& op, int g) { return op.weight + g * op.weight_group_stride; }

inline float norm_factor(const GateOp& op, const float* x) {
    return 1.0f / std::sqrt(sum_of_squares(x, op.group) / static_cast<float>(op.group) + op.eps);
}

template <class Out>
inline void gate_group(const GateOp& op, int g, const float* x, const float* z, Out out) {
    const float factor = op.norm == GateNorm::kBefore ? norm_factor(op, x) : 1.0f;
    for (int i = 0; i < op.group; i += kLanes) {
        Floats value = load(x + i);
        if (op.norm == GateNorm::kBefore) value = value * splat(factor) * load(weight_of(op, g) + i);
        store(out + (g * op.group + i), value * gate_of(op, z, i));
    }
}

// First multiplies x by f(z), in place.
template <class Out>
inline void gate_and_norm_group(const GateOp& op, int g, float* x, const float* z, Out out) {
    for (int i = 0; i < op.group; i += kLanes) store(x + i, load(x + i) * gate_of(op, z, i));
    const float factor = norm_factor(op, x);
    for (int i = 0; i < op.group; i += kLanes)
        store(out + (g * op.group + i), load(x + i) * splat(factor) * load(weight_of(op, g) + i));
}

template <class Out>
inline void gate_token(const GateOp& op, int token, Out out) {
    float* x = op.x + static_cast<int64_t>(token) * op.x_stride;
    const float* z = op.z + static_cast<int64_t>(token) * op.z_stride;
    for (int g = 0; g < op.num_groups; g++) {
        const int column = g * op.group;
        const float* gates = z + static_cast<int64_t>(g) * op.z_group_stride;
        if (op.norm == GateNorm::kAfter) gate_and_norm_group(op, g, x + column, gates, out);
        else gate_group(op, g, x + column, gates, out);
    }
}

inline void gate(Worker& worker, const GateOp& op, const Step& step) {
    worker.share(step.num_tokens, kRowGrain, [&](int begin, int end) {
        for (int token = begin; token < end; token++) {
            const int64_t at = static_cast<int64_t>(token) * op.out_stride;
            if (op.out_type == Type::kFloat32) gate_token(op, token, static_cast<float*>(op.out) + at);
            else if (op.out_type == Type::kBfloat16) gate_token(op, token, static_cast<bf16*>(op.out) + at);
            else gate_token(op, token, TileRow<bf16>(static_cast<bf16*>(op.out), token, op.out_stride));
        }
    });
}

}  // namespace llmb
