// Operations of recurrent layers, as Python passes them in. ../operations.py mirrors the structures.
//
// A sequence's states are in its slot, all float32: for each layer, the inputs of the convolution that later tokens
// need, and the heads' matrices. Step contains a row's slot, and the slot from which it starts.
#pragma once

#include "step.h"

namespace llmb {

// A causal convolution of each channel over the tokens of its row: c[t] = bias + sum of taps[j] * u[t - num_taps + 1 + j].
//   gated   x is B, C and X, `channels` each; u = B * X; out = C * c
//   else    u = x; out = silu(c); out may be x
struct ConvOp {
    Kind kind;
    int32_t gated;
    const float* x;       // [tokens, x_stride]
    const float* taps;    // [num_taps, channels]
    const float* bias;    // [channels] or null
    void* out;            // [tokens, out_stride], out_type
    float* state;         // of slot 0; inputs before a row's next token [channels / 64][num_taps - 1][64], the oldest first
    int64_t slot_stride;  // from slot to slot, in floats
    int32_t x_stride;
    int32_t out_stride;
    int32_t channels;     // a multiple of 32
    int32_t num_taps;
    Type out_type;
    int32_t padding;
};

// Heads with a matrix S [key_dim, value_dim] each, over the tokens of each row. o replaces v.
//   delta   the gated delta rule: k and q divided by their norms, q also by sqrt(key_dim);
//           e = exp(decay * softplus(a + bias)); S = e S; S += k (sigmoid(b) (v - k S)); o = q S
//   else    Mamba2: dt = softplus(a + bias) within dt_min and dt_max; S = exp(decay * dt) S + k (dt v); o = q S + skip v
struct ScanOp {
    Kind kind;
    int32_t delta;
    const float* q;       // [tokens, stride]: num_key_heads * key_dim; Mamba2's C
    const float* k;       // the same; Mamba2's B
    float* v;             // [tokens, stride]: num_heads * value_dim; Mamba2's x
    const float* a;       // [tokens, a_stride]: num_heads
    const float* b;       // [tokens, b_stride]: num_heads; null without delta
    const float* decay;   // [num_heads], negative
    const float* bias;    // [num_heads]
    const float* skip;    // [num_heads] or null
    float* state;         // of slot 0: [num_heads] matrices, in strips of value_dim (scan.h)
    int64_t slot_stride;
    int32_t stride;
    int32_t a_stride;
    int32_t b_stride;
    int32_t num_heads;
    int32_t num_key_heads;
    int32_t key_dim;
    int32_t value_dim;    // a multiple of 16
    float eps;            // of the norms, added to the sum of squares
    float dt_min;
    float dt_max;
    float beta;           // factor on sigmoid(b)
    int32_t padding;
};

// out[i] = x[order[i]] * factors[i]: reorders the outputs of projections for the following operations.
struct ArrangeOp {
    Kind kind;
    int32_t columns;
    const float* x;         // [tokens, x_stride]
    const int32_t* order;   // [columns]; null = unchanged, and out may be x
    const float* factors;   // [columns] or null
    float* out;             // [tokens, out_stride]
    int32_t x_stride;
    int32_t out_stride;
};

enum class GateNorm : int32_t { kNone = 0, kBefore = 1, kAfter = 2 };

enum class GateFunction : int32_t { kSilu = 0, kSigmoid = 1, kSoftplus = 2 };

// For each group of channels: out = x * f(z); with a norm before the gate, norm(x) * weight * f(z); with one after it,
// norm(x * f(z)) * weight.
struct GateOp {
    Kind kind;
    GateNorm norm;
    float* x;             // [tokens, x_stride]; modified by a gate before a norm
    const float* z;       // [tokens, z_stride]: group g starts at g * z_group_stride
    const float* weight;  // for group g from g * weight_group_stride on; or null
    void* out;            // [tokens, out_stride], out_type; may be x
    int32_t x_stride;
    int32_t z_stride;
    int32_t z_group_stride;
    int32_t out_stride;
    int32_t group;        // channels, a multiple of 16
    int32_t num_groups;
    Type out_type;
    GateFunction function;
    float eps;
    int32_t weight_group_stride;  // 0 = all groups have the same weights
    int32_t one_per_group;        // 1: z has one number per group
    int32_t padding;
};

}  // namespace llmb
