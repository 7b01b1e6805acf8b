// Values that are the last dimensions of keys (multi-head latent attention): makes rows of values for one chunk.
//
// Used by the attention kernels for layers without separate values. Invariant: the rows are what a memory of values
// would contain; they are made anew for each task, which reads them once for each block of its rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "attention_plan.h"
#include "attention_softmax.h"
#include "memory.h"
#include "numbers.h"
#include "step.h"

namespace llmb {

// Four adjacent elements of a row of keys or values: 32-bit numbers, or for 16 bits, squares of two dimensions at two
// positions. In keys, the dimensions of a position are adjacent; in values, the positions of a dimension.
using FourNumbers = uint32_t __attribute__((vector_size(16)));
using FourSquares = uint64_t __attribute__((vector_size(32)));

template <class T>
using FourCells = std::conditional_t<sizeof(T) == 2, FourSquares, FourNumbers>;

// Transposes the pairs of a square.
inline void turn(FourNumbers&) {}
inline void turn(FourSquares& cells) {
    cells = (cells & 0xffff00000000ffffu) | (cells & 0xffff0000u) << 16 | (cells >> 16 & 0xffff0000u);
}

// Elements of a and, from 4 on, of b.
template <int... kFrom, class Cells>
inline void pick(const Cells& a, const Cells& b, Cells& to) {
#if defined(__clang__)
    to = __builtin_shufflevector(a, b, kFrom...);
#else
    to = __builtin_shuffle(a, b, Cells{kFrom...});
#endif
}

// Transposes four rows of keys to four rows of values.
template <class Cells>
inline void transpose_cells(const char* keys, size_t key_bytes, char* values, size_t value_bytes) {
    Cells from[4], halves[4], to[4];
    for (int i = 0; i < 4; i++) {
        std::memcpy(from + i, keys + i * key_bytes, sizeof(Cells));
        turn(from[i]);
    }
    for (int i = 0; i < 4; i += 2) {
        pick<0, 4, 1, 5>(from[i], from[i + 1], halves[i]);
        pick<2, 6, 3, 7>(from[i], from[i + 1], halves[i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        pick<0, 1, 4, 5>(halves[i], halves[i + 2], to[2 * i]);
        pick<2, 3, 6, 7>(halves[i], halves[i + 2], to[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) std::memcpy(values + i * value_bytes, to + i, sizeof(Cells));
}

template <class T>
class LatentValues {
    static constexpr int kStep = 4 * kColumnStep<T>;  // dimensions, and positions, of four cells

  public:
    LatentValues(const AttentionOp& op, Carver& memory)
        : dim_(op.values ? 0 : op.value_dim), first_(op.head_dim - dim_), block_size_(op.block_size),
          rows_(memory.take<T>(static_cast<size_t>(kChunk) * dim_)) {}

    // Fills in a chunk's values from its keys, if it has none.
    void fill(Chunk<T>& chunk) const {
        if (dim_ == 0) return;
        for (int sub = 0; sub < kChunkBlocks; sub++) {
            if (chunk.keys[sub] == nullptr) continue;
            T* values = rows_ + static_cast<size_t>(sub) * kSubBlock * dim_;
            fill(chunk.keys[sub] + static_cast<size_t>(first_) * block_size_, values);
            chunk.values[sub] = values;
        }
    }

  private:
    // keys and values: [dim][block_size] and [kSubBlock][dim], or in pairs [dim/2][block_size][2] and [kSubBlock/2][dim][2].
    void fill(const T* keys, T* values) const {
        const size_t key_bytes = sizeof(T) * kColumnStep<T> * block_size_, value_bytes = sizeof(T) * kColumnStep<T> * dim_;
        for (int d = 0; d < dim_; d += kStep)
            for (int at = 0; at < kSubBlock; at += kStep)
                transpose_cells<FourCells<T>>(
                    reinterpret_cast<const char*>(keys + static_cast<size_t>(d) * block_size_ + kColumnStep<T> * at), key_bytes,
                    reinterpret_cast<char*>(values + static_cast<size_t>(at) * dim_ + kColumnStep<T> * d), value_bytes);
    }

    const int dim_;  // 0 = values are stored
    const int first_;
    const int block_size_;
    T* const rows_;
};

}  // namespace llmb
