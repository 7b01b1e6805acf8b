// A step's attention as a list of tiles, and where their keys and values lie.
//
// For: attention.h. Does not know: threads' memory, arithmetic. Invariant: the list depends on the step and the size of
// the team alone, so that every worker makes the same one; no result depends on it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "attention_tile.h"
#include "step.h"

namespace llmb {

constexpr int kTileRows = 192;  // queries times heads: enough to use what is in the cache often
constexpr int kMaxTileQueries = 64;
constexpr int kWhole = -1;

// Some neighbouring queries of a row, and the query heads of one KV head.
struct Tile {
    int32_t row;
    int32_t kv_head;
    int32_t first_query;  // within the row's queries
    int32_t num_queries;
    int32_t key_begin;  // the positions that are visited; a multiple of kChunk
    int32_t key_end;
    int32_t part;  // kWhole, or which of the parts of cut tiles this is
};

// A tile that is computed partition by partition, as parts first_part..first_part + num_parts - 1.
struct CutTile {
    Tile tile;
    int32_t first_part;
    int32_t num_parts;
};

struct Range {
    int begin;
    int end;
};

inline int group_size(const AttentionOp& op) { return op.num_heads / op.num_kv_heads; }

inline int tile_queries(const AttentionOp& op) { return std::clamp(kTileRows / group_size(op), 1, kMaxTileQueries); }

// Which positions tiles see and where those lie.
class Places {
  public:
    Places(const AttentionOp& op, const Step& step) : op_(op), step_(step) {}

    int num_queries(int row) const { return step_.query_start[row + 1] - step_.query_start[row]; }

    int position(int row, int query) const { return step_.seq_lens[row] - num_queries(row) + query; }

    int oldest_seen(int position) const { return op_.window > 0 ? std::max(0, position - op_.window + 1) : 0; }

    // Calls f for every tile of the step, uncut.
    template <class F>
    void each_tile(F&& f) const {
        const int size = tile_queries(op_);
        for (int row = 0; row < step_.num_rows; row++)
            for (int kv_head = 0; kv_head < op_.num_kv_heads; kv_head++)
                for (int first = 0; first < num_queries(row); first += size)
                    f(tile(row, kv_head, first, std::min(size, num_queries(row) - first)));
    }

    // The sub-blocks of the chunk at `start` that some query of the tile sees.
    Range seen_of(const Tile& tile, int start) const {
        const int oldest = oldest_seen(position(tile.row, tile.first_query)) - start, seen = tile.key_end - start;
        return {std::max(0, oldest / kSubBlock), std::min(kChunkBlocks, (seen + kSubBlock - 1) / kSubBlock)};
    }

    // The memory of a position's block and of the tile's head, as an element offset.
    size_t slab(const Tile& tile, int position) const {
        const size_t block =
            step_.block_table[static_cast<size_t>(tile.row) * step_.block_table_stride + position / op_.block_size];
        return (block * op_.num_kv_heads + tile.kv_head) * op_.head_dim * op_.block_size;
    }

  private:
    Tile tile(int row, int kv_head, int first, int count) const {
        const int begin = position(row, first);
        return {row, kv_head, first, count, oldest_seen(begin) / kChunk * kChunk, begin + count, kWhole};
    }

    const AttentionOp& op_;
    const Step& step_;
};

inline int64_t cost(const Tile& tile) { return int64_t{tile.key_end - tile.key_begin} * tile.num_queries; }

inline int count_partitions(const Tile& tile) {
    return (tile.key_end - 1) / kPartition - tile.key_begin / kPartition + 1;
}

// How many tiles there are, and which of them are so long that one worker would finish after the others.
struct TilePlan {
    int num_tiles = 0;
    int num_parts = 0;
    int num_cut = 0;
    int64_t longest = INT64_MAX;

