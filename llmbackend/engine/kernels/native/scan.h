// The recurrence of heads with a matrix state each: the gated delta rule and Mamba2's.
//
// Used by recurrent layers. Invariants: a head is advanced token by token, and all sums over key_dim are one chain of
// fma each, ascending; a strip of columns stays in the L1 cache for all tokens of a block, and no column reads another
// one.
//
// A matrix [key_dim, value_dim] is stored in strips of value_dim: [strips][key_dim][columns of the strip].
#pragma once

#include <algorithm>
#include <cmath>

#include "epilogue.h"
#include "numbers.h"
#include "state_slots.h"
#include "step_recurrent.h"
#include "team.h"

namespace llmb {

constexpr int kScanTokens = 64;
constexpr int kStripVectors = 4;

// log(1 + e^x): max(x, 0) + 2 artanh(u / (2 + u)), u = e^-|x|.
inline Floats softplus(Floats x) {
    const Floats u = exp(min(x, -x)), s = u / (splat(2.0f) + u), square = s * s;
    Floats sum = splat(1.0f / 15.0f);
    for (float odd : {13.0f, 11.0f, 9.0f, 7.0f, 5.0f, 3.0f, 1.0f}) sum = fma(sum, square, splat(1.0f / odd));
    return fma(s + s, sum, max(x, Floats{}));
}

// Factors of each token of a block, for one head.
//   decay  of the matrix
//   rate   of the token's contribution: sigmoid(b), or dt
//   k, q   factors of k and q
//   kq     the product of both, after multiplication
struct ScanFactors {
    alignas(64) float decay[kScanTokens], rate[kScanTokens], k[kScanTokens], q[kScanTokens], kq[kScanTokens];
};

// The sum of a[i] * b[i], in lanes.
inline float dot_of(const float* a, const float* b, int n) {
    Floats sums{};
    for (int i = 0; i < n; i += kLanes) {
        const int count = std::min(n - i, kLanes);
        sums = fma(load_some(a + i, count), load_some(b + i, count), sums);
    }
    return sum(sums);
}

struct ScanHead {
    const ScanOp& op;
    int head;

    const float* q(int token) const { return op.q + key_at(token); }
    const float* k(int token) const { return op.k + key_at(token); }
    float* v(int token) const { return op.v + static_cast<int64_t>(token) * op.stride + head * op.value_dim; }

