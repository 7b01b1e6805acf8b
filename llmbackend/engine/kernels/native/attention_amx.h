// Attention of a task's bfloat16 queries on the tile unit: blocks of 16 rows times chunks of keys and values.
//
// Used by attention.h. Invariant, in addition to the order of attention (attention_softmax.h): every row goes through
// the same tile products, for any number of rows, and a row of such a product depends only on that row. A score is
// summed in steps of 32 dimensions, a weighted value in steps of 32 absolute positions, and within a step as amx.h
// says. Masked positions have a weight of zero; steps that are masked for all queries of a block are skipped, which is
// equivalent.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "amx.h"
#include "attention_latent.h"
#include "attention_plan.h"
#include "attention_softmax.h"
#include "memory.h"
#include "numbers.h"
#include "step.h"
#include "tile_rows.h"

#if defined(LLMB_HAS_TILES)

namespace llmb {

constexpr int kDepth = TileRow<bf16>::kColumns;  // dimensions or positions summed in one product
static_assert(kSubBlock == kDepth);             // a sub-block of weights is a tile, and two tiles of keys are a sub-block

// 2 * kLanes adjacent elements, rounded to bfloat16.
inline void store_rounded(bf16* to, Floats first, Floats second) {
#if defined(__AVX512BF16__)
    const __m512bh rounded = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    std::memcpy(to, &rounded, sizeof rounded);
#else
    store(to, first);
    store(to + kLanes, second);
#endif
}

inline void store_weights(bf16* to, Floats first, Floats second) { store_rounded(to, first, second); }

// Sums of 16 rows and 32 columns are tiles kC and kC + 1, with kC 0 or 2: while one pair is summed, the other is
// stored.
constexpr int kSumColumns = 32;

// Sums += A·B. A is tile 4 or 5; B is tiles 6 and 7: 32 rows, as pairs of rows.
template <int kC>
inline void add_product(const bf16* a, const bf16* b, ptrdiff_t b_stride_bytes) {
    constexpr int kA = 4 + kC / 2;
    tile_load<kA>(a, amx::kTileBytes);
    tile_load<6>(b, b_stride_bytes);
    tile_dot<kC, kA, 6>();
    tile_load<7>(b + kDepth, b_stride_bytes);
    tile_dot<kC + 1, kA, 7>();
}

// stride: elements from row to row.
template <int kC>
inline void load_sums(const float* sums, int stride) {
    const ptrdiff_t bytes = stride * static_cast<ptrdiff_t>(sizeof(float));
    tile_load<kC>(sums, bytes);
    tile_load<kC + 1>(sums + kSumColumns / 2, bytes);
}

template <int kC>
inline void store_sums(float* sums, int stride) {
    const ptrdiff_t bytes = stride * static_cast<ptrdiff_t>(sizeof(float));
    tile_store<kC>(sums, bytes);
    tile_store<kC + 1>(sums + kSumColumns / 2, bytes);
}

// For each i: computes sums i, then stores sums i - 1. In this order, because a load waits for older stores whose
// addresses end like its own. Calls sum(i, C) and store(i, C), where C is the number of the pair of tiles.
template <class SumUp, class Store>
inline void in_turns(Range range, SumUp&& sum, Store&& store) {
    constexpr std::integral_constant<int, 0> kFirst{};
    constexpr std::integral_constant<int, 2> kSecond{};
    for (int i = range.begin; i < range.end; i += 2) {
        sum(i, kFirst);
        if (i > range.begin) store(i - 1, kSecond);
        if (i + 1 < range.end) sum(i + 1, kSecond);
        store(i, kFirst);
    }
    if ((range.end - range.begin) % 2 == 0 && range.end > range.begin) store(range.end - 1, kSecond);
}

// `count` pairs, padded to 32 with zeros.
inline void copy_row(const bf16* from, int count, bf16* to) {
    for (int i = 0; i < kDepth; i += kLanes) {
        const auto* vector = reinterpret_cast<const float*>(from + 2 * i);
        const Floats pairs = i < count ? load_some(vector, std::min(kLanes, count - i)) : Floats{};
        std::memcpy(to + 2 * i, &pairs, sizeof pairs);
    }
}

class TileKernel {
  public:
    using Element = bf16;
    static int padded(int dim) { return (dim + kDepth - 1) / kDepth * kDepth; }
    static int value_width(const AttentionOp& op) { return padded(value_dim(op)); }
    static int padded_rows(int num_rows) { return (num_rows + amx::kTileRows - 1) / amx::kTileRows * amx::kTileRows; }