    bool cuts(const Tile& tile) const { return cost(tile) > longest && count_partitions(tile) > 1; }
};

inline TilePlan plan_tiles(const Places& places, int num_threads) {
    TilePlan plan;
    int64_t total = 0;
    places.each_tile([&](const Tile& tile) { total += cost(tile); });
    if (num_threads > 1) plan.longest = total / (4 * num_threads);
    places.each_tile([&](const Tile& tile) {
        const int parts = plan.cuts(tile) ? count_partitions(tile) : 0;
        plan.num_parts += parts;
        plan.num_cut += parts > 0;
        plan.num_tiles += std::max(parts, 1);
    });
    return plan;
}

// Cuts a tile at the borders of partitions; returns the end of what it has appended.
inline Tile* cut_tile(const Tile& tile, int first_part, Tile* end) {
    for (int begin = tile.key_begin; begin < tile.key_end; end++) {
        const int stop = std::min((begin / kPartition + 1) * kPartition, tile.key_end);
        *end = tile;
        end->key_begin = begin;
        end->key_end = stop;
        end->part = first_part++;
        begin = stop;
    }
    return end;
}

// Fills in the plan; long tiles come first, so that all workers finish at about the same time.
inline void list_tiles(const Places& places, const TilePlan& plan, Tile* tiles, CutTile* cut) {
    Tile* end = tiles;
    int part = 0;
    places.each_tile([&](const Tile& tile) {
        if (!plan.cuts(tile)) {
            *end++ = tile;
            return;
        }
        *cut = {tile, part, count_partitions(tile)};
        end = cut_tile(tile, part, end);
        part += cut++->num_parts;
    });
    const auto longer = [](const Tile& a, const Tile& b) { return cost(a) > cost(b); };
    if (!std::is_sorted(tiles, end, longer)) std::stable_sort(tiles, end, longer);
}

// The sub-blocks of keys and values in the order in which they will be read, some of them ahead of the arithmetic and
// into the tile after this one: blocks lie anywhere, so the CPU cannot guess them.
template <class T>
class LookAhead {
  public:
    LookAhead(const AttentionOp& op, const Places& places) : op_(op), places_(places) {}

    // `tile` is computed now and `following`, which may be null, probably afterwards.
    void begin(const Tile& tile, const Tile* following) {
        following_ = following;
        if (tile_ == &tile) return;
        enter(&tile);
        const int slab_bytes = kSubBlock * op_.head_dim * static_cast<int>(sizeof(T));
        for (int i = std::max(1, kDistanceBytes / slab_bytes); i > 0; i--) next();
    }

    // The start of the next kSubBlock positions of memory that will be read; any address when there is none.
    const char* next() {
        if (tile_ == nullptr) return nullptr;
        const int position = start_ + sub_ * kSubBlock;
        const size_t at = places_.slab(*tile_, position) + static_cast<size_t>(position % op_.block_size) * op_.head_dim;
        const T* found = static_cast<const T*>(values_ ? op_.values : op_.keys) + at;
        advance();
        return reinterpret_cast<const char*>(found);
    }

  private:
    static constexpr int kDistanceBytes = 16384;

    void enter(const Tile* tile) {
        tile_ = tile;
        if (tile) enter_chunk(tile->key_begin);
    }

    void enter_chunk(int start) {
        start_ = start;
        subs_ = places_.seen_of(*tile_, start);
        sub_ = subs_.begin;
        values_ = false;
    }

    void advance() {
        if (++sub_ < subs_.end) return;
        sub_ = subs_.begin;
        if (!values_) values_ = true;
        else if (start_ + kChunk < tile_->key_end) enter_chunk(start_ + kChunk);
        else enter(std::exchange(following_, nullptr));
    }

    const AttentionOp& op_;
    const Places& places_;
    const Tile* tile_ = nullptr;
    const Tile* following_ = nullptr;
    int start_ = 0;
    Range subs_{};
    int sub_ = 0;
    bool values_ = false;
};

}  // namespace llmb
