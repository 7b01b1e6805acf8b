// The rate at which this library's multiplications could run: issued as in a linear layer, but only on registers.
//
// Used by benchmarks, which report the kernels' speed as a share of it. Invariant: there are as many sums as in a block
// of rows of the same type, so none of them waits for itself.
#pragma once

#include <cstdint>

#include "amx.h"
#include "linear_block.h"
#include "linear_int8.h"
#include "numbers.h"
#include "step.h"

namespace llmb {

#if defined(__x86_64__)
#define LLMB_ANY_VECTOR "+v"
#else
#define LLMB_ANY_VECTOR "+w"
#endif

// `kSums` chains of `multiply`, `steps` long, none of which the compiler can remove.
template <int kSums, class V, class Multiply>
inline void peak_loop(int64_t steps, Multiply multiply) {
    V sums[kSums] = {};
    for (int64_t step = 0; step < steps; step++) {
        panels::repeat<kSums>([&](auto i) LLMB_INLINE { sums[i] = multiply(sums[i]); });
        panels::repeat<kSums>([&](auto i) LLMB_INLINE { asm volatile("" : LLMB_ANY_VECTOR(sums[i])); });
    }
}

#if defined(LLMB_HAS_TILES)
template <class Multiply>
inline void tile_loop(int64_t steps, Multiply multiply) {
    tiles_begin();
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    tile_zero<4>(), tile_zero<5>(), tile_zero<6>(), tile_zero<7>();
    for (int64_t step = 0; step < steps; step++) multiply();
    tiles_end();
}

inline int64_t tile_peak(Type weights, int64_t steps) {
    constexpr int64_t kSums = 4 * amx::kTileRows * amx::kTileRows;
    if (weights == Type::kInt8 || weights == Type::kInt4) {
        tile_loop(steps, [] {
            tile_dot_u8_s8<0, 4, 6>(), tile_dot_u8_s8<1, 4, 7>(), tile_dot_u8_s8<2, 5, 6>(), tile_dot_u8_s8<3, 5, 7>();
        });
        return steps * kSums * amx::kTileBytes * 2;
    }
    tile_loop(steps, [] { tile_dot<0, 4, 6>(), tile_dot<1, 4, 7>(), tile_dot<2, 5, 6>(), tile_dot<3, 5, 7>(); });
    return steps * kSums * amx::kTileBytes;
}
#endif

// Runs `steps` steps; returns the number of multiplications and additions.
inline int64_t peak(Type weights, int64_t steps) {
#if defined(LLMB_HAS_TILES)
    if (weights != Type::kFloat32) return tile_peak(weights, steps);
#endif
    if (weights == Type::kInt8 || weights == Type::kInt4) {
        constexpr int kSums = 2 * int8::kMaxBlock;
        alignas(64) static constexpr int8_t kZeros[64] = {};
        const int8::Stored stored[4] = {};
        const int8::Quad quad(stored);
        const int8::Weights w(kZeros);
        peak_loop<kSums, Ints>(steps, [&](Ints sum) LLMB_INLINE { return w.times(quad, sum); });
        return steps * kSums * kLanes * 8;
    }
    constexpr int kSums = panels::kBlockRows * panels::kBlockVectors;
#if defined(LLMB_BF16_DOTS)
    if (weights == Type::kBfloat16) {
        const Ints pairs{};
        peak_loop<kSums, Floats>(steps, [&](Floats sum) LLMB_INLINE { return dot(pairs, pairs, sum); });
        return steps * kSums * kLanes * 4;
    }
#endif
    const Floats one = splat(1.0f);
    peak_loop<kSums, Floats>(steps, [&](Floats sum) LLMB_INLINE { return fma(one, one, sum); });
    return steps * kSums * kLanes * 2;
}

}  // namespace llmb