    TileKernel(const AttentionOp& op, int max_rows, Carver& memory)
        : dim_(op.head_dim), whole_(dim_ / kDepth * kDepth), padded_dim_(padded(dim_)), value_dim_(value_dim(op)),
          value_width_(value_width(op)), pads_(dim_ != padded_dim_),
          block_size_(op.block_size), softcap_(op.softcap), scaling_(op.scaling),
          q_(memory.take<bf16>(static_cast<size_t>(padded_rows(max_rows)) * padded_dim_)),
          weights_(memory.take<bf16>(static_cast<size_t>(padded_rows(max_rows)) * kChunk)),
          scores_(memory.take<float>(static_cast<size_t>(padded_rows(max_rows)) * kChunk)),
          rest_of_keys_(memory.take<bf16>(pads_ ? kChunkBlocks * kRestSize : 0)),
          rest_of_values_(memory.take<bf16>(pads_ ? kChunkBlocks * kRestSize : 0)), latent_(op, memory) {}

    void begin(int num_rows) {
        num_blocks_ = padded_rows(num_rows) / amx::kTileRows;
        const int steps = num_blocks_ * (padded_dim_ / kDepth), sub_block_bytes = kSubBlock * dim_ * 2;
        ahead_bytes_ = (sub_block_bytes / steps + 63) / 64 * 64;
        // A few rows take less time as smaller tiles.
        const int tile_rows = std::min(num_rows, amx::kTileRows);
        if (tile_rows != tile_rows_) tiles_begin(tile_rows);
        tile_rows_ = tile_rows;
    }

    void place_query(int r, const float* q) {
        const TileRow<bf16> to(q_, r, padded_dim_);
        int d = 0;
        for (; d + 2 * kLanes <= dim_; d += 2 * kLanes)
            store_rounded(to + d, load(q + d) * scaling_, load(q + d + kLanes) * scaling_);
        for (; d < padded_dim_; d++) to[d] = to_bf16(d < dim_ ? q[d] * scaling_ : 0.0f);
    }

    // The scores of all blocks, then their softmax, then their weighted values. Vectors run at half their rate while
    // tile products run and for about 100 ns after them, and products wait about 250 ns after a pause of more than 400.
    void visit(Chunk<bf16> chunk, const TaskRows& rows) {
        if (pads_) copy_rest(chunk);
        latent_.fill(chunk);
        for (int i = 0; i < num_blocks_; i++) score(chunk, block_at(i, chunk, rows));
        for (int i = 0; i < num_blocks_; i++) soften(chunk, block_at(i, chunk, rows));
        for (int i = 0; i < num_blocks_; i++) weigh(chunk, block_at(i, chunk, rows));
    }

  private:
    // 16 rows, or the remaining ones, in one chunk.
    struct Block {
        int index;
        TaskRows rows;
        Range subs;  // the sub-blocks they attend to
    };

    Block block_at(int index, const Chunk<bf16>& chunk, const TaskRows& rows) const {
        const int r = index * amx::kTileRows;
        const TaskRows part = rows.part(r, std::min(amx::kTileRows, rows.count - r));
        return {index, part, part.seen_in(chunk.start)};
    }

    const bf16* q(const Block& block) const { return q_ + static_cast<size_t>(block.index) * amx::kTileRows * padded_dim_; }
    bf16* weights(const Block& block) const { return weights_ + block.index * amx::kTileRows * kChunk; }
    float* scores(const Block& block) const { return scores_ + block.index * amx::kTileRows * kChunk; }

    // Each block prefetches its share of what will be needed, in steps of 32 dimensions.
    Ahead ahead(const char* next, const Block& block, int step) const {
        return {next + (block.index * (padded_dim_ / kDepth) + step) * ahead_bytes_, ahead_bytes_};
    }

    void score(const Chunk<bf16>& chunk, const Block& block) {
        in_turns(block.subs, [&](int sub, auto c) { sum_scores<c>(chunk, block, sub); },
                 [&](int sub, auto c) { store_sums<c>(scores(block) + sub * kSubBlock, kChunk); });
    }

