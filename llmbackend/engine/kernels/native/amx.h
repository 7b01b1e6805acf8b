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
constexpr int kFirstRightTile = 6;  // 6 and 7 always have 16 rows; the others as many as tiles_begin says
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

// The emulation always computes 16 rows.
inline void tiles_begin(int = amx::kTileRows) {}
inline void tiles_end() {}

template <int kTile>
inline void tile_zero() {
    std::memset(&emulated_tiles[kTile], 0, sizeof(EmulatedTile));
}

template <int kTile>
inline void tile_load(const void* memory, ptrdiff_t stride_bytes) {
    for (int r = 0; r < amx::kTileRows; r++)
        std::memcpy(emulated_tiles[kTile].row[r], static_cast<const char*>(memory) + r * stride_bytes, amx::kTileBytes);
}

template <int kTile>
inline void tile_store(void* memory, ptrdiff_t stride_bytes) {
    for (int r = 0; r < amx::kTileRows; r++)
        std::memcpy(static_cast<char*>(memory) + r * stride_bytes, emulated_tiles[kTile].row[r], amx::kTileBytes);
}

// float32 C += bfloat16 A·B for 16 pairs of k: even and odd k are summed separately, added together, then to C.
template <int kC, int kA, int kB>
inline void tile_dot() {
    const EmulatedTile &a = emulated_tiles[kA], &b = emulated_tiles[kB];
    for (int m = 0; m < amx::kTileRows; m++) {
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

// int32 C += uint8 A · int8 B for 16 quads of k.
template <int kC, int kA, int kB>
inline void tile_dot_u8_s8() {
    const EmulatedTile &a = emulated_tiles[kA], &b = emulated_tiles[kB];
    for (int m = 0; m < amx::kTileRows; m++)
        for (int n = 0; n < 16; n++)
            for (int k = 0; k < 64; k++)
                emulated_tiles[kC].add<int32_t>(m, n, a.at<uint8_t>(m, k) * b.at<int8_t>(k / 4, 4 * n + k % 4));
}

#elif defined(LLMB_HAS_TILES)

struct TileConfiguration {
    uint8_t palette = 1, start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfiguration) == 64);

// All of these clobber memory: compilers regard them as functions of their registers and would move them across the
// stores of the data they read.
inline void tiles_begin(int rows = amx::kTileRows) {
    TileConfiguration configuration;
    for (int tile = 0; tile < amx::kFirstRightTile; tile++) configuration.rows[tile] = static_cast<uint8_t>(rows);
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

template <int kC, int kA, int kB>
inline void tile_dot_u8_s8() {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

#else

inline void tiles_begin() {}
inline void tiles_end() {}

#endif

}  // namespace llmb
