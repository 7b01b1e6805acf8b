// A block of rows of x times one panel of weights, with the sums in registers.
//
// Used by linear_float.h. Invariant: a sum is one chain over ascending k, of float32 fma's or, for bfloat16 x, of the
// CPU's dot products of pairs; storing and resuming it is exact.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "linear_piece.h"
#include "numbers.h"
#include "pack.h"

namespace llmb::panels {

// A block of rows whose sums over k are in registers: kBlockRows rows, kBlockVectors vectors of columns.
#if defined(__AVX512F__)
constexpr int kBlockRows = 12;
#else
constexpr int kBlockRows = 6;
#endif
constexpr int kBlockVectors = 2;
constexpr int kBlockColumns = kBlockVectors * kLanes;

constexpr int kNearPairs = 8;    // of k: prefetch distance of weights from the L2 to the L1 cache

// The processors with the fastest products read memory fastest by prefetches into the L1 cache; those into the L2
// cache, which `ahead` uses, reach two thirds of that. They pay off if the next weights arrive while the current ones
// are used several times.
constexpr int kStreamPairs = 32;
constexpr int kStreamRows = 4;

// Rows of x as the kernels read them.
template <class X>
struct RowsOf {
    const X* data;
    int64_t stride;

    RowsOf from(int row, int k) const { return {data + row * stride + k, stride}; }
};

// The weights of vector v of columns for an even k, and for the next k.
inline Floats load_first(const float* w, int v) { return load(w + v * kLanes); }
inline Floats load_second(const float* w, int v) { return load(w + kPanel + v * kLanes); }
inline Floats load_first(const bf16* w, int v) { return even(load_pairs(w + 2 * v * kLanes)); }
inline Floats load_second(const bf16* w, int v) { return odd(load_pairs(w + 2 * v * kLanes)); }

// Calls f(0) ... f(N - 1), unrolled before optimisation: only then are arrays indexed by f kept in registers.
template <int N, class F>
LLMB_INLINE inline void repeat(F f) {
    [&]<int... I>(std::integer_sequence<int, I...>) LLMB_INLINE {
        (f(std::integral_constant<int, I>{}), ...);
    }(std::make_integer_sequence<int, N>{});
}

// Makes the compiler address the rows of a block economically: three rows share a pointer that is opaque to it.
// Otherwise it would keep a pointer per row and run out of registers.
template <class X, int R>
struct RowPointers {
    static constexpr int kPointers = (R + 2) / 3;
    const X* at[kPointers];
    int64_t stride;

    LLMB_INLINE explicit RowPointers(RowsOf<X> x) : stride(x.stride) {
        repeat<kPointers>([&](auto p) LLMB_INLINE { at[p] = x.data + 3 * p * stride; });
    }
    template <int kRow>
    LLMB_INLINE Floats first() const {
        return splat(at[kRow / 3][kRow % 3 * stride]);
    }
    template <int kRow>
    LLMB_INLINE Floats second() const {
        return splat(at[kRow / 3][kRow % 3 * stride + 1]);
    }
    template <int kRow>
    LLMB_INLINE Ints pair() const {
        int32_t bits;
        std::memcpy(&bits, at[kRow / 3] + kRow % 3 * stride, sizeof bits);
        return Ints{} + bits;
    }
    template <int kRow>
    LLMB_INLINE Ints half_pair() const {
        return Ints{} + static_cast<int32_t>(at[kRow / 3][kRow % 3 * stride].bits);
    }
    LLMB_INLINE void advance() {
        repeat<kPointers>([&](auto p) LLMB_INLINE {
            at[p] += 2;
            asm("" : "+r"(at[p]));
        });
    }
};

inline Floats add_product(Floats x, Floats w, Floats sum) { return fma(x, w, sum); }
#if defined(LLMB_BF16_DOTS)
inline Floats add_product(Ints x, Ints w, Floats sum) { return dot(x, w, sum); }
#endif

// The running sums of a block: R rows times V vectors of columns, in registers.
template <int R, int V>
struct BlockSums {
    Floats acc[R][V];

