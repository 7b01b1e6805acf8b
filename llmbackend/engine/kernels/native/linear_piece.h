// How the work of a linear layer is divided: over threads by panels of weights, then by k, so that reused data stay in
// cache.
//
// Used by linear_float.h; `piece_panels` by all products on vectors, `Ahead` by tile_block.h. Invariant: sums are
// divided only by the shape of the weights, and resumed exactly where they were left.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "epilogue.h"
#include "pack.h"
#include "step.h"
#include "team.h"

namespace llmb::panels {

constexpr int kOuterK = 1024;      // k of x at a time, for all panels of a piece: it stays in the L2 cache
constexpr int kPiecePanels = 16;   // maximum per piece of work
constexpr int kFewRows = 4;        // up to this many rows, memory is the bottleneck
constexpr int kPieceBytes = 512 << 10;  // approximate size of the weights, unless that leaves too few pieces

// Data that will be needed next, prefetched in small steps while others are multiplied: weights into the L2 cache.
struct Ahead {
    const char* at;
    int step_bytes;

    // The next step, of up to kMost bytes, one line out of every kEvery bytes.
    template <int kMost, int kEvery>
    void fetch() {
        for (int byte = 0; byte < kMost; byte += kEvery) __builtin_prefetch(at + byte, 0, 2);
        at += step_bytes;
    }
    // kLocality: as of __builtin_prefetch; 3 = into the L1 cache.
    template <int kLocality = 2>
    LLMB_INLINE void fetch_step() {
        for (int byte = 0; byte < step_bytes; byte += 64) __builtin_prefetch(at + byte, 0, kLocality);
        at += step_bytes;
    }
};

// k in the fewest parts of at most `most`, of nearly equal size, all but the last a multiple of 32.
inline int part_of_k(int k, int most) {
    return padded_k(divide_up(k, divide_up(k, most)), 32);
}

// Panels begin..end-1 times one chunk x of rows, which starts at row first_row of y. X provides its number of `rows`,
// `k`, and whether k need not be divided (`streams`); multiply_panel does the rest.
template <class X>
void linear_piece(const LinearOp& op, const X& x, int first_row, int begin, int end, float* sums) {
    using W = typename X::Weight;
    const auto* weights = static_cast<const W*>(op.weight);
    const auto* weights2 = static_cast<const W*>(op.weight2);
    const size_t size = panel_size(weights, x.k);
    const size_t sums_size = static_cast<size_t>(x.rows) * kPanel;
    const int part = part_of_k(x.k, x.streams() ? x.k : kOuterK);
    const bool whole = part >= x.k;  // then sums need not outlive a panel, and stay in the L1 cache
    for (int k = 0; k < x.k; k += part) {
        const int k_end = std::min(k + part, x.k);
        for (int panel = begin; panel < end; panel++) {
            float* own = sums + (whole ? 0 : (panel - begin) * 2 * sums_size);
            const size_t at = panel * size + static_cast<size_t>(k) * kPanel;
            const size_t next = panel + 1 < end || whole ? at + size : begin * size + static_cast<size_t>(k_end) * kPanel;
            multiply_panel(x, k, k_end, weights + at, own, weights + next);
            if (weights2) multiply_panel(x, k, k_end, weights2 + at, own + sums_size, weights2 + next);
            if (k_end == x.k) finish_panel(op, panel, first_row, x.rows, own, own + sums_size);
        }
    }
}

// Bytes of a thread's sums for chunks of this many rows.
inline size_t sums_bytes(int rows) { return sizeof(float) * kPiecePanels * 2 * rows * kPanel; }

// Maximum number of panels that a thread takes at a time. Pieces are long, because memory streams best in one
// direction, but there are several per thread, so that all finish at about the same time.
inline int piece_panels(const Worker& worker, int panels, size_t panel_bytes) {
    const int by_bytes = static_cast<int>(kPieceBytes / panel_bytes);
    const int by_threads = panels / (worker.size * 4);
    return worker.size == 1 ? kPiecePanels : std::clamp(std::min(by_bytes, by_threads), 1, kPiecePanels);
}

// The same for weights that are not widened: single panels if rows are many, so that products are the bottleneck.
inline int piece_panels(const Worker& worker, int rows, int panels, size_t panel_bytes) {
    return rows <= kFewRows ? piece_panels(worker, panels, panel_bytes) : 1;
}

}  // namespace llmb::panels
