// A tile of queries against the paged keys and values of one KV head: scores, online softmax, weighted values.
//
// For: attention.h, which cuts a step into tiles. Does not know: threads, how work is shared. Invariant, the order of
// attention: keys are visited in chunks of 128 absolute positions, which form partitions of 1024. Per query, a score is
// one chain of fma's over the head's dimensions, a chunk's weights are relative to the maximum so far, a value is one
// chain of fma's over positions, and partitions are merged in order. What a query does not see adds exact zeros or is
// skipped, so nothing depends on the tile, the block size or the blocks' places.
#pragma once

#include <cfloat>
#include <cstddef>
#include <type_traits>
#include <utility>

#include "fixed16.h"
#include "numbers.h"
#include "step.h"

namespace llmb {

constexpr int kSubBlock = 32;  // positions: KV blocks are made of whole ones
constexpr int kChunk = 128;
constexpr int kChunkBlocks = kChunk / kSubBlock;
constexpr int kPartition = 1024;
constexpr int kVectors = 2;  // the width of a register tile
#if defined(__AVX512F__)
constexpr int kMaxRows = 12;  // 24 of 32 registers are sums
#else
constexpr int kMaxRows = 4;  // 8 of 16
#endif
constexpr float kNothingSeen = -FLT_MAX;  // a maximum over no score: finite, so that it can be subtracted from itself

// How many elements lie between neighbouring columns of a matrix of row pairs: bf16 [n/2][width][2], float [n][width].
template <class T>
constexpr int kColumnStep = sizeof(T) == 2 ? 2 : 1;

template <class T>
constexpr bool kIsFixed = std::is_same_v<T, fixed16>;

// What keys and values are multiplied with: rounded queries and weights where there are dot products of pairs.
#if defined(LLMB_BF16_DOTS)
template <class T>
using Factor = T;
#else
template <class T>
using Factor = std::conditional_t<kIsFixed<T>, fixed16, float>;
#endif

template <class T>
using Sum = std::conditional_t<kIsFixed<T>, Ints, Floats>;

// How many elements of a block's queries lie between neighbouring rows: [dim][rows], or [dim/2][rows][2].
template <class T>
constexpr int kQueryStep = sizeof(Factor<T>) == 2 ? 2 : 1;

template <int V>
inline void load_row_pair(const bf16* b, int, Floats (&first)[V], Floats (&second)[V]) {
    for (int v = 0; v < V; v++) {
        const Ints pairs = load_pairs(b + 2 * kLanes * v);
        first[v] = even(pairs);
        second[v] = odd(pairs);
    }
}

template <int V>
inline void load_row_pair(const float* b, int width, Floats (&first)[V], Floats (&second)[V]) {
    for (int v = 0; v < V; v++) {
        first[v] = load(b + kLanes * v);
        second[v] = load(b + width + kLanes * v);
    }
}

// Memory that will be needed soon, fetched line by line beside the arithmetic.
struct Ahead {
    const char* next;
    int step;  // bytes; 0: nothing to fetch

    void fetch() {
        for (int line = 0; line < step; line += 64) __builtin_prefetch(next + line);
        next += step;
    }
};

// c[r][v] += sum over i of a[r * kRowStep + i * kStep] * b[i][v]: one chain per element.
template <int kRowStep, int kStep, class T, int R, int V>
inline void multiply(const float* a, const T* b, int width, int num_pairs, Ahead& ahead, Floats (&c)[R][V]) {
    for (int i = 0; i < num_pairs; i++) {
        Floats first[V], second[V];
        load_row_pair(b, width, first, second);
        ahead.fetch();
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) c[r][v] = fma(splat(a[r * kRowStep]), first[v], c[r][v]);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) c[r][v] = fma(splat(a[r * kRowStep + kStep]), second[v], c[r][v]);
        a += 2 * kStep;
        b += 2 * width;
    }
}

#if defined(LLMB_BF16_DOTS)
inline Floats dot_pairs(Ints a, Ints b, Floats c) { return dot(a, b, c); }
#endif

#if defined(LLMB_BF16_DOTS) || defined(LLMB_FIXED_POINT_KV)
// c[r][v] += sum over pairs i of a[r * kRowStep + 2 * i * kStep ..] * b[i][v]: one chain per element.
template <int kRowStep, int kStep, class T, int R, int V>
    requires(sizeof(T) == 2)
