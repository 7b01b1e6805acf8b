// LoRA adapters of linear layers. x·downᵀ is a separate operation, before the layers with this input; the product with
// upᵀ is computed there too or, for many tokens, in the epilogue of these layers, which add the result to their own.
//
// Used by the program's runner, and by the epilogue of all linear layers (epilogue.h). Invariants: what is added to a
// row depends only on that row and its adapter, in float32 whatever the layer's weight type; rows without an adapter,
// and layers that an adapter does not change, are not touched.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "memory.h"
#include "numbers.h"
#include "pack.h"
#include "step.h"
#include "team.h"
#include "tile_rows.h"

namespace llmb {

namespace lora {

constexpr int kRanks = 16;  // of `down` that are stored together
constexpr int kChains = 4;  // per sum over k: element k is added to chain k mod 4

// The weights of four adjacent k, of the ranks of one vector.
inline void load_four(const float* w, Floats (&four)[kChains]) {
    for (int i = 0; i < kChains; i++) four[i] = load(w + i * kRanks);
}
inline void load_four(const bf16* w, Floats (&four)[kChains]) {
    for (int i = 0; i < 2; i++) {
        const Ints pairs = load_pairs(w + i * 2 * kRanks);
        four[2 * i] = even(pairs), four[2 * i + 1] = odd(pairs);
    }
}
// Distance in elements between a rank and the one `ranks` after it.
inline int ranks_apart(const float*, int ranks) { return ranks; }
inline int ranks_apart(const bf16*, int ranks) { return 2 * ranks; }

// to[r * to_stride] .. : kRanks sums over k (a multiple of 4) for each of R rows of x.
template <int R, class W>
void shrink_rows(const float* x, size_t stride, const W* down, int k, float* const* to) {
    constexpr int kAheadBytes = 1024;
    for (int v = 0; v < kRanks; v += kLanes) {
        const W* w = down + ranks_apart(down, v);
        Floats sums[R][kChains] = {};
        for (int i = 0; i < k; i += kChains, w += kChains * kRanks) {
            for (int line = 0; line < static_cast<int>(kChains * kRanks * sizeof(W)); line += 64)
                __builtin_prefetch(reinterpret_cast<const char*>(w) + kAheadBytes + line, 0, 3);
            Floats four[kChains];
            load_four(w, four);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                for (int c = 0; c < kChains; c++) sums[r][c] = fma(splat(x[r * stride + i + c]), four[c], sums[r][c]);
        }
        for (int r = 0; r < R; r++) store(to[r] + v, (sums[r][0] + sums[r][2]) + (sums[r][1] + sums[r][3]));
    }
}

// Columns begin..end-1 of a row as float32, padded with zeros to whole vectors.
template <class X>
void widen(X x, int begin, int end, float* to) {
    for (int i = begin; i < end; i += kLanes) store(to + i - begin, load_some(x + i, std::min(end - i, kLanes)));
}

inline void widen_row(const LoraOp& op, int token, int begin, int end, float* to) {
    const size_t at = static_cast<size_t>(token) * op.x_stride;
    if (op.x_type == Type::kFloat32) widen(static_cast<const float*>(op.x) + at, begin, end, to);
    else if (op.x_type == Type::kBfloat16) widen(static_cast<const bf16*>(op.x) + at, begin, end, to);
    else widen(TileRow<const bf16>(static_cast<const bf16*>(op.x), token, op.x_stride), begin, end, to);
}

// A token's sums over the columns of each split.
inline float* hidden_at(const LoraOp& op, int place, int layer) {
    return op.hidden + static_cast<size_t>(place) * op.hidden_stride + layer * op.num_splits * op.max_rank;
}

// Some tokens of one adapter, and one split of their columns.
struct Piece {
    const LoraOp& op;
    const LoraMatrices* layers;  // the adapter's, from the operation's first one on
    int first;  // place
    int num_tokens;
    int split;

    int begin() const { return split * op.split; }
    int k() const { return std::min(op.split, op.k - begin()); }

