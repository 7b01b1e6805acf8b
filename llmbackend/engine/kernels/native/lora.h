// LoRA adapters beside linear layers: x·downᵀ in an operation of its own, before the layers that have this input; times
// upᵀ where these end, with the row's sums in registers.
//
// For: the program's runner, and the ends of all linear layers (epilogue.h). Does not know: models, how layers multiply.
// Invariants: what is added to a row depends on that row and its adapter alone, in float32 whatever the layer's weights
// are; a row without an adapter, and a layer that its adapter does not change, are not touched.
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

constexpr int kRanks = 16;  // of `down` that lie together
constexpr int kChains = 4;  // of a sum over k: element k is added to chain k mod 4

// The weights of four neighbouring k, of the ranks of one vector.
inline void load_four(const float* w, Floats (&four)[kChains]) {
    for (int i = 0; i < kChains; i++) four[i] = load(w + i * kRanks);
}
inline void load_four(const bf16* w, Floats (&four)[kChains]) {
    for (int i = 0; i < 2; i++) {
        const Ints pairs = load_pairs(w + i * 2 * kRanks);
        four[2 * i] = even(pairs), four[2 * i + 1] = odd(pairs);
    }
}
// Elements from a rank to the one that is `ranks` after it.
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

// Columns begin..end-1 of a row as float32, filled up with zeros to whole vectors.
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

// Some tokens of one adapter, and one split of their columns.
struct Piece {
    const LoraOp& op;
    const LoraMatrices* layers;  // the adapter's, from the operation's first one on
    const int32_t* tokens;
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
            return op.hidden + static_cast<size_t>(tokens[row]) * op.hidden_stride +
                   (layer * op.num_splits + split) * op.max_rank + rank;
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

// The piece with this number. Neighbours in number have the same tokens.
inline Piece piece_of(const LoraOp& op, int number) {
    const LoraStep& step = *op.step;
    const int block = number / op.num_splits;
    const int32_t* after = std::upper_bound(step.blocks, step.blocks + step.num_adapters + 1, block);
    const int adapter = static_cast<int>(after - step.blocks) - 1;
    const int first = step.starts[adapter] + (block - step.blocks[adapter]) * kLoraBlock;
    const int count = std::min(kLoraBlock, step.starts[adapter + 1] - first);
    return {op, step.adapters[adapter] + op.first_layer, step.tokens + first, count, number % op.num_splits};
}

// Floats from row to row of the widened x: an odd number of cache lines.
inline size_t widened_stride(const LoraOp& op) { return (padded_k(op.split, 16) / 16 | 1) * 16; }

// The matrices of one layer for a row, and its sums over k; null: nothing is added.
struct Addend {
    const LoraMatrices* matrices = nullptr;
    const float* hidden = nullptr;
    int panel = 0;  // of the layer

    Addend(const LinearOp& op, int row, int panel, bool second) {
        const LoraOp& lora = *op.lora;
        const int adapter = lora.step->adapter_of[row];
        if (adapter < 0) return;
        const int number = op.lora_panel + panel + (second ? num_panels(op.n) : 0);
        int layer = lora.num_layers - 1;
        while (number < lora.first_panels[layer]) layer--;
        const LoraMatrices& found = lora.step->adapters[adapter][lora.first_layer + layer];
        if (found.rank == 0) return;
        matrices = &found;
        hidden = lora.hidden + static_cast<size_t>(row) * lora.hidden_stride +
                 static_cast<size_t>(layer) * lora.num_splits * lora.max_rank;
        this->panel = number - lora.first_panels[layer];
    }

