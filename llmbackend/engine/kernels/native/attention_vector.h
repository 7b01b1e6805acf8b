// Attention of a task's queries with vectors: rows of queries, broadcast in registers, times rows of keys and values.
//
// Used by attention.h. Invariant, in addition to the order of attention (attention_softmax.h): a score is one chain of
// fma's over the head's dimensions, a value is one chain of fma's over positions; in fixed point, both are exact within
// a chunk. Masked positions add exact zeros or are skipped, so nothing depends on the task, the block size or the
// blocks' addresses.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "attention_latent.h"
#include "attention_plan.h"
#include "attention_softmax.h"
#include "fixed16.h"
#include "memory.h"
#include "numbers.h"
#include "step.h"

namespace llmb {

constexpr int kVectors = 2;  // the width of a register tile

template <class T>
constexpr bool kIsFixed = std::is_same_v<T, fixed16>;

template <class T>
#if defined(__AVX512F__)
constexpr int kMaxRows = 12;  // 24 of 32 registers are sums
#else
constexpr int kMaxRows = kIsFixed<T> ? 6 : 4;  // 12 or 8 of 16; float32 needs registers for widened keys and values
#endif

// What keys and values are multiplied with: rounded queries and weights if there are dot products of pairs.
#if defined(LLMB_BF16_DOTS)
template <class T>
using Factor = T;
#else
template <class T>
using Factor = std::conditional_t<kIsFixed<T>, fixed16, float>;
#endif

template <class T>
using Sum = std::conditional_t<kIsFixed<T>, Ints, Floats>;

// Distance in elements between adjacent rows of a block's queries: [dim][rows], or [dim/2][rows][2].
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

// Rows that are computed together.
template <class T>
struct RowBlock {
    const Factor<T>* q;  // [dim][rows] or [dim/2][rows][2], scaled
    TaskRows rows;
    const float* q_units;      // [rows]: fixed16: the value of a product of q with 2^15
    const float* key_units;    // [kChunk]: fixed16: the value of 2^15 at a position
    const float* value_units;
};

struct HeadShape {
    int dim;
    int value_width;  // columns of the value rows: a multiple of kLanes
    int block_size;
    float softcap;
};

// kLanes scores of row r, at `column` of the chunk, from sums of products.
template <class T>
inline Floats scores_of(const RowBlock<T>&, int, int, Floats sums) { return sums; }
template <class T>
inline Floats scores_of(const RowBlock<T>& block, int r, int column, Ints sums) {
    return to_floats(sums) * splat(block.q_units[r]) * load(block.key_units + column);
}

// Scores of sub-blocks from..to-1 into scores [R][kChunk].
template <class T, int R>
inline void score_rows(const HeadShape& shape, const Chunk<T>& chunk, const RowBlock<T>& block, Range subs,
                       int ahead_bytes, float* scores) {
    constexpr int kStep = kVectors * kLanes;
    for (int sub = subs.begin; sub < subs.end; sub++) {
        Ahead ahead{chunk.ahead_of_keys[sub], ahead_bytes};
        for (int column = 0; column < kSubBlock; column += kStep) {
            Sum<T> c[R][kVectors] = {};
            const T* keys = chunk.keys[sub] + kColumnStep<T> * column;
            multiply<kQueryStep<T>, R>(block.q, keys, shape.block_size, shape.dim / 2, ahead, c);
            for (int r = 0; r < R; r++)
                for (int v = 0; v < kVectors; v++) {
                    const int at = sub * kSubBlock + column + v * kLanes;
                    store(scores + r * kChunk + at, scores_of(block, r, at, c[r][v]));
                }
            ahead.step = 0;
        }
    }
}

// Weights times their values' units become integers whose sum is at most about kWeightsSum; returns the value of a
// product of one of these with 2^15.
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

// Where the sums of weighted values of one chunk start, and how they are added to a row's state.
inline void begin_sums(const float* weighted, Floats& sums) { sums = load(weighted); }
inline void begin_sums(const float*, Ints& sums) { sums = Ints{}; }
inline void end_sums(float* weighted, float, Floats sums) { store(weighted, sums); }
inline void end_sums(float* weighted, float unit, Ints sums) {
    store(weighted, fma(to_floats(sums), splat(unit), load(weighted)));
}

// Adds weights times values of the chunk's positions begin..end-1 to columns d.. of all rows.
template <int V, class T, int R>
inline void weigh_columns(const HeadShape& shape, const Chunk<T>& chunk, const SoftmaxState& state,
                          const Factor<T>* weights, const float* units, int begin, int end, int ahead_bytes, int d) {
    Sum<T> c[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) begin_sums(state.weighted + r * state.width + d + v * kLanes, c[r][v]);
    for (int at = begin; at < end; at += kSubBlock) {
        const int sub = at / kSubBlock;
        const int num_pairs = (end - at < kSubBlock ? end - at + 1 : kSubBlock) / 2;
        Ahead ahead{chunk.ahead_of_values[sub] + (d / (kVectors * kLanes)) * (kSubBlock / 2) * ahead_bytes, ahead_bytes};
        const T* values = chunk.values[sub] + kColumnStep<T> * d;
        multiply<kChunk, 1>(weights + at, values, shape.value_width, num_pairs, ahead, c);
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) end_sums(state.weighted + r * state.width + d + v * kLanes, units[r], c[r][v]);
}

// Unrounded weights replace the scores.
inline float* weights_beside(float* scores, float*) { return scores; }
template <class T>
inline T* weights_beside(float*, T* rounded) { return rounded; }

// One chunk for R rows.
template <class T, int R>
void visit_chunk(const HeadShape& shape, const Chunk<T>& chunk, const RowBlock<T>& block, bool fetch_ahead) {
    alignas(64) float scores[R * kChunk];
    alignas(64) Factor<T> rounded[sizeof(Factor<T>) == 4 ? 1 : R * kChunk];
    [[maybe_unused]] float units[R];  // fixed16: of the weights
    const TaskRows& rows = block.rows;
    const Range subs = rows.seen_in(chunk.start);
    if (subs.end <= subs.begin) return;
    const int ahead_bytes = fetch_ahead ? 2 * kSubBlock * static_cast<int>(sizeof(T)) : 0;
    const int begin = subs.begin * kSubBlock, stop = subs.end * kSubBlock;
    Factor<T>* weights = weights_beside(scores, rounded);
    score_rows<T, R>(shape, chunk, block, subs, ahead_bytes, scores);
    for (int r = 0; r < R; r++) {
        float* row = scores + r * kChunk;
        const float best = finish_scores(rows, r, row, begin, stop, chunk.start, shape.softcap);
        raise_maximum(rows.state, r, best);
        if constexpr (kIsFixed<T>) {
            soften_row(rows.state, r, row, row, begin, stop);
            units[r] = round_weights(row, block.value_units, begin, stop, weights + r * kChunk);
        } else {
            soften_row(rows.state, r, row, weights + r * kChunk, begin, stop);
        }
    }
    const int end = std::min(stop, rows.last[R - 1] + 1 - chunk.start);
    int d = 0;
    for (; d + kVectors * kLanes <= shape.value_width; d += kVectors * kLanes)
        weigh_columns<kVectors, T, R>(shape, chunk, rows.state, weights, units, begin, end, ahead_bytes, d);
    if (d < shape.value_width)
        weigh_columns<1, T, R>(shape, chunk, rows.state, weights, units, begin, end, ahead_bytes, d);
}

template <class T>
using VisitChunk = void (*)(const HeadShape&, const Chunk<T>&, const RowBlock<T>&, bool);

template <class T, int... R>
inline VisitChunk<T> visit_for(int num_rows, std::integer_sequence<int, R...>) {
    static constexpr VisitChunk<T> kTable[] = {&visit_chunk<T, R + 1>...};
    return kTable[num_rows - 1];
}

template <class T>
inline VisitChunk<T> visit_for(int num_rows) {
    return visit_for<T>(num_rows, std::make_integer_sequence<int, kMaxRows<T>>{});
}

// The rows of consecutive tasks, with one worker's memory.
template <class T>
class VectorKernel {
  public:
    using Element = T;
    static int value_width(const AttentionOp& op) { return (value_dim(op) + kLanes - 1) / kLanes * kLanes; }
    static int padded_rows(int num_rows) { return num_rows; }

