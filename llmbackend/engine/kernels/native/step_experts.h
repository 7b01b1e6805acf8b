// What Python hands over for a mixture of experts: three operations that share the places of pairs.
//
// For: Python and the kernels, as step.h. Does not know: how operations are computed. A pair is a token and one of its
// top_k experts. Pairs sorted by expert, and for each expert by token, have places 0 .. tokens * top_k - 1.
#pragma once

#include <cstdint>

#include "step.h"

namespace llmb {

enum class Scores : int32_t {
    kSoftmax = 0,  // over all experts
    kSigmoid = 1,
};

// Which experts each token has, their shares, and the places of all pairs. Chosen are the largest of scores + correction,
// of equal ones the lowest number; with groups, among the experts of the top_groups groups whose largest of these, one or
// two, have the largest sum. A share is the expert's score, divided by epsilon + the sum of the chosen scores if `renormalises`, times
// factor.
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
    int32_t groups;           // 0: none; otherwise of equal size, two experts at least
    int32_t top_groups;
    int32_t renormalises;
    float factor;
    float epsilon;
    int32_t of_group;         // how many of a group's largest count: 1 or 2
    int32_t padding;
};

// The linear layer of every expert on the rows of its pairs. `linear` is that of expert 0; the others' panels, scales and
// sums follow in steps of these sizes, and biases in steps of n. Its rows are float32, or bfloat16 where bfloat16 dots
// multiply bfloat16 weights; of y, one for each place.
struct ExpertsOp {
    Kind kind;
    int32_t num_experts;
    LinearOp linear;
    const int32_t* first;   // as RouteOp writes them
    const int32_t* places;  // [tokens, top_k]: x has a float32 row for each token; null: one for each place
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
    const float* shared_gate;  // [tokens, gate_stride] or null: a factor of 1
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
