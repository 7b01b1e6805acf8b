// What Python passes in for a mixture of experts: three operations that share the places of pairs.
//
// Shared by Python and the kernels, like step.h. A pair is a token and one of its top_k experts. Sorted by expert, then
// by token, pairs have places 0 .. tokens * top_k - 1.
#pragma once

#include <cstdint>

#include "step.h"

namespace llmb {

enum class Scores : int32_t {
    kSoftmax = 0,  // over all experts
    kSigmoid = 1,
};

// Which experts each token has, their shares, and the places of all pairs. The experts with the largest scores +
// correction are selected, the lowest index among equals; with groups, only among the top_groups groups whose largest
// one or two have the largest sum. A share is the expert's score, divided by epsilon + the sum of the selected scores
// if `renormalises`, times factor.
struct RouteOp {
    Kind kind;
    Scores scores;
    const float* logits;      // [tokens, stride]
    const float* correction;  // [num_experts] or null
    float* shares;            // [tokens, top_k], largest first
    int32_t* chosen;          // [tokens, top_k]
    int32_t* places;          // [tokens, top_k]
    int32_t* first;           // [num_experts + 1]: the place of each expert's first pair
    int32_t stride;
    int32_t num_experts;      // at most 1024
    int32_t top_k;
    int32_t groups;           // 0 = none; otherwise of equal size, at least two experts
    int32_t top_groups;
    int32_t renormalises;
    float factor;
    float epsilon;
    int32_t of_group;         // how many of a group's largest are summed: 1 or 2
    int32_t padding;
};

// The linear layer of every expert on the rows of its pairs. `linear` is that of expert 0; the others' panels, scales
// and sums follow at these strides, biases at strides of n, and orders of inputs at strides of k. Its rows are float32,
// or bfloat16 if bfloat16 dots multiply bfloat16 weights; y has one for each place.
struct ExpertsOp {
    Kind kind;
    int32_t num_experts;
    LinearOp linear;
    const int32_t* first;   // as RouteOp writes them
    const int32_t* places;  // [tokens, top_k]: x has a float32 row per token; null = one per place
    int64_t weight_bytes;
    int64_t scale_bytes;
    int64_t sums_bytes;
    int32_t top_k;
    int32_t padding;
};

// out[t] = Σ share * mixed[place], in the order of shares, + shared[t] * sigmoid(shared_gate[t]);
// with `accumulate`, out[t] += that * factor.
struct MixOp {
    Kind kind;
    int32_t top_k;
    const float* mixed;        // [tokens * top_k, mixed_stride]
    const int32_t* places;     // [tokens, top_k]
    const float* shares;       // [tokens, top_k]
    const float* shared;       // [tokens, shared_stride] or null
    const float* shared_gate;  // [tokens, gate_stride], or null = a factor of 1
    float* out;                // [tokens, out_stride]
    int32_t mixed_stride;
    int32_t shared_stride;
    int32_t gate_stride;
    int32_t out_stride;
    int32_t width;
    int32_t accumulate;
    float factor;
    int32_t padding;
};

}  // namespace llmb
