// Summarises one row of logits in one pass: the largest logit and, if requested, the softmax mass of each block of
// tokens.
//
// Used by sampling. Invariant: a block's figures depend only on the block's logits, and blocks are combined in order,
// so a row's figures do not depend on which worker computes them.
#pragma once

#include <algorithm>
#include <limits>

#include "numbers.h"

namespace llmb {

constexpr int kBlock = 256;  // tokens
constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline int num_blocks(int vocab) { return (vocab + kBlock - 1) / kBlock; }

// A float64 sum of float32 vectors, per lane until the end.
class WideSum {
  public:
    void add(Floats v) {
#if defined(__AVX512F__)
        low_ = _mm512_add_pd(low_, _mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v)));
        const __m256d upper = _mm512_extractf64x4_pd(_mm512_castps_pd((__m512)v), 1);
        high_ = _mm512_add_pd(high_, _mm512_cvtps_pd(_mm256_castpd_ps(upper)));
#elif defined(__AVX2__)
        low_ = _mm256_add_pd(low_, _mm256_cvtps_pd(_mm256_castps256_ps128((__m256)v)));
        high_ = _mm256_add_pd(high_, _mm256_cvtps_pd(_mm256_extractf128_ps((__m256)v, 1)));
#else
        for (int i = 0; i < kLanes / 2; i++) low_[i] += v[i];
        for (int i = 0; i < kLanes / 2; i++) high_[i] += v[i + kLanes / 2];
#endif
    }

    double total() const {
        double lanes[kLanes / 2];
        for (int i = 0; i < kLanes / 2; i++) lanes[i] = low_[i] + high_[i];
        for (int half = kLanes / 4; half > 0; half /= 2)
            for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
        return lanes[0];
    }

  private:
    using Half = double __attribute__((vector_size(kLanes * 4)));
    Half low_{};
    Half high_{};
};

// x / temperature. With a fused multiply-add the quotient is rounded as by a division at a fraction of its cost; an
// infinity becomes a NaN, which exp() treats as minus infinity.
class Divisor {
  public:
    explicit Divisor(float by) : by_(splat(by)), inverse_(splat(1.0f / by)) {}

    Floats operator()(Floats x) const {
#if defined(__FMA__)
        const Floats q = x * inverse_;
        return fma(fma(-q, by_, x), inverse_, q);
#else
        return x / by_;
#endif
    }

  private:
    Floats by_;
    [[maybe_unused]] Floats inverse_;
};

// Of one row: peaks[b] is block b's largest logit; masses[b] the sum of e^((x - peak) / temperature) over the block, if
// requested, and `total` their sum.
struct Summary {
    float* peaks;
    double* masses;
    float peak;    // the largest of all
    bool has_nan;  // if set, nothing else is defined
    double total;

    bool finite() const { return !has_nan && std::abs(peak) < kInfinity; }
};

template <class T>
inline float block_peak(const T* x, Ints& nan) {
    constexpr int kChains = 4;
    Floats top[kChains];
    for (int i = 0; i < kChains; i++) top[i] = splat(-kInfinity);
    for (int i = 0; i < kBlock; i += kChains * kLanes) {
        for (int j = 0; j < kChains; j++) {
            const Floats v = load(x + i + j * kLanes);
            nan |= (v != v);
            top[j] = max(top[j], v);
        }
    }
    return max(max(max(top[0], top[1]), max(top[2], top[3])));
}

template <class T>
inline double block_mass(const T* x, float peak, const Divisor& divide) {
    const Floats base = divide(splat(peak));
    WideSum mass;
    for (int i = 0; i < kBlock; i += kLanes) mass.add(exp(divide(load(x + i)) - base));
    return mass.total();
}

// Calls f with the block's logits: in place or, for a partial last block, as a copy padded with minus infinity.
template <class T, class F>
inline void with_block(const T* x, int vocab, int block, F&& f) {
    const int begin = block * kBlock, size = std::min(kBlock, vocab - begin);
    if (size == kBlock) {
        f(x + begin);
        return;
    }
    float padded[kBlock];
    for (int i = 0; i < kBlock; i++) padded[i] = i < size ? to_float(x[begin + i]) : -kInfinity;
    f(static_cast<const float*>(padded));
}

// Converts masses relative to their block's peak to masses relative to the row's.
inline void align_masses(Summary& summary, int vocab, const Divisor& divide) {
    const Floats base = divide(splat(summary.peak));
    summary.total = 0;
    for (int begin = 0; begin < num_blocks(vocab); begin += kLanes) {
        const int size = std::min(kLanes, num_blocks(vocab) - begin);
        const Floats factors = exp(divide(load(summary.peaks + begin)) - base);  // may read beyond the end
        for (int i = 0; i < size; i++) summary.total += summary.masses[begin + i] *= factors[i];
    }
}

template <bool kMasses, class T>
inline void summarise(const T* x, int vocab, float temperature, Summary& summary) {
    const Divisor divide(temperature);
    Ints nan{};
    summary.peak = -kInfinity;
    for (int b = 0; b < num_blocks(vocab); b++) {
        with_block(x, vocab, b, [&](const auto* block) {
            summary.peaks[b] = block_peak(block, nan);
            if constexpr (kMasses) summary.masses[b] = block_mass(block, summary.peaks[b], divide);
        });
        summary.peak = std::max(summary.peak, summary.peaks[b]);
    }
    summary.has_nan = false;
    for (int i = 0; i < kLanes; i++) summary.has_nan |= nan[i] != 0;
    if constexpr (kMasses) align_masses(summary, vocab, divide);
}

// The first of the row's largest logits.
template <class T>
inline int first_peak(const T* x, int vocab, const Summary& summary) {
    int begin = 0;
    for (const float* peak = summary.peaks; *peak != summary.peak; peak++) begin += kBlock;
    while (begin < vocab - 1 && to_float(x[begin]) != summary.peak) begin++;
    return begin;
}

}  // namespace llmb
