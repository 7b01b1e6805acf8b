// y = x·Wᵀ on the CPU's tile unit, for bfloat16 or int8 weights.
//
// Used by linear.h. Invariant: the division of rows, panels and k depends only on sizes, and does not affect results.
// While one unit's products are computed, the sums of the previous unit become y, so the tile unit does not wait for
// vector arithmetic.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "amx.h"
#include "memory.h"
#include "numbers.h"
#include "pack.h"
#include "quantised_rows.h"
#include "step.h"
#include "team.h"
#include "tile_block.h"
#include "tile_finish.h"
#include "tile_plan.h"
#include "tile_rows.h"
#include "tile_wide.h"

#if defined(LLMB_HAS_TILES)

namespace llmb::tile {

using Quantised = int8::QuantisedRows<int8::TileOrder>;

// Rows as tiles, and the stride in bytes between groups of 16; int8's scales and wide elements.
struct TileX {
    const char* data;
    size_t stride_bytes;
    const float* scales = nullptr;
    const WideElements* wide = nullptr;
};

// One thread's part of the operation.
template <class Type>
class Product {
  public:
    Product(const LinearOp& op, const Plan& plan, TileX x, char* sums)
        : op_(op), plan_(plan), x_(x), sums_(sums), beside_{Finisher<Type>(op, plan, x.scales), {}} {}

    // next: this thread's next task.
    void run(int task, int next) {
        const int first_row = task / plan_.groups * plan_.chunk_rows;
        const int rows = std::min(plan_.chunk_rows, plan_.rows - first_row);
        const int begin = first_unit(task), end = std::min(begin + plan_.group_units, plan_.units);
        for (int k = 0; k < plan_.k_tiles; k += plan_.slab_tiles) {
            const int k_end = std::min(k + plan_.slab_tiles, plan_.k_tiles);
            for (int unit = begin; unit < end; unit++) {
                char* own = sums_ + (slot_ + unit - begin) % plan_.slots() * plan_.slot_bytes();
                const bool last_unit = unit + 1 == end, last_slab = k_end == plan_.k_tiles;
                const Weights ahead = !last_unit ? weights(unit + 1, k)
                                      : !last_slab ? weights(begin, k_end)
                                                   : weights(first_unit(next), 0);
                multiply_unit(first_row, rows, unit, k, k_end, own, ahead);
                beside_.finisher.all();
                if (last_slab) beside_.finisher.begin(unit, first_row, rows, own);
            }
        }
        slot_ = (slot_ + end - begin) % plan_.slots();
    }

    void finish() { beside_.finisher.all(); }

  private:
    // The work interleaved with the products.
    struct Beside {
        Finisher<Type> finisher;
        WideAdder wide[2];  // of the two row tiles of the previous block

        LLMB_INLINE void step() {
            finisher.step();
            if constexpr (std::is_same_v<Type, Int8>) wide[0].step(), wide[1].step();
        }
    };

    // A unit's panels from some tile of k on.
    struct Weights {
        const char* panel[2];
    };

    int first_unit(int task) const { return task % plan_.groups * plan_.group_units; }

    Weights weights(int unit, int k) const {
        const size_t panel_bytes = plan_.k_tiles * kPanelTileBytes;
        const auto at = [&](const void* weight, int panel) {
            return static_cast<const char*>(weight) + panel * panel_bytes + k * kPanelTileBytes;
        };
        if (plan_.gated) return {{at(op_.weight, unit), at(op_.weight2, unit)}};
        const int panel = unit * plan_.unit_panels;
        return {{at(op_.weight, panel), at(op_.weight, std::min(panel + 1, plan_.panels - 1))}};
    }

    // One panel after the other, each in parts of k. ahead: the weights of the next unit.
    void multiply_unit(int first_row, int rows, int unit, int k, int k_end, char* sums, Weights ahead) {
        const int panels = plan_.panels_of(unit);
        for (int panel = 0; panel < panels; panel++)
            for (int begin = k, end = 0; begin < k_end; begin = end) {
                end = std::min(begin + plan_.part_tiles, k_end);
                const char* next = end < k_end         ? weights(unit, end).panel[panel]
                                   : panel + 1 < panels ? weights(unit, k).panel[panel + 1]
                                                        : ahead.panel[0];
                const char* w = weights(unit, begin).panel[panel];
                multiply_part(first_row, rows, begin, end - begin, w, next, sums + panel * kBlockBytes, panels * kBlockBytes);
            }
    }

    // All rows of a chunk times a part of a panel. sums: of the first block; next: the weights that follow.
    void multiply_part(int first_row, int rows, int k, int steps, const char* w, const char* next, char* sums,
                       size_t sums_stride_bytes) {
        constexpr int kLineBytes = 64, kLines = kPanelTileBytes / kLineBytes;
        const int first_tile = first_row / amx::kTileRows, row_tiles = divide_up(rows, amx::kTileRows);
        const int blocks = divide_up(row_tiles, 2), ahead_bytes = divide_up(kLines, blocks) * kLineBytes;
        const int sums_ahead_bytes = k > 0 ? divide_up(kBlockBytes / kLineBytes, steps) * kLineBytes : 0;
        for (int block = 0; block < blocks; block++, sums += sums_stride_bytes) {
            const int tile = first_tile + 2 * block;
            const RowsInTiles x{x_.data + tile * x_.stride_bytes + k * kTileSizeBytes, x_.stride_bytes};
            const bool two = 2 * block + 1 < row_tiles;
            const auto multiply = two ? multiply_block<Type, true, RowsInTiles, Beside> : multiply_block<Type, false, RowsInTiles, Beside>;
            multiply(x, w, steps, sums, k > 0, {next + static_cast<size_t>(block) * steps * ahead_bytes, ahead_bytes}, beside_,
                     {sums + sums_stride_bytes, sums_ahead_bytes});
            if constexpr (std::is_same_v<Type, Int8>) add_wide(tile, two, w, k, sums);
        }
        if constexpr (std::is_same_v<Type, Int8>) beside_.wide[0].all(), beside_.wide[1].all();
    }

