// Head norms, rotary embedding and the write of keys and values to their slots: one pass over a token.
//
// For: the step's program, between the QKV product and attention. Does not know: rows, block tables, scores. Invariants:
// a token's result depends on that token alone; what is written to KV memory is finite, because a leftover NaN in a
// reused block would spoil another request's output (zero weight times NaN is NaN).
#pragma once

#include <cfloat>
#include <cmath>
#include <cstddef>

#include "fixed16.h"
#include "numbers.h"
#include "step.h"
#include "team.h"

namespace llmb {

template <class T>
constexpr float kLargest = FLT_MAX;
template <>
inline constexpr float kLargest<bf16> = 3.38953139e38f;

inline float narrow(float x, float) { return x; }
inline bf16 narrow(float x, bf16) { return to_bf16(x); }

// The nearest number that memory of type T holds; 0 for a NaN.
template <class T>
inline T finite(float x) {
    const float limit = kLargest<T>;
    const float bounded = x > limit ? limit : x < -limit ? -limit : x;
    return narrow(x == x ? bounded : 0.0f, T{});
}

// The sum of x[i]², in one order for a given n.
inline float sum_of_squares(const float* x, int n) {
    Floats lanes{};
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) lanes = fma(load(x + i), load(x + i), lanes);
    float total = sum(lanes);
    for (; i < n; i++) total = fma(x[i], x[i], total);
    return total;
}

inline float inverse_rms(const float* x, int n, float eps) {
    return 1.0f / std::sqrt(sum_of_squares(x, n) / static_cast<float>(n) + eps);
}

inline void scale_by(float* x, const float* weight, float factor, int n) {
    for (int i = 0; i < n; i++) x[i] = x[i] * factor * weight[i];
}

// Normalises heads first..last-1 of a token; with norm_whole, the caller asks for all heads at once.
inline void normalise_heads(const RotaryOp& op, float* x, const float* weight, int first, int last) {
    const int dim = op.head_dim;
    if (op.norm_whole) return scale_by(x, weight, inverse_rms(x, last * dim, op.eps), last * dim);
    for (int head = first; head < last; head++)
        scale_by(x + head * dim, weight, inverse_rms(x + head * dim, dim, op.eps), dim);
}

// Pairs (i, i + half). Two products, rounded, then their sum, as the models' own code computes it.
inline void rotate_halves(float* x, const float* cos, const float* sin, int half) {
    float* y = x + half;
    int i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        const Floats a = load(x + i), b = load(y + i), c = load(cos + i), s = load(sin + i);
        store(x + i, a * c - b * s);
        store(y + i, b * c + a * s);
    }
    for (; i < half; i++) {
        const float a = x[i], b = y[i];
        x[i] = a * cos[i] - b * sin[i];
        y[i] = b * cos[i] + a * sin[i];
    }
}

// `cos`: the token's row of cos_sin.
inline void rotate_heads(const RotaryOp& op, float* x, int first, int last, const float* cos) {
    const int half = op.rotary_dim / 2;
    for (int head = first; head < last; head++) {
        rotate_halves(x + head * op.head_dim, cos, cos + half, half);
    }
}

// One position of a matrix of pairs of rows: column `column` of [dim/2][block_size][2] or [dim][block_size].
template <class T>
inline void write_key(T* slab, const float* k, int dim, int block_size, int column) {
    constexpr bool kPaired = sizeof(T) == 2;
    T* to = slab + (kPaired ? 2 * column : column);
    for (int d = 0; d < dim; d += 2) {
        to[0] = finite<T>(k[d]);
        to[kPaired ? 1 : block_size] = finite<T>(k[d + 1]);
        to += 2 * block_size;
    }
}

// Row `row` of [block_size/2][dim][2] or [block_size][dim].
template <class T>
inline void write_value(T* slab, const float* v, int dim, int row) {
    constexpr int kStep = sizeof(T) == 2 ? 2 : 1;
    T* to = kStep == 2 ? slab + row / 2 * 2 * dim + row % 2 : slab + row * dim;
    for (int d = 0; d < dim; d++) to[kStep * d] = finite<T>(v[d]);
}


template <class T>
inline void write_position(T* keys, T* values, const float* k, const float* v, int dim, int block_size, int offset) {
    write_key(keys, k, dim, block_size, offset);
    write_value(values, v, dim, offset);
}

inline void write_position(fixed16* keys, fixed16* values, const float* k, const float* v, int dim, int block_size,
                           int offset) {
    const int exponent = value_exponent(v, dim);
    encode_key(k, dim, exponent, [&](int d, fixed16 element) {
        keys[static_cast<size_t>(d / 2) * 2 * block_size + 2 * offset + d % 2] = element;
    });
    fixed16* to = values + static_cast<size_t>(offset / 2) * 2 * dim + offset % 2;
    each_integer(v, dim, unit_factor(exponent), [&](int d, int integer) { to[2 * d] = {static_cast<int16_t>(integer)}; });
}

template <class T>
inline void write_heads(const RotaryOp& op, const float* k, const float* v, int first, int last, int slot) {
    const int block = slot / op.block_size, offset = slot % op.block_size;
    for (int head = first; head < last; head++) {
        const size_t slab = (static_cast<size_t>(block) * op.num_kv_heads + head) * op.head_dim * op.block_size;
        write_position(static_cast<T*>(op.keys) + slab, static_cast<T*>(op.values) + slab, k + head * op.head_dim,
                       v + head * op.head_dim, op.head_dim, op.block_size, offset);
    }
}

// KV heads first..last-1 of a token and the query heads that attend to them.
inline void rotary_part(const RotaryOp& op, const Step& step, int token, int first, int last) {
    const size_t row = static_cast<size_t>(token) * op.stride;
    const int group = op.num_heads / op.num_kv_heads;
    float* q = op.q + row;
    float* k = op.k + row;
    if (op.q_norm) normalise_heads(op, q, op.q_norm, first * group, last * group);
    if (op.k_norm) normalise_heads(op, k, op.k_norm, first, last);
    if (op.cos_sin) {
        const float* cos = op.cos_sin + static_cast<size_t>(step.positions[token]) * op.rotary_dim;
        rotate_heads(op, q, first * group, last * group, cos);
        rotate_heads(op, k, first, last, cos);
    }
    if (op.kv_type == Type::kBfloat16) write_heads<bf16>(op, k, op.v + row, first, last, step.slots[token]);
    else if (op.kv_type == Type::kFixed16) write_heads<fixed16>(op, k, op.v + row, first, last, step.slots[token]);
    else write_heads<float>(op, k, op.v + row, first, last, step.slots[token]);
}

inline void rotary(Worker& worker, const RotaryOp& op, const Step& step) {
    // Few tokens are shared head by head, unless all heads of a token are normalised together.
    const bool by_head = step.num_tokens < 4 * worker.size && !op.norm_whole;
    const int parts = by_head ? op.num_kv_heads : 1, heads = op.num_kv_heads / parts;
    worker.share(step.num_tokens * parts, by_head ? 1 : 4, [&](int begin, int end) {
        for (int i = begin; i < end; i++) {
            const int first = i % parts * heads;
            rotary_part(op, step, i / parts, first, first + heads);
        }
    });
}

}  // namespace llmb
