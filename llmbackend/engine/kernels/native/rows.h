// Operations on single rows: embedding lookup and norms.
//
// Used for the program's small operations. Invariant: a row's result depends only on that row.
#pragma once

#include "numbers.h"
#include "step.h"
#include "team.h"
#include "tile_rows.h"

namespace llmb {

// Fewer rows are not worth sharing.
constexpr int kRowGrain = 4;

template <class Weight>
inline void embed_row(const Weight* weight, float scale, int width, float* out) {
    for (int i = 0; i < width; i++) out[i] = to_float(weight[i]) * scale;
}

inline void embed(Worker& worker, const EmbedOp& op, const Step& step) {
    worker.share(step.num_tokens, kRowGrain, [&](int begin, int end) {
        for (int t = begin; t < end; t++) {
            float* out = op.out + static_cast<int64_t>(t) * op.out_stride;
            const int64_t offset = static_cast<int64_t>(step.token_ids[t]) * op.width;
            if (op.weight_type == Type::kBfloat16)
                embed_row(static_cast<const bf16*>(op.weight) + offset, op.scale, op.width, out);
            else
                embed_row(static_cast<const float*>(op.weight) + offset, op.scale, op.width, out);
        }
    });
}

// out[i] (+)= x[i] * factor * weight[i]. out: a pointer, or a row of tiles.
template <class Out>
inline void scale_row(const NormOp& op, const float* x, float factor, Out out) {
    int i = 0;
    for (; i + kLanes <= op.width; i += kLanes) {
        Floats v = load(x + i) * splat(factor) * load(op.weight + i);
        if (op.accumulate) v += load(out + i);
        store(out + i, v);
    }
    for (; i < op.width; i++) {
        float v = x[i] * factor * op.weight[i];
        if (op.accumulate) v += to_float(out[i]);
        set(out[i], v);
    }
}

// out[i] (+)= (x[i] - mean) * factor * weight[i] + bias[i], likewise.
template <class Out>
inline void scale_centred_row(const NormOp& op, const float* x, float mean, float factor, Out out) {
    for (int i = 0; i < op.width; i++) {
        float v = (x[i] - mean) * factor * op.weight[i];
        if (op.bias) v += op.bias[i];
        if (op.accumulate) v += to_float(out[i]);
        set(out[i], v);
    }
}

inline float mean_of(const float* x, int n) { return sum(x, n) / static_cast<float>(n); }

template <class Out>
inline void norm_to(const NormOp& op, const float* x, Out out) {
    const auto factor = [&](float squares) { return 1.0f / std::sqrt(squares / static_cast<float>(op.width) + op.eps); };
    if (!op.centred) return scale_row(op, x, factor(sum_of_squares(x, op.width)), out);
    const float mean = mean_of(x, op.width);
    scale_centred_row(op, x, mean, factor(sum_of_squares_about(x, op.width, mean)), out);
}

inline void norm_row(const NormOp& op, const float* x, int64_t out_row) {
    if (op.out_type == Type::kBfloat16Tiles) {
        const TileRow<bf16> out(static_cast<bf16*>(op.out), static_cast<int>(out_row), op.out_stride);
        norm_to(op, x, out);
        for (int i = op.width; i < op.out_stride; i++) out[i] = {};
    } else if (op.out_type == Type::kBfloat16) {
        norm_to(op, x, static_cast<bf16*>(op.out) + out_row * op.out_stride);
    } else {
        norm_to(op, x, static_cast<float*>(op.out) + out_row * op.out_stride);
    }
}

constexpr int kRowsAhead = 2;

inline void fetch_row(const float* x, int width) {
    for (int i = 0; i < width; i += 16) __builtin_prefetch(x + i);
}

inline void norm(Worker& worker, const NormOp& op, const Step& step) {
    worker.share(num_rows(op.rows, step), kRowGrain, [&](int begin, int end) {
        for (int row = begin; row < end; row++) {
            const int token = op.rows == Rows::kSampled ? step.sampled_tokens[row] : row;
            const float* x = op.x + static_cast<int64_t>(token) * op.x_stride;
            fetch_row(x + kRowsAhead * static_cast<int64_t>(op.x_stride), op.width);
            norm_row(op, x, row);
        }
    });
}

}  // namespace llmb
