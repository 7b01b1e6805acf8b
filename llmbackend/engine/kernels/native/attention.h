// Causal attention over paged keys and values for a ragged batch: the step's tiles, shared by the team.
//
// For: the step's program. Does not know: how a step is cut into tiles (attention_plan.h), or the arithmetic of a tile
// (attention_tile.h). Invariant: which worker computes a tile does not change any result.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "attention_plan.h"
#include "attention_tile.h"
#include "numbers.h"
#include "rotary.h"
#include "step.h"
#include "team.h"
#include "tile_rows.h"

namespace llmb {

inline int padded_dim(const AttentionOp& op) { return (op.head_dim + kLanes - 1) / kLanes * kLanes; }

// Cuts arrays from a block of memory; from a null block, only counts the bytes.
class Carver {
  public:
    explicit Carver(char* memory) : memory_(memory) {}

    template <class T>
    T* take(size_t count) {
        T* taken = reinterpret_cast<T*>(memory_ + used_);
        used_ += (count * sizeof(T) + 63) / 64 * 64;
        return taken;
    }

    SoftmaxState take_state(size_t num_rows, int width) {
        return {take<float>(num_rows * kLanes), take<float>(num_rows), take<float>(num_rows * width)};
    }

    size_t used() const { return used_; }

  private:
    char* memory_;
    size_t used_ = 0;
};

// What one worker needs, and the results of parts, which the team shares.
struct TileMemory {
    TileMemory(const AttentionOp& op, const TilePlan& plan, char* scratch, int rank) {
        const int num_rows = tile_queries(op) * group_size(op), width = padded_dim(op);
        Carver shared(scratch);
        parts = shared.take_state(static_cast<size_t>(num_rows) * plan.num_parts, width);
        Carver own(scratch + shared.used());
        for (int i = 0; i <= rank; i++) {
            tiles = own.take<Tile>(plan.num_tiles);
            cut = own.take<CutTile>(plan.num_cut);
            q = own.take<float>(static_cast<size_t>(num_rows) * op.head_dim);
            q_units = own.take<float>(num_rows);
            units = own.take<float>(op.kv_type == Type::kFixed16 ? 2 * kChunk : 0);
            first = own.take<int32_t>(num_rows);
            last = own.take<int32_t>(num_rows);
            state = own.take_state(num_rows, width);
            total = own.take_state(num_rows, width);
            padded_values = own.take<char>(width == op.head_dim ? 0 : sizeof(float) * kChunk * width);
        }
        end = shared.used() + own.used();
    }

    SoftmaxState parts;  // [parts * rows of a tile]
    Tile* tiles;
    CutTile* cut;
    float* q;  // room for as many float32; see RowBlock
    float* q_units;
    float* units;  // fixed16: of a chunk's keys, then of its values
    int32_t* first;
    int32_t* last;
    SoftmaxState state;  // of the partition that is being visited
    SoftmaxState total;  // of those before it
    char* padded_values;
    size_t end;  // bytes used
};

inline size_t attention_scratch_bytes(const AttentionOp& op, const Step& step, int num_threads) {
    const TilePlan plan = plan_tiles(Places(op, step), num_threads);
    return TileMemory(op, plan, nullptr, num_threads - 1).end;
}

// Computes tiles, one after the other, with one worker's memory.
template <class T>
class TileRunner {
  public:
    TileRunner(const AttentionOp& op, const Step& step, const Places& places, const TileMemory& memory)
        : op_(op), step_(step), memory_(memory), places_(places), ahead_(op, places), group_(group_size(op)),
          shape_{op.head_dim, padded_dim(op), op.block_size, op.softcap} {}

    // `next` is what this worker will probably do afterwards, or null.
    void run(const Tile& tile, const Tile* next) {
        begin(tile);
        place_queries(tile);
        ahead_.begin(tile, next);
        state_ = tile.part == kWhole ? memory_.state : part(tile.part);
        clear_state(state_, num_rows_, shape_.padded_dim);
        bool merged = false;
        for (int at = tile.key_begin; at < tile.key_end; at += kChunk) {
            if (at % kPartition == 0 && at > tile.key_begin) finish_partition(merged);
            visit(tile, at);
        }
        if (merged) finish_partition(merged);
        if (tile.part == kWhole) write_out(tile, merged ? memory_.total : state_);
    }