  private:
    int64_t key_at(int token) const {
        return static_cast<int64_t>(token) * op.stride + head / (op.num_heads / op.num_key_heads) * op.key_dim;
    }
};

inline void find_rates(const ScanOp& op, int head, int first, int count, ScanFactors& factors) {
    alignas(64) float a[kScanTokens] = {}, b[kScanTokens] = {};
    for (int i = 0; i < count; i++) {
        a[i] = op.a[static_cast<int64_t>(first + i) * op.a_stride + head] + op.bias[head];
        if (op.delta) b[i] = op.b[static_cast<int64_t>(first + i) * op.b_stride + head];
    }
    for (int i = 0; i < count; i += kLanes) {
        Floats dt = softplus(load(a + i));
        if (!op.delta) dt = min(max(dt, splat(op.dt_min)), splat(op.dt_max));
        store(factors.decay + i, exp(dt * splat(op.decay[head])));
        store(factors.rate + i, op.delta ? sigmoid(load(b + i)) * splat(op.beta) : dt);
    }
}

inline void find_norms(const ScanHead& at, int first, int count, ScanFactors& factors) {
    const ScanOp& op = at.op;
    const float root = 1.0f / std::sqrt(static_cast<float>(op.key_dim));
    for (int i = 0; i < count; i++) {
        const float *q = at.q(first + i), *k = at.k(first + i);
        factors.k[i] = 1.0f / std::sqrt(sum_of_squares(k, op.key_dim) + op.eps);
        factors.q[i] = 1.0f / std::sqrt(sum_of_squares(q, op.key_dim) + op.eps) * root;
        factors.kq[i] = dot_of(k, q, op.key_dim) * factors.k[i] * factors.q[i];
    }
}

// o = q S with S after this token, computed from S before it: decay (q S) + (q k) u.
template <int V>
inline void delta_token(const ScanHead& at, const ScanFactors& factors, int i, int token, int column, float* state) {
    constexpr int kWidth = V * kLanes;
    const float *q = at.q(token), *k = at.k(token);
    float* v = at.v(token) + column;
    Floats by_k[V] = {}, by_q[V] = {};
    for (int d = 0; d < at.op.key_dim; d++) {
        const Floats kd = splat(k[d]), qd = splat(q[d]);
        for (int j = 0; j < V; j++) {
            const Floats s = load(state + d * kWidth + j * kLanes);
            by_k[j] = fma(kd, s, by_k[j]);
            by_q[j] = fma(qd, s, by_q[j]);
        }
    }
    const Floats decay = splat(factors.decay[i]), rate = splat(factors.rate[i]), kq = splat(factors.kq[i]);
    const Floats of_k = splat(factors.k[i]), of_q = splat(factors.q[i]);
    Floats news[V];
    for (int j = 0; j < V; j++) {
        const Floats u = rate * fma(-(decay * of_k), by_k[j], load(v + j * kLanes));
        store(v + j * kLanes, fma(kq, u, decay * of_q * by_q[j]));
        news[j] = of_k * u;
    }
    for (int d = 0; d < at.op.key_dim; d++) {
        const Floats kd = splat(k[d]);
        for (int j = 0; j < V; j++) {
            float* s = state + d * kWidth + j * kLanes;
            store(s, fma(kd, news[j], decay * load(s)));
        }
    }
}

template <int V>
inline void mamba_token(const ScanHead& at, const ScanFactors& factors, int i, int token, int column, float* state) {
    constexpr int kWidth = V * kLanes;
    const float *q = at.q(token), *k = at.k(token);
    float* v = at.v(token) + column;
    const Floats decay = splat(factors.decay[i]), rate = splat(factors.rate[i]);
    Floats news[V], by_q[V];
    for (int j = 0; j < V; j++) {
        const Floats x = load(v + j * kLanes);
        news[j] = rate * x;
        by_q[j] = at.op.skip ? splat(at.op.skip[at.head]) * x : Floats{};
    }
    for (int d = 0; d < at.op.key_dim; d++) {
        const Floats kd = splat(k[d]), qd = splat(q[d]);
        for (int j = 0; j < V; j++) {
            float* s = state + d * kWidth + j * kLanes;
            const Floats next = fma(kd, news[j], decay * load(s));
            store(s, next);
            by_q[j] = fma(qd, next, by_q[j]);
        }
    }
    for (int j = 0; j < V; j++) store(v + j * kLanes, by_q[j]);
}

template <int V>
inline void run_strip(const ScanHead& at, const ScanFactors& factors, int first, int count, int column, float* state) {
    for (int i = 0; i < count; i++) {
        if (at.op.delta) delta_token<V>(at, factors, i, first + i, column, state);
        else mamba_token<V>(at, factors, i, first + i, column, state);
    }
}

// Tokens first .. first + count - 1, at most kScanTokens.
inline void scan_block(const ScanHead& at, int first, int count, float* state) {
    const ScanOp& op = at.op;
    ScanFactors factors;
    find_rates(op, at.head, first, count, factors);
    if (op.delta) find_norms(at, first, count, factors);
    for (int column = 0; column < op.value_dim;) {
        const int vectors = std::min((op.value_dim - column) / kLanes, kStripVectors);
        float* strip = state + static_cast<int64_t>(column) * op.key_dim;
        switch (vectors) {
            case 4: run_strip<4>(at, factors, first, count, column, strip); break;
            case 3: run_strip<3>(at, factors, first, count, column, strip); break;
            case 2: run_strip<2>(at, factors, first, count, column, strip); break;
            default: run_strip<1>(at, factors, first, count, column, strip); break;
        }
        column += vectors * kLanes;
    }
}

inline void scan(Worker& worker, const ScanOp& op, const Step& step) {
    const int64_t size = static_cast<int64_t>(op.key_dim) * op.value_dim;
    worker.share(step.num_rows * op.num_heads, 1, [&](int i, int) {
        const ScanHead at{op, i % op.num_heads};
        const StatePiece piece{op.state + at.head * size, op.slot_stride, size};
        run_row(step, i / op.num_heads, piece, [&](float* state, int begin, int end) {
            for (int first = begin; first < end; first += kScanTokens)
                scan_block(at, first, std::min(end - first, kScanTokens), state);
        });
    });
}

}  // namespace llmb