    LLMB_INLINE void begin(const float* sums, bool resume) {
        repeat<R * V>([&](auto i) LLMB_INLINE {
            acc[i / V][i % V] = resume ? load(sums + i / V * kPanel + i % V * kLanes) : Floats{};
        });
    }
    // Adds the products of x_of(row) and w_of(vector), for one k or a pair.
    template <class X, class Weights>
    LLMB_INLINE void add(X x_of, Weights w_of) {
        using Factor = decltype(w_of(std::integral_constant<int, 0>{}));
        Factor w[V];
        repeat<V>([&](auto v) LLMB_INLINE { w[v] = w_of(v); });
        repeat<R>([&](auto r) LLMB_INLINE {
            const Factor x = x_of(r);
            repeat<V>([&](auto v) LLMB_INLINE { acc[r][v] = add_product(x, w[v], acc[r][v]); });
        });
    }
    LLMB_INLINE void end(float* sums) const {
        repeat<R * V>([&](auto i) LLMB_INLINE { store(sums + i / V * kPanel + i % V * kLanes, acc[i / V][i % V]); });
    }
};

// Prefetches the weights kPairs pairs of k ahead into the L1 cache.
template <int kPairs, class W>
LLMB_INLINE inline void fetch_near(const W* w) {
    for (int line = 0; line < static_cast<int>(2 * kPanel * sizeof(W)); line += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(w + kPairs * 2 * kPanel) + line, 0, 3);
}

// sums[r][column] (+)= over k of x[r][k] * w[k][column], for R rows and kBlockColumns columns.
template <class W, int R>
void multiply_block(RowsOf<float> x, const W* w, int k, float* sums, bool resume, Ahead ahead) {
    // CPUs prefetch the other line of a pair by themselves; prefetching each only pays off if there is nothing else to
    // do.
    constexpr int kFetchEvery = R > 4 ? 128 : 64;
    BlockSums<R, kBlockVectors> block;
    block.begin(sums, resume);
    RowPointers<float, R> rows(x);
    for (int i = 0; i < k / 2; i++, w += 2 * kPanel, rows.advance()) {
        block.add([&](auto r) LLMB_INLINE { return rows.template first<r>(); },
                  [&](auto v) LLMB_INLINE { return load_first(w, v); });
        ahead.fetch<kPanel * 2 * sizeof(W), kFetchEvery>();
        fetch_near<kNearPairs>(w);
        block.add([&](auto r) LLMB_INLINE { return rows.template second<r>(); },
                  [&](auto v) LLMB_INLINE { return load_second(w, v); });
    }
    if (k % 2)
        block.add([&](auto r) LLMB_INLINE { return rows.template first<r>(); },
                  [&](auto v) LLMB_INLINE { return load_first(w, v); });
    block.end(sums);
}

#if defined(LLMB_BF16_DOTS)
template <class W, int R>
void multiply_block(RowsOf<bf16> x, const bf16* w, int k, float* sums, bool resume, Ahead ahead) {
    BlockSums<R, kBlockVectors> block;
    block.begin(sums, resume);
    RowPointers<bf16, R> rows(x);
    const auto pairs = [&](auto r) LLMB_INLINE { return rows.template pair<r>(); };
    const auto weights = [&](auto v) LLMB_INLINE { return load_pairs(w + 2 * v * kLanes); };
    if (ahead.step_bytes == 0) {
        for (int i = 0; i < k / 2; i++, w += 2 * kPanel, rows.advance()) {
            fetch_near<kStreamPairs>(w);
            block.add(pairs, weights);
        }
    } else {
        for (int i = 0; i < k / 2; i++, w += 2 * kPanel, rows.advance()) {
            ahead.fetch<kPanel * 2 * sizeof(W), 64>();
            fetch_near<kNearPairs>(w);
            block.add(pairs, weights);
        }
    }
    if (k % 2) block.add([&](auto r) LLMB_INLINE { return rows.template half_pair<r>(); }, weights);
    block.end(sums);
}
#endif

template <class X, class W>
using BlockFunction = void (*)(RowsOf<X>, const W*, int, float*, bool, Ahead);

template <class X, class W>
BlockFunction<X, W> block_function(int rows) {
    static constexpr auto table = []<int... R>(std::integer_sequence<int, R...>) {
        return std::array<BlockFunction<X, W>, kBlockRows>{multiply_block<W, R + 1>...};
    }(std::make_integer_sequence<int, kBlockRows>{});
    return table[rows - 1];
}

}  // namespace llmb::panels