    // Puts a tile together from its parts.
    void join(const CutTile& cut) {
        begin(cut.tile);
        clear_state(memory_.total, num_rows_, shape_.padded_dim);
        for (int i = 0; i < cut.num_parts; i++) merge(part(cut.first_part + i));
        write_out(cut.tile, memory_.total);
    }

  private:
    void begin(const Tile& tile) {
        num_rows_ = tile.num_queries * group_;
        const int blocks = (num_rows_ + kMaxRows - 1) / kMaxRows;
        rows_per_block_ = (num_rows_ + blocks - 1) / blocks;
    }

    SoftmaxState part(int index) const {
        return rows_of(memory_.parts, static_cast<size_t>(index) * tile_queries(op_) * group_);
    }

    SoftmaxState rows_of(const SoftmaxState& state, size_t r) const {
        return {state.sums + r * kLanes, state.maxima + r, state.weighted + r * shape_.padded_dim};
    }

    const float* query(const Tile& tile, int row) const {
        const size_t token = step_.query_start[tile.row] + tile.first_query + row / group_;
        return op_.q + token * op_.q_stride + (tile.kv_head * group_ + row % group_) * op_.head_dim;
    }

    // Row r of the tile is head r % group of query r / group. Queries are scaled, and transposed block by block.
    void place_queries(const Tile& tile) {
        const int start = places_.position(tile.row, tile.first_query);
        for (int r = 0; r < num_rows_; r++) {
            memory_.last[r] = start + r / group_;
            memory_.first[r] = places_.oldest_seen(memory_.last[r]);
            const int block = r / rows_per_block_ * rows_per_block_, size = std::min(rows_per_block_, num_rows_ - block);
            const float* q = query(tile, r);
            Factor<T>* to = queries() + static_cast<size_t>(block) * op_.head_dim + kQueryStep<T> * (r - block);
            memory_.q_units[r] = place_query(q, to, size, Factor<T>{});
        }
    }

    float place_query(const float* q, float* to, int num_rows, float) const {
        for (int d = 0; d < op_.head_dim; d++) to[static_cast<size_t>(d) * num_rows] = q[d] * op_.scaling;
        return 1.0f;
    }
    // Integers whose norm times that of a key's is below 2^31.
    float place_query(const float* q, fixed16* to, int num_rows, fixed16) const {
        const QueryScale scale(q, op_.head_dim);
        each_integer(q, op_.head_dim, scale.factor, [&](int d, int integer) {
            to[static_cast<size_t>(d / 2) * 2 * num_rows + d % 2] = {static_cast<int16_t>(integer)};
        });
        return scale.unit * op_.scaling;
    }
    float place_query(const float* q, bf16* to, int num_rows, bf16) const {
        int d = 0;
        for (; d + kLanes <= op_.head_dim; d += kLanes) {
            bf16 rounded[kLanes];
            store(rounded, load(q + d) * op_.scaling);
            for (int i = 0; i < kLanes; i += 2)
                std::memcpy(to + static_cast<size_t>(d + i) * num_rows, rounded + i, 2 * sizeof(bf16));
        }
        for (; d < op_.head_dim; d++)
            to[static_cast<size_t>(d / 2) * 2 * num_rows + d % 2] = to_bf16(q[d] * op_.scaling);
        return 1.0f;
    }

    Factor<T>* queries() const { return reinterpret_cast<Factor<T>*>(memory_.q); }

    Chunk<T> chunk_at(const Tile& tile, int start) {
        Chunk<T> chunk{};
        chunk.start = start;
        const Range subs = places_.seen_of(tile, start);
        for (int sub = subs.begin; sub < subs.end; sub++) {
            const int position = start + sub * kSubBlock, offset = position % op_.block_size;
            const size_t slab = places_.slab(tile, position);
            chunk.keys[sub] = static_cast<const T*>(op_.keys) + slab + kColumnStep<T> * offset;
            chunk.values[sub] = static_cast<const T*>(op_.values) + slab + static_cast<size_t>(offset) * op_.head_dim;
            if constexpr (kIsFixed<T>) read_units(chunk, sub);
        }
        for (int sub = subs.begin; sub < subs.end; sub++) chunk.ahead_of_keys[sub] = ahead_.next();
        for (int sub = subs.begin; sub < subs.end; sub++) chunk.ahead_of_values[sub] = ahead_.next();
        return chunk;
    }

