// From the sums of a linear layer's unit to y, row by row during the products of the next unit.
//
// Used by linear_tile.h. Invariant: the result of a row depends only on that row.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "epilogue.h"
#include "epilogue_int8.h"
#include "numbers.h"
#include "quantised_rows.h"
#include "step.h"
#include "tile_block.h"
#include "tile_plan.h"

#if defined(LLMB_HAS_TILES)

namespace llmb::tile {

// The sums of one row of a block, from a column on.
struct Sums {
    char* row;
    float* operator()(int column) const { return reinterpret_cast<float*>(row) + column; }
};

template <class Type>
class Finisher {
    static constexpr bool kInt8 = std::is_same_v<Type, Int8>;
    using Columns = std::conditional_t<kInt8, int8::Columns, FloatColumns>;

  public:
    // row_scales: for int8.
    Finisher(const LinearOp& op, const Plan& plan, const float* row_scales)
        : op_(op), plan_(plan), row_scales_(row_scales), rows_per_step_(plan.rows_per_step()) {}

    void begin(int unit, int first_row, int rows, char* sums) {
        first_row_ = first_row, rows_ = rows, sums_ = sums;
        panel_ = unit * plan_.unit_panels;
        num_panels_ = plan_.panels_of(unit);
        slot_ = 0, due_ = 0;
        begin_panel();
    }

    // Finishes some rows during a step of products.
    LLMB_INLINE void step() {
        for (due_ += rows_per_step_; due_ >= kOneRow && in_tile_ > 0; due_ -= kOneRow) row();
    }

    void all() {
        while (in_tile_ > 0) row();
    }

  private:
    LLMB_INLINE void row() {
        PanelRow result = result_of(columns_[0], at_);
        added_[0].add(tile_row_, result.v);
        if (plan_.gated) {
            PanelRow other = result_of(columns_[1], at_ + kBlockBytes);
            added_[1].add(tile_row_, other.v);
            result = combine(op_, result, other);
        }
        if (whole_panel_) write(result);
        else write_panel_row(op_, first_row_ + row_, panel_ + slot_, result);
        row_++;
        tile_row_++;
        at_ += kSumsRowBytes;
        y_ += y_step_;
        if (--in_tile_ == 0) next_tile();
    }

    // As write_panel_row, for whole panels, to an address that advances.
    LLMB_INLINE void write(PanelRow row) {
        row = activated(op_.activation, row);
        if (op_.y_type == llmb::Type::kFloat32) {
            auto* y = reinterpret_cast<float*>(y_);
            for (int v = 0; v < kPanelVectors; v++) {
                __builtin_prefetch(y_ + kFetchRows * y_step_ + v * 64, 1, 3);
                if (op_.epilogue == Epilogue::kAdd) row.v[v] = fma(row.v[v], splat(op_.factor), load(y + v * kLanes));
                store(y + v * kLanes, row.v[v]);
            }
        } else {
            for (int v = 0; v < kPanelVectors; v++) store(reinterpret_cast<bf16*>(y_) + v * kLanes, row.v[v]);
        }
    }

    void begin_panel() {
        for (int i = 0; i < (plan_.gated ? 2 : 1); i++) columns_[i] = columns_of(i == 1);
        whole_panel_ = (panel_ + slot_ + 1) * kPanel <= op_.n || op_.y_type == llmb::Type::kBfloat16Tiles;
        row_ = 0;
        begin_tile();
    }

    void begin_tile() {
        in_tile_ = std::min(amx::kTileRows, rows_ - row_);
        at_ = block_of(row_, slot_) + row_ % kBlockRows * kSumsRowBytes;
        const int row = first_row_ + row_, column = (panel_ + slot_) * kPanel;
        tile_row_ = 0;
        for (int i = 0; i < (plan_.gated ? 2 : 1); i++) added_[i].begin(op_, i == 1, panel_ + slot_, row, in_tile_);
        if (op_.y_type == llmb::Type::kBfloat16Tiles) {
            y_ = reinterpret_cast<char*>(TileRow<bf16>(static_cast<bf16*>(op_.y), row, op_.y_stride) + column);
            y_step_ = amx::kTileBytes;
        } else {
            const int item_bytes = op_.y_type == llmb::Type::kFloat32 ? 4 : 2;
            y_ = static_cast<char*>(op_.y) + (static_cast<size_t>(row) * op_.y_stride + column) * item_bytes;
            y_step_ = static_cast<ptrdiff_t>(op_.y_stride) * item_bytes;
        }
    }

    void next_tile() {
        if (row_ < rows_) begin_tile();
        else if (!plan_.gated && ++slot_ < num_panels_) begin_panel();
    }

    char* block_of(int row, int slot) const {
        return sums_ + static_cast<size_t>(row / kBlockRows * num_panels_ + slot) * kBlockBytes;
    }

    Columns columns_of(bool second) const {
        if constexpr (kInt8) return {op_, second, panel_ + slot_, int8::kUnsignedOffset};
        else return {op_, second, panel_ + slot_};
    }

    LLMB_INLINE PanelRow result_of(const Columns& columns, char* sums) const {
        if constexpr (kInt8) return columns.result(Sums{sums}, row_scales_[first_row_ + row_]);
        else return columns.result(Sums{sums});
    }

    static constexpr int kOneRow = Plan::kRowFraction;
    static constexpr int kFetchRows = 8;  // prefetch distance for y

    const LinearOp& op_;
    const Plan& plan_;
    const float* row_scales_;
    const int rows_per_step_;
    int panel_ = 0, num_panels_ = 0;     // of the unit
    int first_row_ = 0, rows_ = 0;       // of the chunk
    int slot_ = 0, row_ = 0, in_tile_ = 0;  // the next panel and row, and the remaining rows of its tile
    int tile_row_ = 0;
    int due_ = 0;  // rows to finish, in fractions
    bool whole_panel_ = true;
    char* sums_ = nullptr;
    char* at_ = nullptr;  // of the next row
    char* y_ = nullptr;
    ptrdiff_t y_step_ = 0;
    Columns columns_[2];
    LoraRows added_[2];
};

}  // namespace llmb::tile

#endif
