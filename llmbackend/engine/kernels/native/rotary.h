// Head norms, rotary embedding and the write of keys and values to their slots: one pass over a token.
//
// Used by the step's program, between the QKV product and attention. Invariants: a token's result depends only on that
// token; what is written to KV memory is finite, because a leftover NaN in a reused block would spoil another request's
// output (zero weight times NaN is NaN).
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "fixed16.h"
#include "numbers.h"
#include "step.h"
#include "team.h"

namespace llmb {

constexpr float kLargestBf16 = 3.38953139e38f;

// The nearest number that memory can store; 0 for NaN.
inline float finite(float x) {
    const float bounded = x > FLT_MAX ? FLT_MAX : x < -FLT_MAX ? -FLT_MAX : x;
    return x == x ? bounded : 0.0f;
}

// The same, rounded to bfloat16, in the upper halves of lanes; the lower halves are zero.
inline Ints finite_bf16(Floats x) {
    const Floats bounded = min(max(x, splat(-kLargestBf16)), splat(kLargestBf16));
    const Ints bits = (Ints)(x == x ? bounded : Floats{});
    return (bits + 0x7fff + (bits >> 16 & 1)) & static_cast<int32_t>(0xffff0000);
}

inline float inverse_rms(const float* x, int n, float eps) {
    return 1.0f / std::sqrt(sum_of_squares(x, n) / static_cast<float>(n) + eps);
}

inline void scale_by(float* x, const float* weight, float factor, int n) {
    for (int i = 0; i < n; i++) x[i] = x[i] * factor * weight[i];
}

// Normalises heads first..last-1 of a token, `gap` elements apart; with norm_whole, the caller passes all heads at
// once, without gaps.
inline void normalise_heads(const RotaryOp& op, float* x, const float* weight, int first, int last, int gap) {
    const int dim = op.head_dim;
    if (op.norm_whole) return scale_by(x, weight, inverse_rms(x, last * dim, op.eps), last * dim);
    x += first * (dim + gap);
    for (int head = first; head < last; head++, x += dim + gap) scale_by(x, weight, inverse_rms(x, dim, op.eps), dim);
}

// Rotates pairs (i, i + half): two products, rounded, then their sum, as in the models' own code.
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

// The same for pairs (2i, 2i + 1).
inline void rotate_neighbours(float* x, const float* cos, const float* sin, int half) {
    for (int i = 0; i < half; i++) {
        const float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a * cos[i] - b * sin[i];
        x[2 * i + 1] = b * cos[i] + a * sin[i];
    }
}

// `cos`: the token's row of cos_sin.
inline void rotate_heads(const RotaryOp& op, float* x, int first, int last, int gap, const float* cos) {
    const int half = op.rotary_dim / 2;
    const auto rotate = op.pairs ? rotate_neighbours : rotate_halves;
    for (int head = first; head < last; head++) rotate(x + head * (op.head_dim + gap), cos, cos + half, half);
}

// Stores half `odd` of `count` pairs; `pairs` is zero elsewhere. Another thread may be writing the other half.
inline void store_half(bf16* to, int odd, Ints pairs, int count) {
#if defined(__AVX512BW__)
    const __mmask32 half = static_cast<__mmask32>(odd ? 0xaaaaaaaau : 0x55555555u);
    _mm512_mask_storeu_epi16(to, half & (0xffffffffu >> (32 - 2 * count)), (__m512i)pairs);
#else
    for (int i = 0; i < count; i++) {
        const uint32_t pair = static_cast<uint32_t>(pairs[i]);
        to[2 * i + odd].bits = static_cast<uint16_t>(odd ? pair >> 16 : pair);
    }
#endif
}

// KV memory of one head in one block; values may be null. Position `offset` is a column of keys [dim][block_size] and a
// row of values [block_size][dim] or, in 16 bits, of [dim/2][block_size][2] and [block_size/2][dim][2].
template <class T>
struct Slab {
    T* keys;
    T* values;
    int dim;
    int block_size;
};

inline void write_position(const Slab<float>& slab, int offset, const float* k, const float* v) {
    for (int d = 0; d < slab.dim; d++) slab.keys[static_cast<size_t>(d) * slab.block_size + offset] = finite(k[d]);
    if (slab.values == nullptr) return;
    float* value = slab.values + static_cast<size_t>(offset) * slab.dim;
    for (int d = 0; d < slab.dim; d++) value[d] = finite(v[d]);
}

inline void write_position(const Slab<fixed16>& slab, int offset, const float* k, const float* v) {
    const int exponent = value_exponent(v, slab.dim);
    encode_key(k, slab.dim, exponent, [&](int d, fixed16 element) {
        slab.keys[static_cast<size_t>(d / 2) * 2 * slab.block_size + 2 * offset + d % 2] = element;
    });
    fixed16* to = slab.values + static_cast<size_t>(offset / 2) * 2 * slab.dim + offset % 2;
    each_integer(v, slab.dim, unit_factor(exponent), [&](int d, int integer) { to[2 * d] = {static_cast<int16_t>(integer)}; });
}

// Positions offset..offset + N - 1, whose k and v are `stride` apart: one, or two that share their pairs of values.
template <int N>
inline void write_positions(const Slab<bf16>& slab, int offset, const float* k, const float* v, size_t stride) {
    for (int d = 0; d < slab.dim; d += kLanes) {
        const int count = std::min(kLanes, slab.dim - d);
        uint32_t lanes[N][kLanes], pairs[kLanes / 2][N];
        Ints values{};
        for (int i = 0; i < N; i++) {
            const Ints keys = finite_bf16(load_some(k + i * stride + d, count));
            std::memcpy(lanes[i], &keys, sizeof keys);
            for (int j = 0; j < kLanes / 2; j++) pairs[j][i] = lanes[i][2 * j] >> 16 | lanes[i][2 * j + 1];
            if (slab.values == nullptr) continue;
            const Ints upper = finite_bf16(load_some(v + i * stride + d, count));
            values |= (offset + i) % 2 ? upper : upper >> 16 & 0xffff;
        }
        bf16* key = slab.keys + static_cast<size_t>(d) * slab.block_size + 2 * offset;
        for (int j = 0; 2 * j < count; j++)
            std::memcpy(key + static_cast<size_t>(2 * j) * slab.block_size, pairs[j], sizeof pairs[j]);
        if (slab.values == nullptr) continue;
        bf16* value = slab.values + static_cast<size_t>(offset / 2 * slab.dim + d) * 2;
        if constexpr (N == 2) std::memcpy(value, &values, count * sizeof(int32_t));
        else store_half(value, offset % 2, values, count);
    }
}

// Tokens begin..end-1, KV heads first..last-1.
template <class T>
inline void write_heads(const RotaryOp& op, const Step& step, int begin, int end, int first, int last) {
    for (int token = begin, count = 1; token < end; token += count) {
        const int slot = step.slots[token], block = slot / op.block_size, offset = slot % op.block_size;
        const bool two = token + 1 < end && slot % 2 == 0 && step.slots[token + 1] == slot + 1;
        count = std::is_same_v<T, bf16> && two ? 2 : 1;
        for (int head = first; head < last; head++) {
            const size_t at = (static_cast<size_t>(block) * op.num_kv_heads + head) * op.head_dim * op.block_size;
            T* const values = op.values ? static_cast<T*>(op.values) + at : nullptr;
            const Slab<T> slab{static_cast<T*>(op.keys) + at, values, op.head_dim, op.block_size};
            const size_t from = static_cast<size_t>(token) * op.stride + head * op.head_dim;
            if constexpr (!std::is_same_v<T, bf16>) write_position(slab, offset, op.k + from, op.v + from);
            else if (two) write_positions<2>(slab, offset, op.k + from, op.v + from, op.stride);
            else write_positions<1>(slab, offset, op.k + from, op.v + from, op.stride);
        }
    }
}

inline void write_kv(const RotaryOp& op, const Step& step, int begin, int end, int first, int last) {
    if (op.kv_type == Type::kBfloat16) write_heads<bf16>(op, step, begin, end, first, last);
    else if (op.kv_type == Type::kFixed16) write_heads<fixed16>(op, step, begin, end, first, last);
    else write_heads<float>(op, step, begin, end, first, last);
}

// Copies the rotated parts of query heads first..last-1 to their places.
inline void place_turned(const RotaryOp& op, float* q, int token, int first, int last) {
    const float* from = op.turned + static_cast<size_t>(token) * op.turned_stride;
    for (int head = first; head < last; head++)
        std::memcpy(q + head * (op.head_dim + op.q_gap), from + head * op.turned_step, op.rotary_dim * sizeof(float));
}

// KV heads first..last-1 of a token and the query heads that attend to them.
inline void rotate_token(const RotaryOp& op, const Step& step, int token, int first, int last) {
    const size_t row = static_cast<size_t>(token) * op.stride;
    const int group = op.num_heads / op.num_kv_heads;
    float* q = op.q + row;
    float* k = op.k + row;
    if (op.turned) place_turned(op, q, token, first * group, last * group);
    const auto normalise = [&] {
        if (op.q_norm) normalise_heads(op, q, op.q_norm, first * group, last * group, op.q_gap);
        if (op.k_norm) normalise_heads(op, k, op.k_norm, first, last, 0);
    };
    if (!op.norm_last) normalise();
    if (op.cos_sin) {
        const size_t at = static_cast<size_t>(step.positions[token]) * op.rotary_dim;
        rotate_heads(op, q, first * group, last * group, op.q_gap, (op.q_cos_sin ? op.q_cos_sin : op.cos_sin) + at);
        rotate_heads(op, k, first, last, 0, op.cos_sin + at);
    }
    if (op.norm_last) normalise();
}

inline void rotary_part(const RotaryOp& op, const Step& step, int begin, int end, int first, int last) {
    for (int token = begin; token < end; token++) rotate_token(op, step, token, first, last);
    write_kv(op, step, begin, end, first, last);
}

inline void rotary(Worker& worker, const RotaryOp& op, const Step& step) {
    const int heads = op.num_kv_heads;
    // Few tokens are divided by heads, unless all heads of a token are normalised together.
    if (step.num_tokens < 4 * worker.size && !op.norm_whole)
        worker.share(step.num_tokens * heads, 1, [&](int i, int) {
            rotary_part(op, step, i / heads, i / heads + 1, i % heads, i % heads + 1);
        });
    else worker.share(step.num_tokens, 8, [&](int begin, int end) { rotary_part(op, step, begin, end, 0, heads); });
}

}  // namespace llmb
