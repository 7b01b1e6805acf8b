// Causal attention over paged keys and values for a ragged batch: the step cut into tiles, shared by the team.
//
// For: the step's program. Does not know: how a tile is computed (attention_tile.h), what a block table's owner is.
// Invariant: how queries are cut into tiles and who computes them has no influence on any result.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "attention_tile.h"
#include "numbers.h"
#include "rotary.h"
#include "step.h"
#include "team.h"

namespace llmb {

constexpr int kTileRows = 192;     // queries times heads: enough to use what is in the cache often
constexpr int kMaxTileQueries = 64;

// Some neighbouring queries of a row, and the query heads of one KV head.
struct Tile {
    int32_t row;
    int32_t kv_head;
    int32_t first_query;  // within the row's queries
    int32_t num_queries;
};

inline int tile_queries(const AttentionOp& op) {
    return std::clamp(kTileRows / (op.num_heads / op.num_kv_heads), 1, kMaxTileQueries);
}

inline int padded_dim(const AttentionOp& op) { return (op.head_dim + kLanes - 1) / kLanes * kLanes; }

inline int count_tiles(const AttentionOp& op, const Step& step) {
    const int size = tile_queries(op);
    int count = 0;
    for (int row = 0; row < step.num_rows; row++)
        count += (step.query_start[row + 1] - step.query_start[row] + size - 1) / size;
    return count * op.num_kv_heads;
}

// One worker's memory, cut from a block of bytes. Sized by a dry run over a null block.
class Carver {
  public:
    explicit Carver(char* memory) : memory_(memory) {}

    template <class T>
    T* take(size_t count) {
        T* taken = reinterpret_cast<T*>(memory_ + used_);
        used_ += (count * sizeof(T) + 63) / 64 * 64;
        return taken;
    }

    size_t used() const { return used_; }

  private:
    char* memory_;
    size_t used_ = 0;
};

inline SoftmaxState carve_state(Carver& carver, int num_rows, int width) {
    return {carver.take<float>(num_rows * kLanes), carver.take<float>(num_rows),
            carver.take<float>(static_cast<size_t>(num_rows) * width)};
}

struct TileMemory {
    TileMemory(const AttentionOp& op, int num_tiles, Carver& carver) {
        const int num_rows = tile_queries(op) * (op.num_heads / op.num_kv_heads), width = padded_dim(op);
        tiles = carver.take<Tile>(num_tiles);
        q = carver.take<float>(static_cast<size_t>(num_rows) * op.head_dim);
        first = carver.take<int32_t>(num_rows);
        last = carver.take<int32_t>(num_rows);
        state = carve_state(carver, num_rows, width);
        total = carve_state(carver, num_rows, width);
        padded_values = carver.take<char>(width == op.head_dim ? 0 : sizeof(float) * kChunk * width);
    }

    Tile* tiles;
    float* q;
    int32_t* first;
    int32_t* last;
    SoftmaxState state;  // of the partition that is being visited
    SoftmaxState total;  // of those before it
    char* padded_values;
};

inline size_t worker_bytes(const AttentionOp& op, int num_tiles) {
    Carver carver(nullptr);
    TileMemory memory(op, num_tiles, carver);
    return carver.used();
}

inline size_t attention_scratch_bytes(const AttentionOp& op, const Step& step, int num_threads) {
    return worker_bytes(op, count_tiles(op, step)) * num_threads;
}

struct Range {
    int begin;
    int end;
};

// Which positions tiles see and where those lie.
class Places {
  public:
    Places(const AttentionOp& op, const Step& step) : op_(op), step_(step) {}

    // Of a tile's first query.
    int position(const Tile& tile) const {
        const int num_queries = step_.query_start[tile.row + 1] - step_.query_start[tile.row];
        return step_.seq_lens[tile.row] - num_queries + tile.first_query;
    }

    int oldest_seen(int position) const { return op_.window > 0 ? std::max(0, position - op_.window + 1) : 0; }

    int first_chunk(const Tile& tile) const { return oldest_seen(position(tile)) / kChunk * kChunk; }

    int end(const Tile& tile) const { return position(tile) + tile.num_queries; }

    // The sub-blocks of the chunk at `start` that some query of the tile sees.
    Range seen_of(const Tile& tile, int start) const {
        const int oldest = oldest_seen(position(tile)) - start, seen = end(tile) - start;
        return {std::max(0, oldest / kSubBlock), std::min(kChunkBlocks, (seen + kSubBlock - 1) / kSubBlock)};
    }

    // The memory of a position's block and of the tile's head, as an element offset.
    size_t slab(const Tile& tile, int position) const {
        const size_t block =
            step_.block_table[static_cast<size_t>(tile.row) * step_.block_table_stride + position / op_.block_size];
        return (block * op_.num_kv_heads + tile.kv_head) * op_.head_dim * op_.block_size;
    }