    template <int kC>
    void sum_scores(const Chunk<bf16>& chunk, const Block& block, int sub) {
        const int row_elements = 2 * block_size_;
        const bf16* a = q(block);
        const bf16* b = chunk.keys[sub];
        Ahead next = ahead(chunk.ahead_of_keys[sub], block, 0);
        tile_zero<kC>();
        tile_zero<kC + 1>();
        for (int d = 0; d < whole_; d += kDepth) {
            next.fetch();
            add_product<kC>(a, b, row_elements * sizeof(bf16));
            a += TileRow<bf16>::kSize;
            b += kDepth / 2 * row_elements;
        }
        if (pads_) add_product<kC>(a, rest_of_keys_ + sub * kRestSize, kRestStride);
    }

    void soften(const Chunk<bf16>& chunk, const Block& block) {
        if (block.subs.end <= block.subs.begin) return;
        const int begin = block.subs.begin * kSubBlock, end = block.subs.end * kSubBlock;
        const TaskRows& rows = block.rows;
        const auto row = [&](int r) { return scores(block) + r * kChunk; };
        float best[amx::kTileRows];
        int32_t growing[amx::kTileRows + 1];
        for (int r = 0; r < rows.count; r++) best[r] = finish_scores(rows, r, row(r), begin, end, chunk.start, softcap_);
        raise_maxima(rows.state, rows.count, best, growing);
        for (int r = 0; r < rows.count; r++)
            soften_row(rows.state, r, row(r), TileRow<bf16>(weights(block), r, kChunk), begin, end);
    }

    void weigh(const Chunk<bf16>& chunk, const Block& block) {
        if (block.subs.end <= block.subs.begin) return;
        float* weighted = block.rows.state.weighted;
        in_turns({0, value_width_ / kSumColumns}, [&](int column, auto c) { sum_values<c>(chunk, block, column); },
                 [&](int column, auto c) { store_sums<c>(weighted + column * kSumColumns, value_width_); });
    }

    template <int kC>
    void sum_values(const Chunk<bf16>& chunk, const Block& block, int column) {
        const int d = column * kSumColumns;
        load_sums<kC>(block.rows.state.weighted + d, value_width_);
        for (int sub = block.subs.begin; sub < block.subs.end; sub++) {
            ahead(chunk.ahead_of_values[sub], block, column).fetch();
            const bf16* a = weights(block) + sub * TileRow<bf16>::kSize;
            if (d < whole_) add_product<kC>(a, chunk.values[sub] + 2 * d, 2 * sizeof(bf16) * value_dim_);
            else add_product<kC>(a, rest_of_values_ + sub * kRestSize, kRestStride);
        }
    }

    // Copies the last dimensions of a chunk, padded with zeros, if head_dim is not a multiple of 32.
    void copy_rest(const Chunk<bf16>& chunk) const {
        const int rest = dim_ - whole_;
        for (int sub = 0; sub < kChunkBlocks; sub++) {
            if (chunk.keys[sub] == nullptr) continue;
            const bf16* keys = chunk.keys[sub] + static_cast<size_t>(whole_) * block_size_;
            const bf16* values = chunk.values[sub] + 2 * whole_;
            for (int i = 0; i < kDepth / 2; i++) {
                const int at = sub * kRestSize + i * 2 * kDepth;
                copy_row(keys + i * 2 * block_size_, i < rest / 2 ? kSubBlock : 0, rest_of_keys_ + at);
                copy_row(values + i * 2 * dim_, rest, rest_of_values_ + at);
            }
        }
    }

    static constexpr int kRestSize = kDepth * kSubBlock;
    static constexpr ptrdiff_t kRestStride = 2 * kDepth * sizeof(bf16);

    const int dim_;
    const int whole_;       // dimensions in whole steps
    const int padded_dim_;  // in total
    const int value_dim_;
    const int value_width_;
    const bool pads_;       // whether there are remaining dimensions
    const int block_size_;
    const float softcap_;
    const float scaling_;
    bf16* const q_;               // tile_rows.h: [rows / 16][padded_dim / 32][16][32]
    bf16* const weights_;         // tile_rows.h: [rows / 16][kChunk / 32][16][32]
    float* const scores_;         // [rows][kChunk]
    bf16* const rest_of_keys_;    // [sub-block][16][kSubBlock][2]
    bf16* const rest_of_values_;  // [sub-block][kSubBlock / 2][32][2]
    const LatentValues<bf16> latent_;
    int tile_rows_ = amx::kTileRows;  // as configured when a worker starts
    int num_blocks_ = 0;
    int ahead_bytes_ = 0;  // see ahead()
};

}  // namespace llmb

#endif