inline void multiply(const T* a, const T* b, int width, int num_pairs, Ahead& ahead, Sum<T> (&c)[R][V]) {
    for (int i = 0; i < num_pairs; i++) {
        Ints pairs[V];
        for (int v = 0; v < V; v++) pairs[v] = load_pairs(b + 2 * kLanes * v);
        ahead.fetch();
        for (int r = 0; r < R; r++) {
            int32_t both;
            std::memcpy(&both, a + r * kRowStep, sizeof both);
            for (int v = 0; v < V; v++) c[r][v] = dot_pairs(Ints{} + both, pairs[v], c[r][v]);
        }
        a += 2 * kStep;
        b += 2 * width;
    }
}
#endif

// The running softmax of the rows of a tile.
struct SoftmaxState {
    float* sums;     // [rows][kLanes]: of weights, by position modulo kLanes
    float* maxima;   // [rows]
    float* weighted; // [rows][padded_dim]: values times weights
};

// Rows of a tile that are computed together.
template <class T>
struct RowBlock {
    const Factor<T>* q;    // [dim][rows] or [dim/2][rows][2], scaled
    const float* q_units;  // [rows]: fixed16: what a product of q with 2^15 stands for
    const int32_t* first;  // [rows]: the oldest position a row sees
    const int32_t* last;   // [rows]: its own
    SoftmaxState state;
};

// Where the positions of one chunk lie, and which sub-blocks' worth of memory to fetch beside the scores and beside the
// values of each sub-block. Only sub-blocks that some row of the tile sees are filled in.
template <class T>
struct Chunk {
    int start;  // absolute position
    const T* keys[kChunkBlocks];
    const T* values[kChunkBlocks];
    const float* key_units;    // [kChunk]: fixed16: what 2^15 stands for at a position
    const float* value_units;
    const char* ahead_of_keys[kChunkBlocks];
    const char* ahead_of_values[kChunkBlocks];
};

struct TileShape {
    int dim;
    int padded_dim;  // a multiple of kLanes: the width of values
    int block_size;
    float softcap;
};

inline Ints iota() {
    Ints v;
    for (int i = 0; i < kLanes; i++) v[i] = i;
    return v;
}

// tanh(x), absolute error below 2e-7.
inline Floats tanh(Floats x) {
    const Floats ten = splat(10.0f);
    const Floats bounded = x > ten ? ten : x < -ten ? -ten : x;
    return 1.0f - 2.0f / (exp(bounded * 2.0f) + 1.0f);
}

// e^x for x <= 0, and exactly 1 and 0 for zero and minus infinity; relative error below 2e-7 near zero, 2e-6 at -87.
inline Floats weight_of(Floats x) {
#if defined(__AVX512F__)
    const __m512 v = (__m512)x, magic = _mm512_set1_ps(12582912.0f), log2e = _mm512_set1_ps(1.44269504f);
    const __m512 whole = _mm512_sub_ps(_mm512_fmadd_ps(v, log2e, magic), magic);
    const Floats f = (Floats)_mm512_fmsub_ps(v, log2e, whole);
    Floats p = splat(1.326472716e-3f);
    for (float c : {9.671512838e-3f, 5.550733745e-2f, 2.402224208e-1f, 6.931469776e-1f, 1.0f}) p = fma(p, f, splat(c));
    const __mmask16 counts = _mm512_cmp_ps_mask(v, _mm512_set1_ps(-87.33f), _CMP_GT_OQ);
    return (Floats)_mm512_maskz_scalef_ps(counts, (__m512)p, whole);
#else
    return exp(x);
#endif
}

inline float weight_of(float x) { return weight_of(splat(x))[0]; }

inline Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }

// kLanes scores of row r, at `column` of the chunk, from sums of products.
template <class T>
inline Floats scores_of(const Chunk<T>&, const RowBlock<T>&, int, int, Floats sums) { return sums; }
template <class T>
inline Floats scores_of(const Chunk<T>& chunk, const RowBlock<T>& rows, int r, int column, Ints sums) {
    return to_floats(sums) * splat(rows.q_units[r]) * load(chunk.key_units + column);
}

// Scores of sub-blocks from..to-1 into scores [R][kChunk].
template <class T, int R>
inline void score_rows(const TileShape& shape, const Chunk<T>& chunk, const RowBlock<T>& rows, int from, int to,
                       int ahead_bytes, float* scores) {
    constexpr int kStep = kVectors * kLanes;
    for (int sub = from; sub < to; sub++) {
        Ahead ahead{chunk.ahead_of_keys[sub], ahead_bytes};
        for (int column = 0; column < kSubBlock; column += kStep) {
            Sum<T> c[R][kVectors] = {};
            const T* keys = chunk.keys[sub] + kColumnStep<T> * column;
            multiply<kQueryStep<T>, R>(rows.q, keys, shape.block_size, shape.dim / 2, ahead, c);
            for (int r = 0; r < R; r++)
                for (int v = 0; v < kVectors; v++) {
                    const int at = sub * kSubBlock + column + v * kLanes;
                    store(scores + r * kChunk + at, scores_of(chunk, rows, r, at, c[r][v]));
                }
            ahead.step = 0;
        }
    }
}