    template <class W>
    void shrink(const float* x, size_t stride) const {
        for (int layer = 0; layer < op.num_layers; layer++) {
            const LoraMatrices& matrices = layers[layer];
            const size_t of_ranks = static_cast<size_t>(padded_k(op.k, kChains)) * kRanks;
            const W* down = static_cast<const W*>(matrices.down) + static_cast<size_t>(begin()) * kRanks;
            for (int rank = 0; rank < matrices.rank; rank += kRanks, down += of_ranks) shrink(x, stride, down, layer, rank);
        }
    }

    template <class W>
    void shrink(const float* x, size_t stride, const W* down, int layer, int rank) const {
#if defined(__AVX512F__)
        constexpr int kRows = 4;
#else
        constexpr int kRows = 2;
#endif
        const int padded = padded_k(k(), kChains);
        const auto hidden_of = [&](int row) {
            return hidden_at(op, first + row, layer) + split * op.max_rank + rank;
        };
        int row = 0;
        for (; row + kRows <= num_tokens; row += kRows) {
            float* to[kRows];
            for (int r = 0; r < kRows; r++) to[r] = hidden_of(row + r);
            shrink_rows<kRows>(x + row * stride, stride, down, padded, to);
        }
        for (; row < num_tokens; row++) {
            float* to[1] = {hidden_of(row)};
            shrink_rows<1>(x + row * stride, stride, down, padded, to);
        }
    }
};

// Some tokens of one adapter.
struct Block {
    const LoraMatrices* layers;  // the adapter's, from the operation's first one on
    int first;                   // place
    int num_tokens;

    Block(const LoraOp& op, int number) {
        const LoraStep& step = *op.step;
        const int32_t* after = std::upper_bound(step.blocks, step.blocks + step.num_adapters + 1, number);
        const int adapter = static_cast<int>(after - step.blocks) - 1;
        layers = step.adapters[adapter] + op.first_layer;
        first = step.starts[adapter] + (number - step.blocks[adapter]) * kLoraBlock;
        num_tokens = std::min(kLoraBlock, step.starts[adapter + 1] - first);
    }
    static int count(const LoraStep& step) { return step.blocks[step.num_adapters]; }
};

// Floats from row to row of the widened x: an odd number of cache lines.
inline size_t widened_stride(const LoraOp& op) { return (padded_k(op.split, 16) / 16 | 1) * 16; }

// hidden of all tokens. Consecutive pieces of work have the same tokens.
inline void shrink(Worker& worker, const LoraOp& op, float* x) {
    const size_t stride = widened_stride(op);
    worker.share(Block::count(*op.step) * op.num_splits, 1, [&](int begin, int end) {
        for (int number = begin; number < end; number++) {
            const Block block(op, number / op.num_splits);
            const Piece piece{op, block.layers, block.first, block.num_tokens, number % op.num_splits};
            for (int i = 0; i < piece.num_tokens; i++)
                widen_row(op, op.step->tokens[piece.first + i], piece.begin(), piece.begin() + piece.k(), x + i * stride);
            if (op.weight_type == Type::kFloat32) piece.shrink<float>(x, stride);
            else piece.shrink<bf16>(x, stride);
        }
    });
}

// to [rank] = the sum of a token's splits, in order.
inline void sum_splits(const LoraOp& op, const float* hidden, int rank, float* to) {
    for (int i = 0; i < rank; i += kLanes) {
        Floats total = load(hidden + i);
        for (int split = 1; split < op.num_splits; split++) total += load(hidden + split * op.max_rank + i);
        store(to + i, total);
    }
}

// The weights of two adjacent ranks, for one vector of columns.
inline void load_two(const float* up, Floats& first, Floats& second) { first = load(up), second = load(up + kPanel); }
inline void load_two(const bf16* up, Floats& first, Floats& second) {
    const Ints pairs = load_pairs(up);
    first = even(pairs), second = odd(pairs);
}

// to[r][column] = over the ranks of hidden[r] * up[column], for R rows and one panel: sums over even and odd ranks.
template <int R, class W>
void expand_rows(const float* hidden, size_t stride, const W* up, int rank, float* to) {
    constexpr int kVectors = 2;
    for (int column = 0; column < kPanel; column += kVectors * kLanes) {
        Floats even_sums[R][kVectors] = {}, odd_sums[R][kVectors] = {};
        const W* w = up + ranks_apart(up, column);
        const float* h = hidden;
        for (int i = 0; i < rank; i += 2, w += 2 * kPanel, h += 2) {
            asm("" : "+r"(h));  // otherwise the compiler keeps h in registers and permutes these
            for (int line = 0; line < static_cast<int>(2 * kPanel * sizeof(W)); line += 64)
                __builtin_prefetch(reinterpret_cast<const char*>(w) + 2048 + line, 0, 3);
            Floats first[kVectors], second[kVectors];
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; v++) load_two(w + ranks_apart(w, v * kLanes), first[v], second[v]);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++)
#pragma GCC unroll 2
                for (int v = 0; v < kVectors; v++) {
                    even_sums[r][v] = fma(splat(h[r * stride]), first[v], even_sums[r][v]);
                    odd_sums[r][v] = fma(splat(h[r * stride + 1]), second[v], odd_sums[r][v]);
                }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; v++)
                store(to + r * kPanel + column + v * kLanes, even_sums[r][v] + odd_sums[r][v]);
    }
}

