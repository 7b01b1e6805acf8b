// Rows in the order in which the tile unit reads them: [rows / 16][columns / c][16][c], c columns being 64 bytes.
//
// For: the operations that write or read activations. Does not know: what they hold. Invariants: the number of columns is
// padded to a multiple of c with zeros, that of rows to a multiple of 16 with anything; c columns of a row are adjacent.
#pragma once

#include <cstddef>

#include "amx.h"

namespace llmb {

constexpr size_t kTileSizeBytes = static_cast<size_t>(amx::kTileRows) * amx::kTileBytes;

// One row. `stride`: the padded number of columns of all rows.
template <class T>
struct TileRow {
    static constexpr int kColumns = amx::kTileBytes / static_cast<int>(sizeof(T));
    static constexpr size_t kSize = amx::kTileRows * kColumns;
    T* first;

    TileRow(T* tiles, int row, int stride)
        : first(tiles + static_cast<size_t>(row / amx::kTileRows) * amx::kTileRows * stride +
                row % amx::kTileRows * kColumns) {}

    // Where column i is; up to the next multiple of kColumns others follow.
    T* operator+(int i) const { return first + i / kColumns * kSize + i % kColumns; }
    T& operator[](int i) const { return *(*this + i); }
};

}  // namespace llmb
