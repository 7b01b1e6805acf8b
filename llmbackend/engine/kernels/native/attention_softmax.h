// The online softmax of attention: scores of one chunk of positions become weights; rows are scaled and merged.
//
// Used by the attention kernels, which compute scores and weighted values. Invariant, the order of attention: keys are
// visited in chunks of 128 absolute positions, which form partitions of 1024. A chunk's weights are relative to the
// maximum so far, and partitions are merged in order. Masked positions have a weight of zero.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "numbers.h"

namespace llmb {

constexpr int kSubBlock = 32;  // positions; KV blocks are multiples of it
constexpr int kChunk = 128;
constexpr int kChunkBlocks = kChunk / kSubBlock;
constexpr int kPartition = 1024;
constexpr float kNothingSeen = -FLT_MAX;  // the maximum over no score; finite, so it can be subtracted from itself

struct Range {
    int begin;
    int end;
};

// The online softmax of some rows, each a query of one head.
struct SoftmaxState {
    float* sums;      // [rows][kLanes]: sums of weights, by position modulo kLanes
    float* maxima;    // [rows]
    float* weighted;  // [rows][width]: values times weights
    int width;        // the head's dimensions, padded to a multiple of kLanes

    SoftmaxState from(size_t r) const { return {sums + r * kLanes, maxima + r, weighted + r * width, width}; }
};

// The rows of a task, in the order of their positions: what they attend to, and their softmax.
struct TaskRows {
    int count;
    const int32_t* first;  // [rows]: the oldest position a row attends to
    const int32_t* last;   // [rows]: its own
    const float* slopes;   // [rows]: a score gets slope * (its key's position - the row's)
    SoftmaxState state;

    TaskRows part(int r, int size) const { return {size, first + r, last + r, slopes + r, state.from(r)}; }

    // The sub-blocks of the chunk at `start` that some row attends to; possibly none.
    Range seen_in(int start) const {
        const int oldest = first[0] - start, seen = last[count - 1] + 1 - start;
        return {oldest > 0 ? oldest / kSubBlock : 0, seen < kChunk ? (seen + kSubBlock - 1) / kSubBlock : kChunkBlocks};
    }
};

inline Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }

// tanh(x), absolute error below 2e-7; NaN of a NaN.
inline Floats tanh(Floats x) {
    const Floats ten = splat(10.0f);
    const Floats bounded = x > ten ? ten : x < -ten ? -ten : x;
    return fma(bounded, Floats{}, 1.0f - 2.0f / (exp(bounded * 2.0f) + 1.0f));  // exp alone would lose a NaN
}

inline float exp_of(float x) { return exp(splat(x))[0]; }

// Applies softcap and mask to scores of positions start + begin..end-1; returns the largest.
inline float mask_row(float* scores, int begin, int end, int start, int first, int last, float softcap) {
    const bool masked = start + begin < first || start + end - 1 > last;
    Floats best = splat(kNothingSeen);
    for (int i = begin; i < end; i += kLanes) {
        Floats x = load(scores + i);
        if (softcap != 0.0f) x = tanh(x / softcap) * softcap;
        if (masked) {
            const Ints position = lane_numbers() + (start + i);
            x = position >= first ? x : splat(-INFINITY);
            x = position <= last ? x : splat(-INFINITY);
        }
        if (masked || softcap != 0.0f) store(scores + i, x);
        best = max(x, best);
    }
    return max(best);
}

// Adds slope times the distance from the row's own position, `last`, to scores of positions start + begin..end-1.
inline void add_distances(float* scores, int begin, int end, int start, int last, float slope) {
    for (int i = begin; i < end; i += kLanes)
        store(scores + i, fma(to_floats(lane_numbers() + (start + i - last)), splat(slope), load(scores + i)));
}