    VectorKernel(const AttentionOp& op, int max_rows, Carver& memory)
        : shape_{op.head_dim, value_width(op), op.block_size, op.softcap}, scaling_(op.scaling),
          q_(memory.take<Factor<T>>(static_cast<size_t>(max_rows) * shape_.dim)), q_units_(memory.take<float>(max_rows)),
          units_(memory.take<float>(kIsFixed<T> ? 2 * kChunk : 0)),
          pads_(value_dim(op) != shape_.value_width), padded_values_(memory.take<T>(pads_ ? kChunk * shape_.value_width : 0)),
          latent_(op, memory) {}

    void begin(int num_rows) {
        num_rows_ = num_rows;
        const int blocks = (num_rows + kMaxRows<T> - 1) / kMaxRows<T>;
        rows_per_block_ = (num_rows + blocks - 1) / blocks;
    }

    // Scales queries, and transposes them block by block.
    void place_query(int r, const float* q) {
        const int block = r / rows_per_block_ * rows_per_block_, size = std::min(rows_per_block_, num_rows_ - block);
        q_units_[r] = place(q, q_ + static_cast<size_t>(block) * shape_.dim + kQueryStep<T> * (r - block), size);
    }

    void visit(Chunk<T> chunk, const TaskRows& rows) {
        if (pads_) pad_values(chunk);
        latent_.fill(chunk);
        if constexpr (kIsFixed<T>) read_units(chunk);
        for (int r = 0; r < num_rows_; r += rows_per_block_) {
            const int size = std::min(rows_per_block_, num_rows_ - r);
            const RowBlock<T> block{q_ + static_cast<size_t>(r) * shape_.dim, rows.part(r, size), q_units_ + r, units_,
                                    units_ + kChunk};
            // The last block of rows attends to the most positions.
            visit_for<T>(size)(shape_, chunk, block, r + size == num_rows_);
        }
    }

