// Rows in the order in which the tile unit reads them: [rows / 16][columns / c][16][c], where c columns are 64 bytes.
//
// Used by the operations that write or read activations. Invariants: columns are padded to a multiple of c with zeros,
// rows to a multiple of 16 with arbitrary data; c columns of a row are adjacent.
#pragma once

#include <cstddef>

#include "amx.h"

namespace llmb {

constexpr size_t kTileSizeBytes = static_cast<size_t>(amx::kTileRows) * amx::kTileBytes;

// One row. stride: the padded number of columns of all rows.
template <class T>
struct TileRow {
    static constexpr int kColumns = amx::kTileBytes / static_cast<int>(sizeof(T));
    static constexpr size_t kSize = amx::kTileRows * kColumns;
    T* first;

    TileRow(T* tiles, int row, int stride)
        : first(tiles + static_cast<size_t>(row / amx::kTileRows) * amx::kTileRows * stride +
                row % amx::kTileRows * kColumns) {}

    // Address of column i; contiguous up to the next multiple of kColumns.
    T* operator+(int i) const { return first + i / kColumns * kSize + i % kColumns; }
    T& operator[](int i) const { return *(*this + i); }
};

}  // namespace llmb