    // Schedules a block's wide elements to be added during the next block.
    void add_wide(int tile, bool two, const char* w, int k, char* sums) {
        for (int i = 0; i < 2; i++) beside_.wide[i].all();
        for (int i = 0; i < (two ? 2 : 1); i++)
            beside_.wide[i].begin(x_.wide->of(tile + i, k), w, k, sums + i * kTileSumsBytes);
    }

    const LinearOp& op_;
    const Plan& plan_;
    const TileX x_;
    char* const sums_;
    int slot_ = 0;
    Beside beside_;
};

template <class Type>
void multiply(Worker& worker, const LinearOp& op, const Plan& plan, TileX x, char* sums) {
    Product<Type> product(op, plan, x, sums + worker.rank * plan.sums_bytes());
    tiles_begin();
    int taken = 0, taken_end = 0;  // but not started: being one piece behind, a thread knows what it will need next
    const auto run = [&](int next) {
        for (int task = taken; task < taken_end; task++) product.run(task, task + 1 < taken_end ? task + 1 : next);
    };
    worker.share(plan.tasks(), plan.grain(worker.size), [&](int begin, int end) {
        run(begin);
        taken = begin, taken_end = end;
    });
    run(taken);
    product.finish();
    tiles_end();
}

// Copies bfloat16 rows that are not in tiles to tiles.
inline void tile_x(Worker& worker, const LinearOp& op, int rows, bf16* tiles) {
    const int width = padded_k(op.k, Bfloat16::kDepth);
    worker.share(rows, 4, [&](int begin, int end) {
        for (int row = begin; row < end; row++) {
            const bf16* from = static_cast<const bf16*>(op.x) + static_cast<int64_t>(row) * op.x_stride;
            const TileRow<bf16> to(tiles, row, width);
            for (int i = 0; i < width; i += Bfloat16::kDepth) {
                const int count = std::min(Bfloat16::kDepth, op.k - i);
                std::memcpy(to + i, from + i, count * sizeof(bf16));
                std::memset((to + i) + count, 0, (Bfloat16::kDepth - count) * sizeof(bf16));
            }
        }
    });
    worker.barrier();
}

inline void quantise(Worker& worker, const LinearOp& op, const Plan& plan, Quantised& x, WideElements& wide) {
    worker.share(plan.row_tiles(), 1, [&](int begin, int end) {
        for (int tile = begin; tile < end; tile++) {
            const int first = tile * amx::kTileRows;
            for (int row = first; row < std::min(first + amx::kTileRows, plan.rows); row++) x.fill(op, row);
            wide.sort(x, tile);
        }
    });
    worker.barrier();
}

}  // namespace llmb::tile

namespace llmb {

inline size_t linear_tile_scratch_bytes(const LinearOp& op, const Step& step, int num_threads) {
    const tile::Plan plan(op, step, num_threads);
    Carver counted(nullptr);
    counted.take<char>(plan.sums_bytes() * num_threads);
    if (op.weight_type == Type::kInt8) {
        const tile::Quantised x(counted, plan.rows, op.k);
        const tile::WideElements wide(counted, plan, op.k);
    } else if (op.x_type != Type::kBfloat16Tiles) {
        counted.take<char>(plan.x_tiles_bytes());
    }
    return counted.used();
}

inline void linear_tile(Worker& worker, const LinearOp& op, const Step& step, char* scratch) {
    const tile::Plan plan(op, step, worker.size);
    Carver memory(scratch);
    char* sums = memory.take<char>(plan.sums_bytes() * worker.size);
    if (op.weight_type == Type::kInt8) {
        tile::Quantised x(memory, plan.rows, op.k);
        tile::WideElements wide(memory, plan, op.k);
        tile::quantise(worker, op, plan, x, wide);
        const tile::TileX tiles{reinterpret_cast<const char*>(x.data), plan.k_tiles * kTileSizeBytes, x.scale, &wide};
        return tile::multiply<tile::Int8>(worker, op, plan, tiles, sums);
    }
    tile::TileX x{static_cast<const char*>(op.x), op.x_stride * sizeof(bf16) * amx::kTileRows};
    if (op.x_type != Type::kBfloat16Tiles) {
        char* copy = memory.take<char>(plan.x_tiles_bytes());
        tile::tile_x(worker, op, plan.rows, reinterpret_cast<bf16*>(copy));
        x = {copy, plan.k_tiles * kTileSizeBytes};
    }
    tile::multiply<tile::Bfloat16>(worker, op, plan, x, sums);
}

}  // namespace llmb

#endif