// Applies softcap and mask to scores of positions start + begin..end-1; returns the largest.
inline float mask_row(float* scores, int begin, int end, int start, int first, int last, float softcap) {
    const bool masked = start + begin < first || start + end - 1 > last;
    Floats best = splat(kNothingSeen);
    for (int i = begin; i < end; i += kLanes) {
        Floats x = load(scores + i);
        if (softcap != 0.0f) x = tanh(x / softcap) * softcap;
        if (masked) {
            const Ints position = iota() + (start + i);
            x = position >= first ? x : splat(-INFINITY);
            x = position <= last ? x : splat(-INFINITY);
        }
        if (masked || softcap != 0.0f) store(scores + i, x);
        best = max(x, best);
    }
    return max(best);
}

inline void scale_state(const SoftmaxState& state, int r, int padded_dim, float factor) {
    store(state.sums + r * kLanes, load(state.sums + r * kLanes) * factor);
    float* weighted = state.weighted + r * padded_dim;
    for (int d = 0; d < padded_dim; d += kLanes) store(weighted + d, load(weighted + d) * factor);
}

// Scores become weights relative to the row's maximum so far; the row's state is scaled when that grows.
template <class W>
inline void soften_row(const TileShape& shape, const SoftmaxState& state, int r, const float* scores, W* weights,
                       int begin, int end, float best) {
    if (best > state.maxima[r]) {
        scale_state(state, r, shape.padded_dim, weight_of(state.maxima[r] - best));
        state.maxima[r] = best;
    }
    const Floats maximum = splat(state.maxima[r]);
    Floats sums = load(state.sums + r * kLanes);
    for (int i = begin; i < end; i += kLanes) {
        const Floats weight = weight_of(load(scores + i) - maximum);
        store(weights + i, weight);
        sums += weight;
    }
    store(state.sums + r * kLanes, sums);
}

// Weights times their values' units become integers whose sum is at most about kWeightsSum; returns what a product of one
// of these with 2^15 stands for.
constexpr float kWeightsSum = 32000.0f;

inline float round_weights(float* weights, const float* units, int begin, int end, fixed16* rounded) {
    using Shorts = int16_t __attribute__((vector_size(kLanes * 2)));
    Floats sums{};
    for (int i = begin; i < end; i += kLanes) {
        const Floats scaled = load(weights + i) * load(units + i);
        store(weights + i, scaled);
        sums += scaled;
    }
    const float total = sum(sums);
    const Floats factor = splat(total > 0.0f ? kWeightsSum / total : 0.0f), magic = splat(12582912.0f);
    for (int i = begin; i < end; i += kLanes) {
        const Floats shifted = fma(load(weights + i), factor, magic);
        const Shorts integers = __builtin_convertvector((Ints)shifted, Shorts);  // its low mantissa bits
        std::memcpy(rounded + i, &integers, sizeof integers);
    }
    return total * (1.0f / (kWeightsSum * 32768.0f));
}

// Where the sums of weighted values of one chunk begin, and how they get into a row's state.
inline void begin_sums(const float* weighted, Floats& sums) { sums = load(weighted); }
inline void begin_sums(const float*, Ints& sums) { sums = Ints{}; }
inline void end_sums(float* weighted, float, Floats sums) { store(weighted, sums); }
inline void end_sums(float* weighted, float unit, Ints sums) {
    store(weighted, fma(to_floats(sums), splat(unit), load(weighted)));
}

// Adds weights times values of the chunk's positions begin..end-1 to columns d.. of all rows.
template <int V, class T, int R>
inline void weigh_columns(const TileShape& shape, const Chunk<T>& chunk, const RowBlock<T>& rows, const Factor<T>* weights,
                          const float* units, int begin, int end, int ahead_bytes, int d) {
    Sum<T> c[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) begin_sums(rows.state.weighted + r * shape.padded_dim + d + v * kLanes, c[r][v]);
    for (int at = begin; at < end; at += kSubBlock) {
        const int sub = at / kSubBlock;
        const int num_pairs = (end - at < kSubBlock ? end - at + 1 : kSubBlock) / 2;
        Ahead ahead{chunk.ahead_of_values[sub] + (d / (kVectors * kLanes)) * (kSubBlock / 2) * ahead_bytes, ahead_bytes};
        const T* values = chunk.values[sub] + kColumnStep<T> * d;
        multiply<kChunk, 1>(weights + at, values, shape.padded_dim, num_pairs, ahead, c);
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) end_sums(rows.state.weighted + r * shape.padded_dim + d + v * kLanes, units[r], c[r][v]);
}