// Sums of products of row r become scores; returns the largest.
inline float finish_scores(const TaskRows& rows, int r, float* scores, int begin, int end, int start, float softcap) {
    if (rows.slopes[r] != 0.0f) add_distances(scores, begin, end, start, rows.last[r], rows.slopes[r]);
    return mask_row(scores, begin, end, start, rows.first[r], rows.last[r], softcap);
}

inline void scale_row(const SoftmaxState& state, int r, float factor) {
    store(state.sums + r * kLanes, load(state.sums + r * kLanes) * factor);
    float* weighted = state.weighted + r * state.width;
    for (int d = 0; d < state.width; d += kLanes) store(weighted + d, load(weighted + d) * factor);
}

// Stores weights of two vectors of adjacent positions where they are multiplied with values.
template <class W>
inline void store_weights(W* to, Floats first, Floats second) {
    store(to, first);
    store(to + kLanes, second);
}

// The state is scaled relative to the maximum, if that grows to `best`.
inline void raise_maximum(const SoftmaxState& state, int r, float best) {
    if (!(best > state.maxima[r])) return;
    scale_row(state, r, exp_of(state.maxima[r] - best));
    state.maxima[r] = best;
}

// The same for adjacent rows: first all comparisons, then those that grow, because a branch right after each row's
// maximum would often be mispredicted. `growing` has space for count + 1.
inline void raise_maxima(const SoftmaxState& state, int count, const float* best, int32_t* growing) {
    int size = 0;
    for (int r = 0; r < count; r++) {
        growing[size] = r;
        size += best[r] > state.maxima[r];
    }
    for (int i = 0; i < size; i++) raise_maximum(state, growing[i], best[growing[i]]);
}

// Scores of positions begin..end-1, whole sub-blocks, become weights relative to the row's maximum. weights: a pointer
// or TileRow.
template <class Weights>
inline void soften_row(const SoftmaxState& state, int r, const float* scores, Weights weights, int begin, int end) {
    const Floats maximum = splat(state.maxima[r]);
    Floats sums = load(state.sums + r * kLanes);
    for (int i = begin; i < end; i += 2 * kLanes) {
        const Floats first = exp(load(scores + i) - maximum);
        const Floats second = exp(load(scores + i + kLanes) - maximum);
        store_weights(weights + i, first, second);
        sums += first;
        sums += second;
    }
    store(state.sums + r * kLanes, sums);
}

inline void clear_state(const SoftmaxState& state, int num_rows) {
    std::memset(state.sums, 0, sizeof(float) * num_rows * kLanes);
    std::memset(state.weighted, 0, sizeof(float) * num_rows * state.width);
    for (int r = 0; r < num_rows; r++) state.maxima[r] = kNothingSeen;
}

// total += part, for one row. Exact if one of them is empty.
inline void merge_row(const SoftmaxState& total, const SoftmaxState& part, int r) {
    const float best = part.maxima[r] > total.maxima[r] ? part.maxima[r] : total.maxima[r];
    const Floats a = splat(exp_of(total.maxima[r] - best)), b = splat(exp_of(part.maxima[r] - best));
    const auto merge = [&](float* x, const float* y) { store(x, fma(load(y), b, load(x) * a)); };
    merge(total.sums + r * kLanes, part.sums + r * kLanes);
    for (int d = 0; d < total.width; d += kLanes)
        merge(total.weighted + r * total.width + d, part.weighted + r * total.width + d);
    total.maxima[r] = best;
}

// The final factor on a row's weighted values: 1 / the sum of its weights, including the sink's. A NaN score has a weight
// of zero. If there is no other score, the product of this and the values is NaN, with a sink too.
inline float normaliser(const SoftmaxState& state, int r, const float* sink) {
    const float total = sum(load(state.sums + r * kLanes));
    if (sink == nullptr || total == 0.0f) return 1.0f / total;
    const float best = *sink > state.maxima[r] ? *sink : state.maxima[r];
    const float factor = exp_of(state.maxima[r] - best);
    return factor / fma(total, factor, exp_of(*sink - best));
}

}  // namespace llmb
