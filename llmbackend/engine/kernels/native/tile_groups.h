// Quantised rows times one panel of weights in groups of 32 k on the CPU's tile unit: the integer sums of a group
// leave the tiles, and a vector step follows.
//
// Used by linear_int4.h and linear_ggml.h. Invariant: sums of a group are exact, and groups ascend, so an element
// equals that of the vector kernel.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "epilogue_int8.h"
#include "numbers.h"
#include "panel_product.h"
#include "tile_panel.h"

#if defined(LLMB_HAS_TILES)

namespace llmb::tile {

// Signed bytes of x times unsigned ones of weights.
struct SignedByUnsigned {
    template <int kC, int kA, int kB>
    static void dot() {
        tile_dot_s8_u8<kC, kA, kB>();
    }
};

inline Ints load(const int32_t* p) { return load_ints(p); }
inline void store(int32_t* p, Ints x) { std::memcpy(p, &x, sizeof x); }
using llmb::load;
using llmb::store;

// Adds the products of up to kLargeBlock rows with a panel to `out`, float32 or int32. Weights has
//   kGroup                      k per group
//   groups                      their number
//   kHasBegins                  whether the step reads a number per row and group
//   put(group, to)              writes its numbers as bytes, in quads of k like panels of int8
//   columns(group, column)      the step for a vector of columns: its add(sum, begin, out) is the new out
// tiles_begin must have been called with the depth kGroup. A block's next groups are multiplied before the previous ones
// are added, so vectors do not wait for tiles.
template <class Weights, class Out>
class GroupedProduct {
  public:
    // x: the first row; begins: for the first row, one per group.
    GroupedProduct(const Weights& weights, WholeRows x, int rows, const int32_t* begins, Out (*out)[kPanel])
        : weights_(weights), x_(x), rows_(rows), begins_(begins), out_(out) {}

    // Groups begin..end-1.
    void run(int begin, int end) {
        for (int group = begin; group < end; group += kGroups) {
            const int count = std::min(kGroups, end - group);
            for (int i = 0; i < count; i++) weights_.put(group + i, numbers_[i]);
            for (int block = 0; block < rows_; block += kBlockRows) {
                Sums& sums = sums_[turn_ ^= 1];
                for (int i = 0; i < count; i++) multiply(block, group + i, numbers_[i], sums[i]);
                add_pending();
                pending_ = {&sums, block, group, count};
            }
        }
        add_pending();
        pending_ = {};
    }

  private:
    static constexpr int kGroups = 2;  // at a time
    static constexpr int32_t kNoBegins[kGroups] = {};
    static constexpr size_t kNumbersBytes = static_cast<size_t>(Weights::kGroup) * kPanel;
    using Sums = int32_t[kGroups][kBlockRows][kPanel];
    struct Pending {
        const Sums* sums;
        int block, group, count;
    };

    void multiply(int block, int group, const char* w, int32_t (*sums)[kPanel]) const {
        const WholeRows rows{x_.stride_bytes, x_.at + block * x_.stride_bytes + group * Weights::kGroup};
        NothingBeside nothing;
        char* to = reinterpret_cast<char*>(sums);
        if (rows_ - block > amx::kTileRows) multiply_block<SignedByUnsigned, true>(rows, w, 1, to, false, {}, nothing);
        else multiply_block<SignedByUnsigned, false>(rows, w, 1, to, false, {}, nothing);
    }

    void add_pending() const {
        if (pending_.count == 2) add<2>();
        else if (pending_.count == 1) add<1>();
    }

    template <int kCount>
    void add() const {
        const auto [sums, block, group, count] = pending_;
        const int rows = std::min(rows_ - block, kBlockRows);
        const size_t groups = weights_.groups;
        for (int column = 0; column < kPanel; column += kLanes) {
            const auto first = weights_.columns(group, column), second = weights_.columns(group + kCount - 1, column);
            const int32_t* begins = Weights::kHasBegins ? begins_ + block * groups + group : kNoBegins;
            const int32_t* own = (*sums)[0][0] + column;
            Out* out = out_[block] + column;
            for (int r = 0; r < rows; r++, begins += Weights::kHasBegins ? groups : 0, own += kPanel, out += kPanel) {
                auto acc = first.add(load(own), begins[0], load(out));
                if constexpr (kCount == 2) acc = second.add(load(own + kBlockRows * kPanel), begins[1], acc);
                store(out, acc);
            }
        }
    }

    const Weights& weights_;
    const WholeRows x_;
    const int rows_;
    const int32_t* const begins_;
    Out (*const out_)[kPanel];
    int turn_ = 0;
    Pending pending_{};
    alignas(64) char numbers_[kGroups][kNumbersBytes];
    alignas(64) Sums sums_[2];
};

// The product without the rows' scales, for weights with a float step per group.
template <class Weights>
void multiply_groups(const Weights& weights, WholeRows x, int rows, const int32_t* begins, float (*out)[kPanel]) {
    std::memset(out, 0, rows * sizeof *out);
    tiles_begin(amx::kTileRows, Weights::kGroup);
    GroupedProduct<Weights, float>(weights, x, rows, begins, out).run(0, weights.groups);
    tiles_end();
}

}  // namespace llmb::tile

#endif
