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

// The sums of a block: [row][column], of float32 or int32.
constexpr int kBlockRows = 2 * amx::kTileRows;
constexpr int kSumsRowBytes = kPanel * 4;
constexpr size_t kBlockBytes = static_cast<size_t>(kBlockRows) * kSumsRowBytes;
constexpr size_t kTileSumsBytes = kBlockBytes / 2;  // per tile of rows

// Where the tiles of rows of a block begin, and the bytes from the first to the second.
struct RowsInTiles {  // in the order of tile_rows.h
    static constexpr ptrdiff_t stride_bytes = amx::kTileBytes;
    static constexpr size_t kStepBytes = kTileSizeBytes;  // between consecutive tiles of k
    const char* at;
    size_t next;

    // Each tile of rows is used once while a part of the weights stays in the L1 cache.
    template <int kTile>
    static void load(const char* at, ptrdiff_t stride_bytes) {
        tile_load_past_l1<kTile>(at, stride_bytes);
    }
};
struct WholeRows {  // row-major
    ptrdiff_t stride_bytes;
    static constexpr size_t kStepBytes = amx::kTileBytes;
    const char* at;
    size_t next = amx::kTileRows * stride_bytes;

    template <int kTile>
    static void load(const char* at, ptrdiff_t stride_bytes) {
        tile_load<kTile>(at, stride_bytes);
    }
};

// sums (+)= one or two tiles of rows times one panel, over `steps` tiles of k. Tiles 0 to 3 are the sums, 4 and 5 the
// rows, 6 and 7 the weights. sums_ahead: those that will be resumed next, for the L1 cache. `beside` is called once per step, so its work runs while the tile unit multiplies.
template <class Type, bool kTwo, class X, class Beside>
void multiply_block(X x, const char* w, int steps, char* sums, bool resume, panels::Ahead ahead, Beside& beside,
                    panels::Ahead sums_ahead = {}) {
    constexpr ptrdiff_t kPanelStride = 2 * amx::kTileBytes;
    char* const sums2 = sums + kTileSumsBytes;
    if (resume) {
        tile_load<0>(sums, kSumsRowBytes), tile_load<1>(sums + amx::kTileBytes, kSumsRowBytes);
        if constexpr (kTwo) tile_load<2>(sums2, kSumsRowBytes), tile_load<3>(sums2 + amx::kTileBytes, kSumsRowBytes);
    } else {
        tile_zero<0>(), tile_zero<1>();
        if constexpr (kTwo) tile_zero<2>(), tile_zero<3>();
    }
    for (int step = 0; step < steps; step++, x.at += X::kStepBytes, w += kPanelTileBytes) {
        X::template load<4>(x.at, x.stride_bytes);
        tile_load<6>(w, kPanelStride);
        Type::template dot<0, 4, 6>();
        tile_load<7>(w + amx::kTileBytes, kPanelStride);
        ahead.fetch_step();
        Type::template dot<1, 4, 7>();
        if constexpr (kTwo) {
            X::template load<5>(x.at + x.next, x.stride_bytes);
            Type::template dot<2, 5, 6>();
            Type::template dot<3, 5, 7>();
        }
        sums_ahead.fetch_step<3>();
        beside.step();
    }
    tile_store<0>(sums, kSumsRowBytes), tile_store<1>(sums + amx::kTileBytes, kSumsRowBytes);
    if constexpr (kTwo) tile_store<2>(sums2, kSumsRowBytes), tile_store<3>(sums2 + amx::kTileBytes, kSumsRowBytes);
}

}  // namespace llmb::tile

#endif