// The contribution of one adapter to some tokens in panels begin..end-1 of a layer; for the next panel, `to` advances
// by to_next floats.
template <class W>
void expand_panels(const LoraMatrices& matrices, const float* hidden, size_t stride, int tokens, int begin, int end, float* to,
                   size_t to_next) {
#if defined(__AVX512F__)
    constexpr int kRows = 4;
#else
    constexpr int kRows = 2;
#endif
    for (int panel = begin; panel < end; panel++, to += to_next) {
        const W* up = static_cast<const W*>(matrices.up) + static_cast<size_t>(panel) * matrices.rank * kPanel;
        int row = 0;
        for (; row + kRows <= tokens; row += kRows)
            expand_rows<kRows>(hidden + row * stride, stride, up, matrices.rank, to + row * kPanel);
        for (; row < tokens; row++) expand_rows<1>(hidden + row * stride, stride, up, matrices.rank, to + row * kPanel);
    }
}

inline void expand_panels(const LoraOp& op, const LoraMatrices& matrices, const float* hidden, size_t stride, int tokens,
                          int begin, int end, float* to, size_t to_next) {
    if (op.weight_type == Type::kFloat32)
        expand_panels<float>(matrices, hidden, stride, tokens, begin, end, to, to_next);
    else
        expand_panels<bf16>(matrices, hidden, stride, tokens, begin, end, to, to_next);
}

inline int layer_of(const LoraOp& op, int panel) {
    int layer = op.num_layers - 1;
    while (panel < op.first_panels[layer]) layer--;
    return layer;
}

inline float* delta_at(const LoraOp& op, int place, int panel) {
    return op.delta + (static_cast<size_t>(panel) * kLoraDeltaTokens + place) * kPanel;
}

// delta of one block of tokens, panels begin..end-1 of one layer. hidden: scratch for the tokens' sums.
inline void expand_block(const LoraOp& op, const Block& block, int layer, int begin, int end, float* hidden) {
    constexpr size_t kNext = static_cast<size_t>(kLoraDeltaTokens) * kPanel;
    const LoraMatrices& matrices = block.layers[layer];
    const size_t stride = op.max_rank;
    for (int i = 0; i < block.num_tokens; i++)
        sum_splits(op, hidden_at(op, block.first + i, layer), matrices.rank, hidden + i * stride);
    const int before = op.first_panels[layer];
    expand_panels(op, matrices, hidden, stride, block.num_tokens, begin - before, end - before,
                  delta_at(op, block.first, begin), kNext);
}

// delta of all tokens.
inline void expand(Worker& worker, const LoraOp& op, float* hidden) {
    constexpr int kPanels = 32;  // per piece of work
    const int parts = divide_up(op.num_panels, kPanels);
    worker.share(Block::count(*op.step) * parts, 1, [&](int first, int last) {
        for (int number = first; number < last; number++) {
            const Block block(op, number / parts);
            const int end = std::min(op.num_panels, (number % parts + 1) * kPanels);
            for (int panel = number % parts * kPanels; panel < end;) {
                const int layer = layer_of(op, panel);
                const int layer_end = layer + 1 < op.num_layers ? std::min(end, op.first_panels[layer + 1]) : end;
                expand_block(op, block, layer, panel, layer_end, hidden);
                panel = layer_end;
            }
        }
    });
}