  private:
    float place(const float* q, float* to, int num_rows) const {
        for (int d = 0; d < shape_.dim; d++) to[static_cast<size_t>(d) * num_rows] = q[d] * scaling_;
        return 1.0f;
    }
    // Integers whose norm times that of a key is below 2^31.
    float place(const float* q, fixed16* to, int num_rows) const {
        const QueryScale scale(q, shape_.dim);
        each_integer(q, shape_.dim, scale.factor, [&](int d, int integer) {
            to[static_cast<size_t>(d / 2) * 2 * num_rows + d % 2] = {static_cast<int16_t>(integer)};
        });
        return scale.unit * scaling_;
    }
    float place(const float* q, bf16* to, int num_rows) const {
        int d = 0;
        for (; d + kLanes <= shape_.dim; d += kLanes) {
            bf16 rounded[kLanes];
            store(rounded, load(q + d) * scaling_);
            for (int i = 0; i < kLanes; i += 2)
                std::memcpy(to + static_cast<size_t>(d + i) * num_rows, rounded + i, 2 * sizeof(bf16));
        }
        for (; d < shape_.dim; d++) to[static_cast<size_t>(d / 2) * 2 * num_rows + d % 2] = to_bf16(q[d] * scaling_);
        return 1.0f;
    }

    void read_units(const Chunk<T>& chunk) const {
        for (int sub = 0; sub < kChunkBlocks; sub++) {
            if (chunk.keys[sub] == nullptr) continue;
            float* units = units_ + sub * kSubBlock;
            for (int i = 0; i < kSubBlock; i += kLanes)
                load_units(chunk.keys[sub] + 2 * i, shape_.block_size, units + i, units + kChunk + i);
        }
    }

    // Copies the values of a chunk to rows of value_width if head_dim is not a multiple of a vector.
    void pad_values(Chunk<T>& chunk) const {
        constexpr int kStep = kColumnStep<T>;
        const int width = kStep * shape_.value_width, used = kStep * shape_.dim;
        for (int sub = 0; sub < kChunkBlocks; sub++) {
            if (chunk.values[sub] == nullptr) continue;
            T* to = padded_values_ + sub * kSubBlock * shape_.value_width;
            for (int i = 0; i < kSubBlock / kStep; i++) {
                std::memcpy(to + i * width, chunk.values[sub] + i * used, used * sizeof(T));
                std::memset(to + i * width + used, 0, (width - used) * sizeof(T));
            }
            chunk.values[sub] = to;
        }
    }

    const HeadShape shape_;
    const float scaling_;
    Factor<T>* const q_;
    float* const q_units_;  // see RowBlock
    float* const units_;    // fixed16: of a chunk's keys, then of its values
    const bool pads_;
    T* const padded_values_;
    const LatentValues<T> latent_;
    int num_rows_ = 0;
    int rows_per_block_ = 0;
};

}  // namespace llmb
