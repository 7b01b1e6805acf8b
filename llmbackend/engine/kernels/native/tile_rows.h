// Rows of bfloat16 in the order in which the tile unit reads them: [rows / 16][columns / 32][16][32].
//
// For: the operations that write or read activations. Does not know: what they hold. Invariants: the number of columns is
// padded to a multiple of 32 with zeros, that of rows to a multiple of 16 with anything; 32 columns of a row are adjacent.
#pragma once

#include <cstddef>

#include "amx.h"
#include "numbers.h"

namespace llmb {

constexpr int kTileColumns = amx::kTileBytes / static_cast<int>(sizeof(bf16));
constexpr size_t kTileSize = static_cast<size_t>(amx::kTileRows) * kTileColumns;  // elements

// One row. `stride`: the number of columns of all rows.
template <class T>
struct TileRow {
    T* first;

    TileRow(T* tiles, int row, int stride)
        : first(tiles + static_cast<size_t>(row / amx::kTileRows) * amx::kTileRows * stride +
                row % amx::kTileRows * kTileColumns) {}

    // Where column i is; up to the next multiple of 32 others follow.
    T* operator+(int i) const { return first + i / kTileColumns * kTileSize + i % kTileColumns; }
    T& operator[](int i) const { return *(*this + i); }
};

}  // namespace llmb
