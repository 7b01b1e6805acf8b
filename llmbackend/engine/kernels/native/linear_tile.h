// y = x·Wᵀ for bfloat16 x and weights on the CPU's tile unit.
//
// For: linear.h. Does not know: other types. Invariant: every row goes through the same tile instructions with the same
// cuts of k, all of 32, for any number of rows: rows are padded to tiles with zeros, and a row of a product of tiles
// depends on that row alone.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "amx.h"
#include "linear_piece.h"
#include "numbers.h"
#include "pack.h"
#include "step.h"
#include "team.h"

#if defined(LLMB_HAS_TILES)

namespace llmb::panels {

constexpr int kTileK = amx::kTileBytes / static_cast<int>(sizeof(bf16));        // 32
constexpr size_t kTileSize = static_cast<size_t>(amx::kTileRows) * kTileK;         // elements
constexpr int kTileChunkRows = 256;  // of x at a time: with kOuterK of k, a quarter of the L2 cache
constexpr int kTileInnerK = 256;     // of a panel at a time: a third of the L1 cache, beside as much of x

// A chunk's rows of x as tiles, [rows / 16][k / 32][16][32], padded with zeros.
struct TileRows {
    using Weight = bf16;
    const bf16* data;
    int rows;
    int k;

    bool streams() const { return false; }
    int sum_rows() const { return padded_k(rows, amx::kTileRows); }
    size_t block_size() const { return amx::kTileRows * static_cast<size_t>(padded_k(k, kTileK)); }
};

inline void load_sums(float* sums, bool resume) {
    constexpr ptrdiff_t kStride = kPanel * sizeof(float);
    if (!resume) return tile_zero<0>(), tile_zero<1>();
    tile_load<0>(sums, kStride);
    tile_load<1>(sums + 16, kStride);
}

inline void load_second_sums(float* sums, bool resume) {
    constexpr ptrdiff_t kStride = kPanel * sizeof(float);
    if (!resume) return tile_zero<2>(), tile_zero<3>();
    tile_load<2>(sums, kStride);
    tile_load<3>(sums + 16, kStride);
}

// sums (+)= one or two tiles of rows times one panel, `steps` tiles of k. Tiles 0 to 3 hold the sums, 4 and 5 the rows, 6
// and 7 the weights, whose 16 columns of pairs are every other 64 bytes.
template <bool kTwo>
void multiply_tiles(const bf16* a, size_t block_size, const bf16* w, int steps, float* sums, bool resume, Ahead ahead) {
    constexpr ptrdiff_t kStride = kPanel * sizeof(float);
    float* second = sums + amx::kTileRows * kPanel;
    load_sums(sums, resume);
    if constexpr (kTwo) load_second_sums(second, resume);
    for (int step = 0; step < steps; step++, a += kTileSize, w += kTileK * kPanel) {
        tile_load<4>(a, amx::kTileBytes);
        tile_load<6>(w, 2 * amx::kTileBytes);
        tile_load<7>(w + kTileK, 2 * amx::kTileBytes);
        ahead.fetch_step();
        tile_dot<0, 4, 6>();
        tile_dot<1, 4, 7>();
        if constexpr (kTwo) {
            tile_load<5>(a + block_size, amx::kTileBytes);
            tile_dot<2, 5, 6>();
            tile_dot<3, 5, 7>();
        }
    }
    tile_store<0>(sums, kStride);
    tile_store<1>(sums + 16, kStride);
    if constexpr (kTwo) {
        tile_store<2>(second, kStride);
        tile_store<3>(second + 16, kStride);
    }
}

// sums (+)= all rows times k_begin..k_end of one panel. `w` is the panel's k_begin; `next` are the weights after these.
inline void multiply_panel(const TileRows& x, int k_begin, int k_end, const bf16* w, float* sums, const bf16* next) {
    const int tiles = x.sum_rows() / amx::kTileRows;
    const int step_bytes = kTileK * kPanel * 2 / ((tiles + 1) / 2);
    const int part = part_of_k(k_end - k_begin, kTileInnerK);
    for (int k = k_begin; k < k_end; k += part, w += part * kPanel) {
        const int steps = (std::min(part, k_end - k) + kTileK - 1) / kTileK;
        const char* target = reinterpret_cast<const char*>(k + part < k_end ? w + part * kPanel : next);
        for (int tile = 0; tile < tiles; tile += 2, target += steps * step_bytes) {
            const bf16* a = x.data + tile * x.block_size() + k / kTileK * kTileSize;
            const auto multiply = tile + 1 < tiles ? multiply_tiles<true> : multiply_tiles<false>;
            multiply(a, x.block_size(), w, steps, sums + tile * amx::kTileRows * kPanel, k > 0, {target, step_bytes});
        }
    }
}

// A row of x to its place among the tiles; null: zeros.
inline void tile_row(const bf16* x, int k, bf16* to) {
    for (int i = 0; i < k; i += kTileK, to += kTileSize) {
        const int count = x ? std::min(kTileK, k - i) : 0;
        if (count) std::memcpy(to, x + i, count * sizeof(bf16));
        std::memset(to + count, 0, (kTileK - count) * sizeof(bf16));
    }
}

inline int num_tiles(int rows) { return (rows + amx::kTileRows - 1) / amx::kTileRows; }

inline size_t tile_rows_bytes(const LinearOp& op, int rows) {
    return sizeof(bf16) * num_tiles(rows) * kTileSize * (padded_k(op.k, kTileK) / kTileK);
}

inline void tile_x(Worker& worker, const LinearOp& op, int rows, bf16* tiles) {
    const auto* x = static_cast<const bf16*>(op.x);
    const size_t block_size = amx::kTileRows * static_cast<size_t>(padded_k(op.k, kTileK));
    worker.share(num_tiles(rows) * amx::kTileRows, 4, [&](int begin, int end) {
        for (int row = begin; row < end; row++)
            tile_row(row < rows ? x + static_cast<int64_t>(row) * op.x_stride : nullptr, op.k,
                     tiles + row / amx::kTileRows * block_size + row % amx::kTileRows * kTileK);
    });
    worker.barrier();
}

inline size_t linear_tile_scratch_bytes(const LinearOp& op, int rows, int num_threads) {
    return tile_rows_bytes(op, rows) + num_threads * sums_bytes(std::min(num_tiles(rows) * amx::kTileRows, kTileChunkRows));
}

inline void linear_tile(Worker& worker, const LinearOp& op, int rows, char* scratch) {
    auto* tiles = reinterpret_cast<bf16*>(scratch);
    tile_x(worker, op, rows, tiles);
    const size_t own = sums_bytes(std::min(num_tiles(rows) * amx::kTileRows, kTileChunkRows));
    auto* sums = reinterpret_cast<float*>(scratch + tile_rows_bytes(op, rows) + worker.rank * own);
    tiles_begin();
    share_panels(worker, op, sizeof(bf16) * panel_size(tiles, op.k), [&](int begin, int end) {
        for (int first = 0; first < rows; first += kTileChunkRows) {
            const int count = std::min(kTileChunkRows, rows - first);
            const TileRows x{tiles + static_cast<size_t>(first) * padded_k(op.k, kTileK), count, op.k};
            linear_piece(op, x, first, begin, end, sums);
        }
    });
    tiles_end();
}

}  // namespace llmb::panels

#endif
