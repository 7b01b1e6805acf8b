// Row-major rows times single panels of weights on the CPU's tile unit.
//
// Used by experts.h. Invariant: a row's sums are those of linear_tile.h, bit by bit, and depend on that row alone.
#pragma once

#include <algorithm>
#include <cstddef>

#include "epilogue.h"
#include "linear_piece.h"
#include "memory.h"
#include "step.h"
#include "tile_block.h"
#include "tile_plan.h"

#if defined(LLMB_HAS_TILES)

namespace llmb::tile {

// Rows per chunk, in whole blocks, that stay in the L2 cache with all of their k, and one thread's sums of them.
struct PanelSums {
    int rows;
    char* first;  // [2][rows][kPanel]

    PanelSums(int most_rows, size_t row_bytes, Carver& memory, int rank, int num_threads) {
        const int fit = std::clamp(static_cast<int>(kWholeBytes / row_bytes), kBlockRows, kChunkRows);
        rows = std::min(divide_up(std::max(most_rows, 1), kBlockRows), fit / kBlockRows) * kBlockRows;
        first = memory.take<char>(2 * bytes() * num_threads) + 2 * bytes() * rank;
    }
    size_t bytes() const { return static_cast<size_t>(rows) * kSumsRowBytes; }
    char* of(bool second) const { return first + (second ? bytes() : 0); }
};

struct NothingBeside {
    void step() {}
};

// Up to sums.rows rows times panels of a layer's weights, or of its gates and their factors.
template <class Type>
struct PanelProduct {
    const LinearOp& op;
    WholeRows x;
    int rows;
    const PanelSums& sums;
    int k_tiles = divide_up(op.k, Type::kDepth);
    bool two = is_gated(op.epilogue);

    // Calls finish(panel) once a panel's sums are complete.
    template <class Finish>
    void run(int begin, int end, Finish&& finish) const {
        tiles_begin(std::min(rows, amx::kTileRows));
        for (int panel = begin; panel < end; panel++) {
            multiply(panel);
            finish(panel);
        }
        tiles_end();
    }

    // A part of the weights stays in the L1 cache for all blocks of rows.
    void multiply(int panel) const {
        const int part = even_part(k_tiles, kPartBytes / static_cast<int>((two ? 2 : 1) * kPanelTileBytes));
        for (int k = 0; k < k_tiles; k += part)
            for (int block = 0; block < divide_up(rows, kBlockRows); block++) {
                multiply(false, panel, block, k, std::min(part, k_tiles - k));
                if (two) multiply(true, panel, block, k, std::min(part, k_tiles - k));
            }
    }

    // One block of rows times `steps` tiles of k. Prefetches the weights that follow: the next part.
    void multiply(bool second, int panel, int block, int k, int steps) const {
        const auto* weights = static_cast<const char*>(second ? op.weight2 : op.weight);
        const char* w = weights + (static_cast<size_t>(panel) * k_tiles + k) * kPanelTileBytes;
        const int ahead_bytes = padded_k(divide_up(kPanelTileBytes, divide_up(rows, kBlockRows)), 64);
        const panels::Ahead ahead{w + steps * (kPanelTileBytes + static_cast<size_t>(block) * ahead_bytes), ahead_bytes};
        const WholeRows own{x.stride_bytes, x.at + block * kBlockRows * x.stride_bytes + k * WholeRows::kStepBytes};
        char* to = sums.of(second) + block * kBlockBytes;
        NothingBeside nothing;
        if (rows - block * kBlockRows > amx::kTileRows) multiply_block<Type, true>(own, w, steps, to, k > 0, ahead, nothing);
        else multiply_block<Type, false>(own, w, steps, to, k > 0, ahead, nothing);
    }
};

}  // namespace llmb::tile

#endif
