// The CPU's tile unit: eight tiles of 16 rows times 64 bytes, and products of bfloat16 or int8 tiles.
//
// Used by kernels on tiles. Invariant: with LLMB_EMULATE_AMX, the same functions compute in plain C++ what Intel
// documents for the instructions, bit by bit (except subnormal numbers, which those flush to zero), so kernels on tiles
// can be tested on any CPU. Tiles belong to a thread, from tiles_begin to tiles_end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "numbers.h"

#if defined(LLMB_EMULATE_AMX) || (defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__))
#define LLMB_HAS_TILES 1
#endif

namespace llmb {

namespace amx {
constexpr int kTileRows = 16;
constexpr int kTileBytes = 64;      // per row

// Sizes of a tile for the arguments of tiles_begin: 6 and 7 are right factors; 4 and 5 are left factors if the depth of
// products is not kTileBytes.
constexpr int rows_of(int tile, int rows, int depth_bytes) { return tile < 6 ? rows : depth_bytes / 4; }
constexpr int row_bytes_of(int tile, int depth_bytes) { return tile == 4 || tile == 5 ? depth_bytes : kTileBytes; }
}  // namespace amx

#if defined(LLMB_EMULATE_AMX)

struct EmulatedTile {
    char row[amx::kTileRows][amx::kTileBytes];

    template <class T>
    T at(int r, int i) const {
        T x;
        std::memcpy(&x, row[r] + i * sizeof(T), sizeof x);
        return x;
    }
    template <class T>
    void add(int r, int i, T x) {
        x += at<T>(r, i);
        std::memcpy(row[r] + i * sizeof(T), &x, sizeof x);
    }
};
inline thread_local EmulatedTile emulated_tiles[8];

// Elements beyond a tile's size are zero, and not stored.
struct EmulatedSizes {
    int rows, depth_bytes;
};
inline thread_local EmulatedSizes emulated_sizes;

inline void tiles_begin(int rows = amx::kTileRows, int depth_bytes = amx::kTileBytes) { emulated_sizes = {rows, depth_bytes}; }
inline void tiles_end() {}

// Calls copy(row, bytes) for each row of a tile.
template <int kTile, class Copy>
inline void for_tile_rows(Copy&& copy) {
    const auto [rows, depth_bytes] = emulated_sizes;
    for (int r = 0; r < amx::rows_of(kTile, rows, depth_bytes); r++) copy(r, amx::row_bytes_of(kTile, depth_bytes));
}

template <int kTile>
inline void tile_zero() {
    std::memset(&emulated_tiles[kTile], 0, sizeof(EmulatedTile));
}

template <int kTile>
inline void tile_load(const void* memory, ptrdiff_t stride_bytes) {
    tile_zero<kTile>();
    for_tile_rows<kTile>([&](int r, int bytes) {
        std::memcpy(emulated_tiles[kTile].row[r], static_cast<const char*>(memory) + r * stride_bytes, bytes);
    });
}

template <int kTile>
inline void tile_load_past_l1(const void* memory, ptrdiff_t stride_bytes) {
    tile_load<kTile>(memory, stride_bytes);
}

template <int kTile>
inline void tile_store(void* memory, ptrdiff_t stride_bytes) {
    for_tile_rows<kTile>([&](int r, int bytes) {
        std::memcpy(static_cast<char*>(memory) + r * stride_bytes, emulated_tiles[kTile].row[r], bytes);
    });
}

// float32 C += bfloat16 A·B for 16 pairs of k: even and odd k are summed separately, added together, then to C.
template <int kC, int kA, int kB>
inline void tile_dot() {
    const EmulatedTile &a = emulated_tiles[kA], &b = emulated_tiles[kB];
    for (int m = 0; m < emulated_sizes.rows; m++) {
        for (int n = 0; n < 16; n++) {
            float even = 0, odd = 0;
            for (int k = 0; k < 16; k++) {
                even += to_float(a.at<bf16>(m, 2 * k)) * to_float(b.at<bf16>(k, 2 * n));  // these products are exact
                odd += to_float(a.at<bf16>(m, 2 * k + 1)) * to_float(b.at<bf16>(k, 2 * n + 1));
            }
            emulated_tiles[kC].add(m, n, even + odd);
        }
    }
}

// int32 C += A · B for quads of k.
template <int kC, int kA, int kB, class A, class B>
inline void tile_dot_bytes() {
    const EmulatedTile &a = emulated_tiles[kA], &b = emulated_tiles[kB];
    for (int m = 0; m < emulated_sizes.rows; m++) {
        for (int n = 0; n < 16; n++) {
            int32_t sum = 0;
            for (int k = 0; k < emulated_sizes.depth_bytes; k++) sum += a.at<A>(m, k) * b.at<B>(k / 4, 4 * n + k % 4);
            emulated_tiles[kC].add(m, n, sum);
        }
    }
}
template <int kC, int kA, int kB>
inline void tile_dot_u8_s8() {
    tile_dot_bytes<kC, kA, kB, uint8_t, int8_t>();
}
template <int kC, int kA, int kB>
inline void tile_dot_s8_u8() {
    tile_dot_bytes<kC, kA, kB, int8_t, uint8_t>();
}

#elif defined(LLMB_HAS_TILES)

struct TileConfiguration {
    uint8_t palette = 1, start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfiguration) == 64);

// All of these clobber memory: compilers regard them as functions of their registers and would move them across the
// stores of the data they read.
inline void tiles_begin(int rows = amx::kTileRows, int depth_bytes = amx::kTileBytes) {
    TileConfiguration configuration;
    for (int tile = 0; tile < 8; tile++) {
        configuration.rows[tile] = static_cast<uint8_t>(amx::rows_of(tile, rows, depth_bytes));
        configuration.row_bytes[tile] = static_cast<uint16_t>(amx::row_bytes_of(tile, depth_bytes));
    }
    asm volatile("ldtilecfg %0" : : "m"(configuration) : "memory");
}
inline void tiles_end() { asm volatile("tilerelease" : : : "memory"); }

template <int kTile>
inline void tile_zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

template <int kTile>
inline void tile_load(const void* memory, ptrdiff_t stride_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(memory), "r"(stride_bytes), "i"(kTile) : "memory");
}

// Leaves the L1 cache to data that are used again sooner.
template <int kTile>
inline void tile_load_past_l1(const void* memory, ptrdiff_t stride_bytes) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(memory), "r"(stride_bytes), "i"(kTile) : "memory");
}

template <int kTile>
inline void tile_store(void* memory, ptrdiff_t stride_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(memory), "r"(stride_bytes), "i"(kTile) : "memory");
}

template <int kC, int kA, int kB>
inline void tile_dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

template <int kC, int kA, int kB>
inline void tile_dot_u8_s8() {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

template <int kC, int kA, int kB>
inline void tile_dot_s8_u8() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

#else

inline void tiles_begin() {}
inline void tiles_end() {}

#endif

// How many rows beyond the last one a tile may read.
#if defined(LLMB_HAS_TILES)
constexpr int kRowsRead = amx::kTileRows - 1;
#else
constexpr int kRowsRead = 0;
#endif

}  // namespace llmb
