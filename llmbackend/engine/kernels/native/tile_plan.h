// How a linear layer on tiles is divided: rows into chunks, panels into units and groups, k into slabs and parts.
//
// Used by linear_tile.h. Invariant: it depends only on sizes.
#pragma once

#include <algorithm>
#include <cstddef>

#include "epilogue.h"
#include "pack.h"
#include "step.h"
#include "tile_block.h"

#if defined(LLMB_HAS_TILES)

namespace llmb::tile {

constexpr int kChunkRows = 512;             // rows of x at a time; more would only read weights again
constexpr size_t kWholeBytes = 1 << 20;     // of a chunk, at most, that is multiplied with all of its k at once: it stays
                                            // in the L2 cache for all panels. Larger ones go slab by slab of k:
constexpr int kSlabTiles = 16;              // tiles of k, ...
constexpr int kSlabPanels = 14;             // ... for so many panels, whose sums are kept
constexpr int kPartBytes = 32 << 10;        // of a panel at a time: they stay in the L1 cache for all rows of a chunk
constexpr int kPieceBytes = 512 << 10;      // of weights, that a thread takes at a time: memory streams best in one direction

// The size of the fewest parts of at most `most`, of nearly equal size.
inline int even_part(int all, int most) { return divide_up(all, divide_up(all, most)); }

// A unit is two panels, a gate and its factor or two neighbours, whose sums become y together; or one, if k is divided.
// A task is a chunk of rows times a group of units whose sums are kept while k is processed slab by slab.
struct Plan {
    int rows, chunk_rows, chunks;
    int k_tiles, slab_tiles, part_tiles;
    bool gated;
    int panels, unit_panels, units, group_units, groups;

    Plan(const LinearOp& op, const Step& step, int num_threads) {
        rows = num_rows(op.rows, step);
        chunk_rows = divide_up(even_part(std::max(rows, 1), kChunkRows), kBlockRows) * kBlockRows;
        chunks = divide_up(rows, chunk_rows);
        k_tiles = divide_up(op.k, op.weight_type == llmb::Type::kInt8 ? Int8::kDepth : Bfloat16::kDepth);
        gated = is_gated(op.epilogue);
        panels = num_panels(op.n);
        const bool whole = static_cast<size_t>(chunk_rows) * k_tiles * amx::kTileBytes <= kWholeBytes;
        slab_tiles = whole ? k_tiles : even_part(k_tiles, kSlabTiles);
        unit_panels = gated || !whole ? 1 : 2;
        const int factors = gated ? 2 : unit_panels;
        part_tiles = even_part(slab_tiles, kPartBytes / static_cast<int>(kPanelTileBytes));
        units = divide_up(panels, unit_panels);
        const int some_for_each_thread = std::max(1, units * chunks / (2 * num_threads));
        group_units = whole ? 1 : even_part(units, std::min(kSlabPanels / factors, some_for_each_thread));
        groups = divide_up(units, group_units);
    }

    int row_tiles() const { return divide_up(rows, amx::kTileRows); }
    int num_parts() const { return part_of(k_tiles - 1) + 1; }
    int part_of(int k_tile) const {
        return k_tile / slab_tiles * divide_up(slab_tiles, part_tiles) + k_tile % slab_tiles / part_tiles;
    }
    int panels_of(int unit) const { return gated ? 2 : std::min(unit_panels, panels - unit * unit_panels); }
    size_t x_tiles_bytes() const { return static_cast<size_t>(row_tiles()) * k_tiles * kTileSizeBytes; }

    // Slots for a thread's sums: one unit more than a group has, because those become y while the next group's start.
    int slots() const { return group_units + 1; }
    size_t slot_bytes() const { return (gated ? 2 : unit_panels) * static_cast<size_t>(chunk_rows) / kBlockRows * kBlockBytes; }
    size_t sums_bytes() const { return slots() * slot_bytes(); }

    int tasks() const { return chunks * groups; }

    // How many tasks a thread takes at a time: long pieces, but several per thread.
    int grain(int num_threads) const {
        if (group_units > 1) return 1;
        const int unit_bytes = static_cast<int>(2 * k_tiles * kPanelTileBytes);
        return std::clamp(std::min(kPieceBytes / unit_bytes, tasks() / (4 * num_threads)), 1, 8);
    }

    // How many rows of a unit become y during each step of the next unit's products, in fractions of a row.
    static constexpr int kRowFraction = 1 << 10;
    int rows_per_step() const {
        return divide_up(kBlockRows * kRowFraction, (gated ? 2 : 1) * slab_tiles);
    }
};

}  // namespace llmb::tile

#endif
