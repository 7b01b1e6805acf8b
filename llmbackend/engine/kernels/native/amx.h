// The CPU's tile unit: eight tiles of 16 rows times 64 bytes, and products of bfloat16 tiles.
//
// For: kernels on tiles. Does not know: matrices. Invariant: compiled with LLMB_EMULATE_AMX, the same functions compute
// in plain C++ what Intel documents for the instructions, bit by bit (but for subnormal numbers, which those flush to
// zero), so that kernels on tiles can be tested on any CPU. Tiles belong to a thread, from tiles_begin to tiles_end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "numbers.h"

#if defined(LLMB_EMULATE_AMX) || (defined(__AMX_TILE__) && defined(__AMX_BF16__))
#define LLMB_TILES 1

namespace llmb {

constexpr int kTileRows = 16;
constexpr int kTileRowBytes = 64;

#if defined(LLMB_EMULATE_AMX)

struct EmulatedTile {
    char row[kTileRows][kTileRowBytes];
};
inline thread_local EmulatedTile emulated_tiles[8];

inline void tiles_begin() {}
inline void tiles_end() {}

template <int kTile>
inline void tile_zero() {
    std::memset(&emulated_tiles[kTile], 0, sizeof(EmulatedTile));
}

template <int kTile>
inline void tile_load(const void* memory, ptrdiff_t stride_bytes) {
    for (int r = 0; r < kTileRows; r++)
        std::memcpy(emulated_tiles[kTile].row[r], static_cast<const char*>(memory) + r * stride_bytes, kTileRowBytes);
}

template <int kTile>
inline void tile_store(void* memory, ptrdiff_t stride_bytes) {
    for (int r = 0; r < kTileRows; r++)
        std::memcpy(static_cast<char*>(memory) + r * stride_bytes, emulated_tiles[kTile].row[r], kTileRowBytes);
}

// C += A·B for 16 pairs of k: even and odd ones are summed apart from zero, then together, then added.
template <int kC, int kA, int kB>
inline void tile_dot() {
    const auto element = [](int tile, int row, int i) {
        bf16 x;
        std::memcpy(&x, emulated_tiles[tile].row[row] + 2 * i, sizeof x);
        return to_float(x);
    };
    for (int m = 0; m < kTileRows; m++) {
        for (int n = 0; n < 16; n++) {
            float even = 0, odd = 0, c;
            for (int k = 0; k < 16; k++) {
                even += element(kA, m, 2 * k) * element(kB, k, 2 * n);  // products of bfloat16 are exact
                odd += element(kA, m, 2 * k + 1) * element(kB, k, 2 * n + 1);
            }
            std::memcpy(&c, emulated_tiles[kC].row[m] + 4 * n, sizeof c);
            c += even + odd;
            std::memcpy(emulated_tiles[kC].row[m] + 4 * n, &c, sizeof c);
        }
    }
}

#else

struct TileConfiguration {
    uint8_t palette = 1, start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfiguration) == 64);

// Clobbering memory matters in all of these: compilers take them for functions of their registers and move them across
// the stores of what they read.
inline void tiles_begin() {
    const TileConfiguration configuration;
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

template <int kTile>
inline void tile_store(void* memory, ptrdiff_t stride_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(memory), "r"(stride_bytes), "i"(kTile) : "memory");
}

template <int kC, int kA, int kB>
inline void tile_dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

#endif

}  // namespace llmb

#endif