    void read_units(Chunk<T>& chunk, int sub) const {
        float* units = memory_.units + sub * kSubBlock;
        for (int i = 0; i < kSubBlock; i += kLanes)
            load_units(chunk.keys[sub] + 2 * i, op_.block_size, units + i, units + kChunk + i);
        chunk.key_units = memory_.units;
        chunk.value_units = memory_.units + kChunk;
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

    RowBlock<T> rows_from(int r) const {
        return {queries() + static_cast<size_t>(r) * op_.head_dim, memory_.q_units + r, memory_.first + r, memory_.last + r,
                rows_of(state_, r)};
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
        if (!merged) clear_state(memory_.total, num_rows_, shape_.padded_dim);
        merged = true;
        merge(state_);
        clear_state(state_, num_rows_, shape_.padded_dim);
    }

    void merge(const SoftmaxState& part) const {
        for (int r = 0; r < num_rows_; r++) merge_row(memory_.total, part, r, shape_.padded_dim);
    }

    void write_out(const Tile& tile, const SoftmaxState& state) const {
        for (int r = 0; r < num_rows_; r++) {
            const int head = tile.kv_head * group_ + r % group_;
            const int token = step_.query_start[tile.row] + tile.first_query + r / group_;
            const int column = head * op_.head_dim;
            const size_t at = static_cast<size_t>(token) * op_.out_stride + column;
            const float factor = normaliser(state, r, op_.sinks ? op_.sinks + head : nullptr);
            const float* weighted = state.weighted + static_cast<size_t>(r) * shape_.padded_dim;
            if (op_.out_type == Type::kBfloat16Tiles)
                write_row(TileRow<bf16>(static_cast<bf16*>(op_.out), token, op_.out_stride), column, weighted, factor);
            else if (op_.out_type == Type::kBfloat16) write_row(static_cast<bf16*>(op_.out) + at, 0, weighted, factor);
            else write_row(static_cast<float*>(op_.out) + at, 0, weighted, factor);
        }
    }

    // From `column` of a row on, which is a pointer, or a row of tiles. Plus zero turns -0 into 0: a sum of zeros alone may
    // be either.
    template <class Row>
    void write_row(Row row, int column, const float* weighted, float factor) const {
        int d = 0;
        if (shape_.dim == shape_.padded_dim)  // then no vector crosses the border of a tile
            for (; d < shape_.dim; d += kLanes) store(row + (column + d), load(weighted + d) * factor + 0.0f);
        for (; d < shape_.dim; d++) set(row[column + d], weighted[d] * factor + 0.0f);
    }

    const AttentionOp& op_;
    const Step& step_;
    const TileMemory& memory_;
    const Places& places_;
    LookAhead<T> ahead_;
    const int group_;
    const TileShape shape_;
    SoftmaxState state_{};
    int num_rows_ = 0;
    int rows_per_block_ = 0;
};

template <class T>
inline void attend(Worker& worker, const AttentionOp& op, const Step& step, char* scratch) {
    const Places places(op, step);
    const TilePlan plan = plan_tiles(places, worker.size);
    const TileMemory memory(op, plan, scratch, worker.rank);
    list_tiles(places, plan, memory.tiles, memory.cut);
    TileRunner<T> runner(op, step, places, memory);
    // Whole pieces of several tiles, where there are many: a worker knows what comes next, and fetches its first keys.
    const int grain = plan.num_tiles >= 32 * worker.size ? 4 : 1;
    worker.share(plan.num_tiles, grain, [&](int begin, int end) {
        for (int i = begin; i < end; i++) {
            // When this piece is done, the other workers will probably have taken one each.
            const int next = i + 1 < end ? i + 1 : end + grain * (worker.size - 1);
            runner.run(memory.tiles[i], next < plan.num_tiles ? memory.tiles + next : nullptr);
        }
    });
    if (plan.num_cut == 0) return;
    worker.barrier();
    worker.share(plan.num_cut, 1, [&](int begin, int) { runner.join(memory.cut[begin]); });
}

inline void attention(Worker& worker, const AttentionOp& op, const Step& step, char* scratch) {
#if defined(LLMB_FIXED_POINT_KV)
    if (op.kv_type == Type::kFixed16) return attend<fixed16>(worker, op, step, scratch);
#endif
    if (op.kv_type == Type::kBfloat16) attend<bf16>(worker, op, step, scratch);
    else attend<float>(worker, op, step, scratch);
}

}  // namespace llmb
