// The elements of int8 activations beyond 127 (quantise_int8.h): their excess is added to sums that tiles computed
// without it.
//
// Used by linear_tile.h. Invariant: sums are exact, so the order of additions does not matter. Elements are sorted by
// part of k, so that their weights are in the L1 cache when they are multiplied.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <utility>

#include "epilogue_int8.h"
#include "memory.h"
#include "numbers.h"
#include "quantised_rows.h"
#include "tile_block.h"
#include "tile_plan.h"

#if defined(LLMB_HAS_TILES)

namespace llmb::tile {

struct WideElement {
    int32_t row;  // of 16
    int32_t k;
    int32_t rest;
};

struct WideRange {
    const WideElement* begin;
    const WideElement* end;
};

// The wide elements of all rows: of 16 at a time, by part of k.
class WideElements {
  public:
    WideElements(Carver& memory, const Plan& plan, int k)
        : plan_(plan), parts_(plan.num_parts()), room_(amx::kTileRows * (k / int8::kWideEvery)),
          starts_(memory.take<int32_t>(static_cast<size_t>(plan.row_tiles()) * (parts_ + 1))),
          elements_(memory.take<WideElement>(static_cast<size_t>(plan.row_tiles()) * room_)) {}

    // Stores those of up to 16 rows, in the order found.
    template <class Rows>
    void sort(const Rows& rows, int row_tile) {
        const int first = row_tile * amx::kTileRows, count = std::min(amx::kTileRows, plan_.rows - first);
        int32_t* starts = starts_ + static_cast<size_t>(row_tile) * (parts_ + 1);
        WideElement* elements = elements_ + static_cast<size_t>(row_tile) * room_;
        const auto each = [&](auto f) {
            for (int r = 0; r < count; r++)
                for (int i = 0; i < rows.num_wide[first + r]; i++) f(r, rows.wide_of(first + r)[i]);
        };
        std::fill(starts, starts + parts_ + 1, 0);
        each([&](int, const int8::Wide& wide) { starts[part_of(wide)]++; });
        int32_t total = 0;
        for (int part = 0; part <= parts_; part++) total += std::exchange(starts[part], total);
        each([&](int r, const int8::Wide& wide) { elements[starts[part_of(wide)]++] = {r, wide.k, wide.rest}; });
        std::copy_backward(starts, starts + parts_, starts + parts_ + 1);
        starts[0] = 0;
    }

    WideRange of(int row_tile, int k_tile) const {
        const int32_t* starts = starts_ + static_cast<size_t>(row_tile) * (parts_ + 1) + plan_.part_of(k_tile);
        const WideElement* elements = elements_ + static_cast<size_t>(row_tile) * room_;
        return {elements + starts[0], elements + starts[1]};
    }

  private:
    int part_of(const int8::Wide& wide) const { return plan_.part_of(wide.k / Int8::kDepth); }

    const Plan& plan_;
    const int parts_;
    const int room_;
    int32_t* const starts_;  // [row tiles][parts + 1]
    WideElement* const elements_;  // [row tiles][room]
};

// Adds the products of one row tile's wide elements in a part of k with one panel, some during each step of the
// products of the next block.
class WideAdder {
  public:
    // w: the panel's weights from k_tile on; sums: of the row tile.
    void begin(WideRange range, const char* w, int k_tile, char* sums) {
        range_ = range, sums_ = sums;
        weights_ = reinterpret_cast<const int8_t*>(w) - static_cast<ptrdiff_t>(k_tile) * kPanelTileBytes;
    }

    LLMB_INLINE void step() {
        constexpr int kPerStep = 2;
        for (int i = 0; i < kPerStep && range_.begin < range_.end; i++) add(*range_.begin++);
    }

    void all() {
        while (range_.begin < range_.end) add(*range_.begin++);
    }

  private:
    LLMB_INLINE void add(const WideElement& element) const {
        char* row = sums_ + element.row * kSumsRowBytes;
#if defined(__AVX512VNNI__)
        // Most are small enough for the CPU's byte products.
        const int magnitude = std::abs(element.rest);
        if (__builtin_expect(magnitude < 256, true)) {
            const char* w = reinterpret_cast<const char*>(weights_) + element.k / 4u * int8::kQuadBytes;
            const __m512i factors = _mm512_set1_epi32(magnitude << element.k % 4u * 8);
            const __m512i sign = _mm512_set1_epi32(element.rest >> 31);
            for (int half = 0; half < 2; half++) {
                char* sums = row + half * amx::kTileBytes;
                const __m512i product = _mm512_dpbusd_epi32(_mm512_setzero_si512(), factors,
                                                            _mm512_loadu_si512(w + half * amx::kTileBytes));
                const __m512i with_sign = _mm512_sub_epi32(_mm512_xor_si512(product, sign), sign);
                _mm512_storeu_si512(sums, _mm512_add_epi32(_mm512_loadu_si512(sums), with_sign));
            }
            return;
        }
#endif
        int8::add_wide(weights_, {element.k, element.rest}, [=](int column) { return row + column * 4; });
    }

    WideRange range_{};
    const int8_t* weights_ = nullptr;
    char* sums_ = nullptr;
};

}  // namespace llmb::tile

#endif