// hidden of all tokens: the sum of the splits replaces the first one.
inline void sum_all_splits(Worker& worker, const LoraOp& op) {
    const LoraStep& step = *op.step;
    worker.share(step.num_tokens, kLoraBlock, [&](int begin, int end) {
        for (int place = begin; place < end; place++)
            for (int layer = 0; layer < op.num_layers; layer++) {
                float* hidden = hidden_at(op, place, layer);
                sum_splits(op, hidden, step.adapters[step.adapter_of[place]][op.first_layer + layer].rank, hidden);
            }
    });
}

inline bool has_delta(const LoraStep& step) { return step.num_tokens <= kLoraDeltaTokens; }

}  // namespace lora

// The adapters' contribution to rows first..first+rows-1 (at most kLoraBlock) of a linear operation in one panel, of
// the second weight or the first. Must be constructed before the panel is multiplied.
class LoraRows {
  public:
    LoraRows() = default;
    LoraRows(const LinearOp& op, bool second, int panel, int first, int rows) { begin(op, second, panel, first, rows); }
    LoraRows(const LoraRows&) = delete;
    LoraRows& operator=(const LoraRows&) = delete;

    void begin(const LinearOp& op, bool second, int panel, int first, int rows) {
        if (op.lora == nullptr || op.lora->step->num_adapters == 0) return;
        find(*op.lora, op.lora_panel + panel + (second ? num_panels(op.n) : 0), first, rows);
    }

    // Adds to x·Wᵀ + bias of row first + r.
    LLMB_INLINE void add(int r, Floats* y) const {
        if (!has_any_ || at_[r] == nullptr) return;
        for (int v = 0; v < kPanel / kLanes; v++) y[v] += load(at_[r] + v * kLanes);
    }

  private:
    void find(const LoraOp& op, int panel, int first, int rows) {
        const int32_t* places = op.step->place_of + first;
        has_any_ = true;
        for (int r = 0; r < rows; r++) at_[r] = places[r] < 0 ? nullptr : own_ + r * kPanel;
        if (!lora::has_delta(*op.step)) return expand(op, panel, places, rows);
        for (int r = 0; r < rows; r++) {
            if (places[r] < 0) continue;
            at_[r] = lora::delta_at(op, places[r], panel);
            for (int line = 0; line < kPanel; line += 16) __builtin_prefetch(at_[r] + line, 0, 3);
        }
    }

    // Handles runs of adjacent tokens with the same adapter together.
    void expand(const LoraOp& op, int panel, const int32_t* places, int rows) {
        const LoraStep& step = *op.step;
        const int layer = lora::layer_of(op, panel), of_layer = panel - op.first_panels[layer];
        for (int r = 0, end = 0; r < rows; r = end) {
            end = r + 1;
            if (places[r] < 0) continue;
            const int adapter = step.adapter_of[places[r]];
            while (end < rows && places[end] == places[end - 1] + 1 && step.adapter_of[places[end]] == adapter) end++;
            lora::expand_panels(op, step.adapters[adapter][op.first_layer + layer], lora::hidden_at(op, places[r], layer),
                                op.hidden_stride, end - r, of_layer, of_layer + 1, own_ + r * kPanel, 0);
        }
    }

    bool has_any_ = false;
    const float* at_[kLoraBlock];
    alignas(64) float own_[kLoraBlock * kPanel];
};

// Scratch memory per thread.
inline size_t lora_thread_bytes(const LoraOp& op) {
    return sizeof(float) * kLoraBlock * std::max(lora::widened_stride(op), static_cast<size_t>(op.max_rank));
}

inline size_t lora_scratch_bytes(const LoraOp& op, int num_threads) {
    return op.step->num_adapters == 0 ? 0 : lora_thread_bytes(op) * num_threads;
}

inline void multiply_loras(Worker& worker, const LoraOp& op, char* scratch) {
    if (op.step->num_adapters == 0) return;
    float* own = reinterpret_cast<float*>(scratch + lora_thread_bytes(op) * worker.rank);
    lora::shrink(worker, op, own);
    worker.barrier();
    if (lora::has_delta(*op.step)) lora::expand(worker, op, own);
    else lora::sum_all_splits(worker, op);
}

}  // namespace llmb
