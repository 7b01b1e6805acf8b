// A block of 32 rows of x times one panel of weights on the CPU's tile unit.
//
// Used by linear_tile.h. Invariant: a row's sums are one chain over ascending tiles of k, stored and resumed exactly;
// they depend only on that row, however many rows a block has.
#pragma once

#include <cstddef>
#include <cstdint>

#include "amx.h"
#include "linear_piece.h"
#include "tile_rows.h"

#if defined(LLMB_HAS_TILES)

namespace llmb::tile {

// Both types of weights have panels of 2 KiB for each tile of x: 16 rows of 32 columns of 4 bytes.
constexpr size_t kPanelTileBytes = 2 * kTileSizeBytes;

struct Bfloat16 {
    static constexpr int kDepth = 32;  // of k, per tile
    template <int kC, int kA, int kB>
    static void dot() {
        tile_dot<kC, kA, kB>();
    }
};

struct Int8 {
    static constexpr int kDepth = 64;
    template <int kC, int kA, int kB>
    static void dot() {
        tile_dot_u8_s8<kC, kA, kB>();
    }
};

// The sums of a block: [row / 16][column / 16][16][16], of float32 or int32.
constexpr int kBlockRows = 2 * amx::kTileRows;
constexpr size_t kBlockBytes = 4 * kTileSizeBytes;
inline size_t sums_offset(int row, int column) {
    return (row / amx::kTileRows * 2 + column / 16) * kTileSizeBytes + row % amx::kTileRows * amx::kTileBytes +
           column % 16 * 4;
}

// sums (+)= one or two tiles of rows times one panel, over `steps` tiles of k. `next`: bytes from the first tile of
// rows to the second. Tiles 0 to 3 are the sums, 4 and 5 the rows, 6 and 7 the weights. `beside` is called once per
// step, so its work runs while the tile unit multiplies.
template <class Type, bool kTwo, class Beside>
void multiply_block(const char* x, size_t next, const char* w, int steps, char* sums, bool resume, panels::Ahead ahead,
                    Beside& beside) {
    constexpr ptrdiff_t kSumStride = amx::kTileBytes, kPanelStride = 2 * amx::kTileBytes;
    if (resume) {
        tile_load<0>(sums, kSumStride), tile_load<1>(sums + kTileSizeBytes, kSumStride);
        if constexpr (kTwo)
            tile_load<2>(sums + 2 * kTileSizeBytes, kSumStride), tile_load<3>(sums + 3 * kTileSizeBytes, kSumStride);
    } else {
        tile_zero<0>(), tile_zero<1>();
        if constexpr (kTwo) tile_zero<2>(), tile_zero<3>();
    }
    for (int step = 0; step < steps; step++, x += kTileSizeBytes, w += kPanelTileBytes) {
        tile_load<4>(x, amx::kTileBytes);
        tile_load<6>(w, kPanelStride);
        Type::template dot<0, 4, 6>();
        tile_load<7>(w + amx::kTileBytes, kPanelStride);
        ahead.fetch_step();
        Type::template dot<1, 4, 7>();
        if constexpr (kTwo) {
            tile_load<5>(x + next, amx::kTileBytes);
            Type::template dot<2, 5, 6>();
            Type::template dot<3, 5, 7>();
        }
        beside.step();
    }
    tile_store<0>(sums, kSumStride), tile_store<1>(sums + kTileSizeBytes, kSumStride);
    if constexpr (kTwo)
        tile_store<2>(sums + 2 * kTileSizeBytes, kSumStride), tile_store<3>(sums + 3 * kTileSizeBytes, kSumStride);
}

}  // namespace llmb::tile

#endif