  private:
    const AttentionOp& op_;
    const Step& step_;
};

// The sub-blocks of keys and values in the order in which they will be read, some of them ahead of the arithmetic and
// into the tile after this one: blocks lie anywhere, so the CPU cannot guess them.
template <class T>
class LookAhead {
  public:
    LookAhead(const AttentionOp& op, const Places& places) : op_(op), places_(places) {}

    // `tile` is computed now and `following`, which may be null, afterwards.
    void begin(const Tile& tile, const Tile* following) {
        following_ = following;
        if (tile_ == &tile) return;
        enter(&tile);
        const int slab_bytes = kSubBlock * op_.head_dim * static_cast<int>(sizeof(T));
        for (int i = std::max(1, kDistanceBytes / slab_bytes); i > 0; i--) next();
    }

    // Where kSubBlock positions' worth of memory begins that will be wanted soon; any address when there is none.
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
        if (tile) enter_chunk(places_.first_chunk(*tile));
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
        else if (start_ + kChunk < places_.end(*tile_)) enter_chunk(start_ + kChunk);
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

// Computes tiles, one after the other, with one worker's memory.
template <class T>
class TileRunner {
  public:
    TileRunner(const AttentionOp& op, const Step& step, const TileMemory& memory)
        : op_(op), step_(step), memory_(memory), group_(op.num_heads / op.num_kv_heads),
          shape_{op.head_dim, padded_dim(op), op.block_size, op.softcap}, places_(op, step), ahead_(op, places_) {}

    // `next` is what this worker will do afterwards, or null.
    void run(const Tile& tile, const Tile* next) {
        num_rows_ = tile.num_queries * group_;
        rows_per_block_ = even_blocks(num_rows_);
        place_queries(tile);
        clear_state(memory_.state, num_rows_, shape_.padded_dim);
        ahead_.begin(tile, next);
        const int start = places_.first_chunk(tile), end = places_.end(tile);
        bool merged = false;
        for (int at = start; at < end; at += kChunk) {
            if (at % kPartition == 0 && at > start) finish_partition(merged);
            visit(tile, at);
        }
        if (merged) finish_partition(merged);
        write_out(tile, merged ? memory_.total : memory_.state);
    }

  private:
    static int even_blocks(int num_rows) {
        const int blocks = (num_rows + kMaxRows - 1) / kMaxRows;
        return (num_rows + blocks - 1) / blocks;
    }

    const float* query(const Tile& tile, int row) const {
        const size_t token = step_.query_start[tile.row] + tile.first_query + row / group_;
        return op_.q + token * op_.q_stride + (tile.kv_head * group_ + row % group_) * op_.head_dim;
    }

    // Row r of the tile is head r % group of query r / group. Queries are scaled, and transposed block by block.
    void place_queries(const Tile& tile) {
        const int start = places_.position(tile);
        for (int r = 0; r < num_rows_; r++) {
            memory_.last[r] = start + r / group_;
            memory_.first[r] = places_.oldest_seen(memory_.last[r]);
            const int block = r / rows_per_block_ * rows_per_block_, size = std::min(rows_per_block_, num_rows_ - block);
            const float* q = query(tile, r);
            float* to = memory_.q + static_cast<size_t>(block) * op_.head_dim + (r - block);
            for (int d = 0; d < op_.head_dim; d++) to[static_cast<size_t>(d) * size] = q[d] * op_.scaling;
        }
    }

    Chunk<T> chunk_at(const Tile& tile, int start) {
        Chunk<T> chunk{};
        chunk.start = start;
        const Range subs = places_.seen_of(tile, start);
        for (int sub = subs.begin; sub < subs.end; sub++) {
            const int position = start + sub * kSubBlock, offset = position % op_.block_size;
            const size_t slab = places_.slab(tile, position);
            chunk.keys[sub] = static_cast<const T*>(op_.keys) + slab + kColumnStep<T> * offset;
            chunk.values[sub] = static_cast<const T*>(op_.values) + slab + static_cast<size_t>(offset) * op_.head_dim;
        }
        for (int sub = subs.begin; sub < subs.end; sub++) chunk.ahead_of_keys[sub] = ahead_.next();
        for (int sub = subs.begin; sub < subs.end; sub++) chunk.ahead_of_values[sub] = ahead_.next();
        return chunk;
    }

    // Copies the values of a chunk to rows of padded_dim, where head_dim is no multiple of a vector.
    void pad_values(Chunk<T>& chunk) const {
        constexpr int kStep = kColumnStep<T>;
        for (int sub = 0; sub < kChunkBlocks; sub++) {
            if (chunk.values[sub] == nullptr) continue;
            const size_t width = kStep * shape_.padded_dim;
            T* to = reinterpret_cast<T*>(memory_.padded_values) + sub * kSubBlock * shape_.padded_dim;
            for (int i = 0; i < kSubBlock / kStep; i++) {
                std::memset(to + i * width, 0, width * sizeof(T));
                std::memcpy(to + i * width, chunk.values[sub] + i * kStep * shape_.dim, kStep * shape_.dim * sizeof(T));
            }
            chunk.values[sub] = to;
        }
    }