    template <class W>
    const W* up() const {
        return static_cast<const W*>(matrices->up) + static_cast<size_t>(panel) * matrices->rank * kPanel;
    }
};

// Sums over even and over odd ranks.
struct Chains {
    Floats even, odd;
};

inline void add_ranks(Chains& sums, const float* up, int column, Floats first, Floats second) {
    sums.even = fma(first, load(up + column), sums.even);
    sums.odd = fma(second, load(up + kPanel + column), sums.odd);
}
inline void add_ranks(Chains& sums, const bf16* up, int column, Floats first, Floats second) {
    const Ints pairs = load_pairs(up + 2 * column);
    sums.even = fma(first, even(pairs), sums.even);
    sums.odd = fma(second, odd(pairs), sums.odd);
}

// y [kPanel / kLanes] += the sum of the splits times `up`.
template <class W>
void expand(const LoraOp& op, const Addend& addend, Floats* y) {
    constexpr int kVectors = kPanel / kLanes;
    const W* up = addend.up<W>();
    Chains sums[kVectors] = {};
    for (int rank = 0; rank < addend.matrices->rank; rank += kRanks) {
        alignas(64) float whole[kRanks];
        for (int v = 0; v < kRanks; v += kLanes) {
            Floats total = load(addend.hidden + rank + v);
            for (int split = 1; split < op.num_splits; split++) total += load(addend.hidden + split * op.max_rank + rank + v);
            store(whole + v, total);
        }
        for (int i = 0; i < kRanks; i += 2, up += 2 * kPanel)
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; v++) add_ranks(sums[v], up, v * kLanes, splat(whole[i]), splat(whole[i + 1]));
    }
    for (int v = 0; v < kVectors; v++) y[v] += sums[v].even + sums[v].odd;
}

inline bool adapts(const LinearOp& op) { return op.lora != nullptr && op.lora->step->num_adapters > 0; }

}  // namespace lora

// To x·Wᵀ + bias of one row and panel, of the second weight or of the first, what the row's adapter adds.
inline void add_lora(const LinearOp& op, int row, int panel, bool second, Floats* y) {
    if (!lora::adapts(op)) return;
    const lora::Addend addend(op, row, panel, second);
    if (addend.matrices == nullptr) return;
    if (op.lora->weight_type == Type::kFloat32) lora::expand<float>(*op.lora, addend, y);
    else lora::expand<bf16>(*op.lora, addend, y);
}

// Brings near what rows first..first+rows-1 will add to a panel, of both weights where there are two.
inline void fetch_lora(const LinearOp& op, int first, int rows, int panel) {
    if (!lora::adapts(op)) return;
    const int item_bytes = op.lora->weight_type == Type::kFloat32 ? 4 : 2;
    const int32_t* adapter_of = op.lora->step->adapter_of;
    for (int row = first; row < first + rows; row++) {
        if (row > first && adapter_of[row] == adapter_of[row - 1]) continue;
        for (int weight = 0; weight < (op.weight2 ? 2 : 1); weight++) {
            const lora::Addend addend(op, row, panel, weight == 1);
            if (addend.matrices == nullptr) continue;
            const int size = addend.matrices->rank * kPanel * item_bytes;
            const char* at = static_cast<const char*>(addend.matrices->up) + static_cast<size_t>(addend.panel) * size;
            for (int byte = 0; byte < size; byte += 64) __builtin_prefetch(at + byte, 0, 2);
        }
    }
}

inline size_t lora_scratch_bytes(const LoraOp& op, int num_threads) {
    return op.step->num_adapters == 0 ? 0 : sizeof(float) * kLoraBlock * lora::widened_stride(op) * num_threads;
}

inline void shrink_by_loras(Worker& worker, const LoraOp& op, char* scratch) {
    if (op.step->num_adapters == 0) return;
    const size_t stride = lora::widened_stride(op);
    float* x = reinterpret_cast<float*>(scratch) + kLoraBlock * stride * worker.rank;
    const int pieces = op.step->blocks[op.step->num_adapters] * op.num_splits;
    worker.share(pieces, 1, [&](int begin, int end) {
        for (int number = begin; number < end; number++) {
            const lora::Piece piece = lora::piece_of(op, number);
            for (int i = 0; i < piece.num_tokens; i++)
                lora::widen_row(op, piece.tokens[i], piece.begin(), piece.begin() + piece.k(), x + i * stride);
            if (op.weight_type == Type::kFloat32) piece.shrink<float>(x, stride);
            else piece.shrink<bf16>(x, stride);
        }
    });
}

}  // namespace llmb