// Weights that are not rounded take the scores' place.
inline float* weights_beside(float* scores, float*) { return scores; }
template <class T>
inline T* weights_beside(float*, T* rounded) { return rounded; }

// One chunk for R rows.
template <class T, int R>
void visit_chunk(const TileShape& shape, const Chunk<T>& chunk, const RowBlock<T>& rows, bool fetch_ahead) {
    alignas(64) float scores[R * kChunk];
    alignas(64) Factor<T> rounded[sizeof(Factor<T>) == 4 ? 1 : R * kChunk];
    [[maybe_unused]] float units[R];  // fixed16: of the weights
    // Rows are in the order of their positions: none sees further back than the first, or further ahead than the last.
    const int from = rows.first[0] > chunk.start ? (rows.first[0] - chunk.start) / kSubBlock : 0;
    const int seen = rows.last[R - 1] + 1 - chunk.start;
    const int end = seen < kChunk ? seen : kChunk, to = (end + kSubBlock - 1) / kSubBlock;
    if (to <= from) return;
    const int ahead_bytes = fetch_ahead ? 2 * kSubBlock * static_cast<int>(sizeof(T)) : 0;
    Factor<T>* weights = weights_beside(scores, rounded);
    score_rows<T, R>(shape, chunk, rows, from, to, ahead_bytes, scores);
    for (int r = 0; r < R; r++) {
        float* row = scores + r * kChunk;
        const int begin = from * kSubBlock, stop = to * kSubBlock;
        const float best = mask_row(row, begin, stop, chunk.start, rows.first[r], rows.last[r], shape.softcap);
        if constexpr (kIsFixed<T>) {
            soften_row(shape, rows.state, r, row, row, begin, stop, best);
            units[r] = round_weights(row, chunk.value_units, begin, stop, weights + r * kChunk);
        } else {
            soften_row(shape, rows.state, r, row, weights + r * kChunk, begin, stop, best);
        }
    }
    int d = 0;
    for (; d + kVectors * kLanes <= shape.padded_dim; d += kVectors * kLanes)
        weigh_columns<kVectors, T, R>(shape, chunk, rows, weights, units, from * kSubBlock, end, ahead_bytes, d);
    if (d < shape.padded_dim)
        weigh_columns<1, T, R>(shape, chunk, rows, weights, units, from * kSubBlock, end, ahead_bytes, d);
}

template <class T>
using VisitChunk = void (*)(const TileShape&, const Chunk<T>&, const RowBlock<T>&, bool);

template <class T, int... R>
inline VisitChunk<T> visit_for(int num_rows, std::integer_sequence<int, R...>) {
    static constexpr VisitChunk<T> kTable[] = {&visit_chunk<T, R + 1>...};
    return kTable[num_rows - 1];
}

template <class T>
inline VisitChunk<T> visit_for(int num_rows) {
    return visit_for<T>(num_rows, std::make_integer_sequence<int, kMaxRows>{});
}

inline void clear_state(const SoftmaxState& state, int num_rows, int padded_dim) {
    std::memset(state.sums, 0, sizeof(float) * num_rows * kLanes);
    std::memset(state.weighted, 0, sizeof(float) * num_rows * padded_dim);
    for (int r = 0; r < num_rows; r++) state.maxima[r] = kNothingSeen;
}

// total += part, for one row. Exact where one of them has seen nothing.
inline void merge_row(const SoftmaxState& total, const SoftmaxState& part, int r, int padded_dim) {
    const float best = part.maxima[r] > total.maxima[r] ? part.maxima[r] : total.maxima[r];
    const Floats a = splat(weight_of(total.maxima[r] - best)), b = splat(weight_of(part.maxima[r] - best));
    const auto merge = [&](float* x, const float* y) { store(x, fma(load(y), b, load(x) * a)); };
    merge(total.sums + r * kLanes, part.sums + r * kLanes);
    for (int d = 0; d < padded_dim; d += kLanes)
        merge(total.weighted + r * padded_dim + d, part.weighted + r * padded_dim + d);
    total.maxima[r] = best;
}

// What a row's weighted values are multiplied with in the end: 1 / the sum of its weights, the sink's included.
inline float normaliser(const SoftmaxState& state, int r, const float* sink) {
    const float total = sum(load(state.sums + r * kLanes));
    if (sink == nullptr) return 1.0f / total;
    const float best = *sink > state.maxima[r] ? *sink : state.maxima[r];
    const float factor = weight_of(state.maxima[r] - best);
    return factor / fma(total, factor, weight_of(*sink - best));
}

}  // namespace llmb