    RowBlock rows_from(int r) const {
        return {memory_.q + static_cast<size_t>(r) * op_.head_dim, memory_.first + r, memory_.last + r,
                {memory_.state.sums + r * kLanes, memory_.state.maxima + r,
                 memory_.state.weighted + static_cast<size_t>(r) * shape_.padded_dim}};
    }

    void visit(const Tile& tile, int start) {
        Chunk<T> chunk = chunk_at(tile, start);
        if (shape_.padded_dim != shape_.dim) pad_values(chunk);
        for (int r = 0; r < num_rows_; r += rows_per_block_) {
            const int size = std::min(rows_per_block_, num_rows_ - r);
            // The last block of rows sees the most.
            visit_for<T>(size)(shape_, chunk, rows_from(r), r + size == num_rows_);
        }
    }

    // Moves what the last partition has given to the total.
    void finish_partition(bool& merged) {
        const int width = shape_.padded_dim;
        if (!merged) clear_state(memory_.total, num_rows_, width);
        merged = true;
        for (int r = 0; r < num_rows_; r++) merge_row(memory_.total, memory_.state, r, width);
        clear_state(memory_.state, num_rows_, width);
    }

    void write_out(const Tile& tile, const SoftmaxState& state) const {
        for (int r = 0; r < num_rows_; r++) {
            const int head = tile.kv_head * group_ + r % group_;
            const size_t token = step_.query_start[tile.row] + tile.first_query + r / group_;
            const size_t at = token * op_.out_stride + static_cast<size_t>(head) * op_.head_dim;
            const float factor = normaliser(state, r, op_.sinks ? op_.sinks + head : nullptr);
            const float* weighted = state.weighted + static_cast<size_t>(r) * shape_.padded_dim;
            if (op_.out_type == Type::kBfloat16) write_row(static_cast<bf16*>(op_.out) + at, weighted, factor);
            else write_row(static_cast<float*>(op_.out) + at, weighted, factor);
        }
    }

    // Plus zero: no result is a negative zero, which sums of nothing but zeros could leave or not.
    template <class Out>
    void write_row(Out* out, const float* weighted, float factor) const {
        int d = 0;
        for (; d + kLanes <= shape_.dim; d += kLanes) store(out + d, load(weighted + d) * factor + 0.0f);
        for (; d < shape_.dim; d++) out[d] = narrow(weighted[d] * factor + 0.0f, Out{});
    }

    const AttentionOp& op_;
    const Step& step_;
    const TileMemory& memory_;
    const int group_;
    const TileShape shape_;
    const Places places_;
    LookAhead<T> ahead_;
    int num_rows_ = 0;
    int rows_per_block_ = 0;
};

// All tiles of the step, those that take long first, so that the team ends together.
inline void list_tiles(const AttentionOp& op, const Step& step, Tile* tiles) {
    const int size = tile_queries(op);
    Tile* end = tiles;
    for (int row = 0; row < step.num_rows; row++) {
        const int num_queries = step.query_start[row + 1] - step.query_start[row];
        for (int kv_head = 0; kv_head < op.num_kv_heads; kv_head++)
            for (int first = 0; first < num_queries; first += size)
                *end++ = {row, kv_head, first, std::min(size, num_queries - first)};
    }
    const Places places(op, step);
    const auto cost = [&](const Tile& tile) {
        const int end = places.end(tile);
        return int64_t{op.window > 0 ? std::min(end, op.window) : end} * tile.num_queries;
    };
    std::stable_sort(tiles, end, [&](const Tile& a, const Tile& b) { return cost(a) > cost(b); });
}

template <class T>
inline void attend(Worker& worker, const AttentionOp& op, const Step& step, char* scratch) {
    const int num_tiles = count_tiles(op, step);
    Carver carver(scratch + worker_bytes(op, num_tiles) * worker.rank);
    TileMemory memory(op, num_tiles, carver);
    list_tiles(op, step, memory.tiles);
    TileRunner<T> runner(op, step, memory);
    // A tile is begun when the one after it is known, whose first keys are fetched meanwhile.
    const Tile* claimed = nullptr;
    worker.share(num_tiles, 1, [&](int begin, int) {
        const Tile* next = memory.tiles + begin;
        if (claimed) runner.run(*claimed, next);
        claimed = next;
    });
    if (claimed) runner.run(*claimed, nullptr);
}

inline void attention(Worker& worker, const AttentionOp& op, const Step& step, char* scratch) {
    if (op.kv_type == Type::kBfloat16) attend<bf16>(worker, op, step, scratch);
    else attend<float>(worker, op, step, scratch);
}

}  // namespace llmb
