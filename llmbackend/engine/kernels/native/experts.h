// The linear layers of experts: rows sorted by expert times each expert's panels, by the kernels of linear layers.
//
// Used by the program's runner. Invariants: an output row depends only on its own row of x and its expert; all work of
// a layer is one list of tasks (expert, chunk of rows, panel), so threads share single rows of many experts as well as
// many rows of one, with one barrier.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "linear_float.h"
#include "linear_ggml.h"
#include "linear_int4.h"
#include "linear_int8.h"
#include "memory.h"
#include "step_experts.h"
#include "team.h"
#include "tile_panel.h"

namespace llmb {

namespace experts {

// The linear layer of one expert or head, whose y and quantised x start at place 0.
template <class Op>
LinearOp linear_of(const Op& op, int expert) {
    LinearOp linear = op.linear;
    const auto move = [&](auto& pointer, int64_t bytes) {
        using Pointer = std::remove_reference_t<decltype(pointer)>;
        if (pointer) pointer = reinterpret_cast<Pointer>(reinterpret_cast<const char*>(pointer) + expert * bytes);
    };
    move(linear.weight, op.weight_bytes), move(linear.weight2, op.weight_bytes);
    move(linear.scale, op.scale_bytes), move(linear.scale2, op.scale_bytes);
    move(linear.sums, op.sums_bytes), move(linear.sums2, op.sums_bytes);
    const int64_t bias_bytes = static_cast<int64_t>(sizeof(float)) * linear.n;
    move(linear.bias, bias_bytes), move(linear.bias2, bias_bytes);
    return linear;
}

// The same layer with only this row of x, whatever its index.
inline LinearOp with_row(const LinearOp& linear, int row) {
    LinearOp own = linear;
    const int64_t size = linear.x_type == Type::kFloat32 ? sizeof(float) : sizeof(bf16);
    own.x = static_cast<const char*>(linear.x) + size * row * linear.x_stride;
    own.x_stride = 0;
    return own;
}

// Copies a quantised row from place to place.
template <class Order>
void copy_row(int8::QuantisedRows<Order>& x, int from, int to) {
    std::memcpy(x.data + to * x.stride, x.data + from * x.stride, x.stride * sizeof(typename Order::Stored));
    x.scale[to] = x.scale[from];
    x.num_wide[to] = x.num_wide[from];
    const size_t wide_bytes = x.num_wide[from] * sizeof(int8::Wide);
    std::memcpy(x.wide + static_cast<size_t>(to) * x.most_wide, x.wide_of(from), wide_bytes);
}
inline void copy_sums(int32_t* sums, size_t per_row, int from, int to) {
    std::memcpy(sums + to * per_row, sums + from * per_row, per_row * sizeof(int32_t));
}

// The interface of each kind of weights: the rows of all places, and products of some of them with an expert's panels.
struct Int8Kind {
    int8::VectorRows x;
    int chunk_rows, sums_rows;
    int32_t* sums;  // this thread's

    Int8Kind(const LinearOp& op, int places, Carver& memory, int rank, int num_threads)
        : x(memory, places, op.k) {
        chunk_rows = int8::Plan::most_rows(op.k);
        sums_rows = int8::Plan::rows_of_sums(op.k, chunk_rows);
        const size_t own = static_cast<size_t>(2) * sums_rows * kPanel;
        sums = memory.take<int32_t>(own * num_threads) + own * rank;
    }
    void fill(const LinearOp& row, int place) { x.fill(row, place); }
    void copy(int from, int to) { copy_row(x, from, to); }
    void run(const LinearOp& linear, int first, int last, int begin, int end) const {
        const int8::Product product{linear, x, sums, sums_rows, is_gated(linear.epilogue) ? 2 : 1};
        for (int panel = begin; panel < end; panel++) product.run(first, last, panel, std::min(panel + 1, end - 1));
    }
};

struct Int4Kind {
    int4::GroupedRows x;
    int chunk_rows;

    Int4Kind(const LinearOp& op, int places, Carver& memory, int rank, int num_threads) : x(memory, places, op.k) {
        chunk_rows = int4::most_rows(op.k);
        const size_t own = op.order ? int4::padded_k(op.k) : 0;
        x.ordered = memory.take<float>(own * num_threads) + own * rank;
    }
    void fill(const LinearOp& row, int place) { x.fill(row, place); }
    void copy(int from, int to) {
        copy_row(x, from, to);
        copy_sums(x.begins, x.groups, from, to);
    }
    void run(const LinearOp& linear, int first, int last, int begin, int end) const {
        const int4::Product product{linear, x};
        for (int panel = begin; panel < end; panel++) product.run(first, last, panel);
    }
};

struct GgmlKind {
    ggml::Rows x;
    int chunk_rows;

    GgmlKind(const LinearOp& op, int places, Carver& memory, int, int) : x(memory, places, op) {
        chunk_rows = ggml::most_rows(op.k);
    }
    void fill(const LinearOp& row, int place) { x.fill(row, place); }
    void copy(int from, int to) {
        copy_row(x, from, to);
        copy_sums(x.sums, x.per_row, from, to);
        if (x.shorts) std::memcpy(x.shorts + to * x.stride, x.shorts + from * x.stride, x.stride * sizeof(int16_t));
    }
    void run(const LinearOp& linear, int first, int last, int begin, int end) const {
        const ggml::Product product{linear, x, ggml::Kernel::of(linear.weight_type)};
        for (int panel = begin; panel < end; panel++) product.run(first, last, panel);
    }
};

// Unquantised rows.
template <class X>
struct FloatRows {
    X* data;
    int64_t stride;

    FloatRows(int64_t stride, int places, Carver& memory)
        : data(memory.take<X>(static_cast<size_t>(places + kRowsRead) * stride)), stride(stride) {}
    void fill(const LinearOp& row, int place) {
        X* to = data + place * stride;
        if (row.x_type != Type::kFloat32) {
            for (int i = 0; i < row.k; i++) set(to[i], to_float(static_cast<const bf16*>(row.x)[i]));
            return;
        }
        const float* from = static_cast<const float*>(row.x);
        int i = 0;
        for (; i + kLanes <= row.k; i += kLanes) store(to + i, load(from + i));
        for (; i < row.k; i++) set(to[i], from[i]);
    }
    void copy(int from, int to) { std::memcpy(data + to * stride, data + from * stride, stride * sizeof(X)); }
};

// Unquantised weights. X: type of the multiplied rows.
template <class X, class W>
struct FloatKind : FloatRows<X> {
    float* sums;  // this thread's
    int chunk_rows = panels::kChunkRows;

    FloatKind(const LinearOp& op, int places, Carver& memory, int rank, int num_threads)
        : FloatRows<X>(panels::widened_stride(op.k), places, memory) {
        const size_t own = panels::sums_bytes(std::min(places, chunk_rows)) / sizeof(float);
        sums = memory.take<float>(own * num_threads) + own * rank;
    }
    void run(const LinearOp& linear, int first, int last, int begin, int end) const {
        const panels::RowsOf<X> x{this->data + first * this->stride, this->stride};
        panels::linear_piece(linear, panels::Chunk<X, W>{x, last - first, linear.k}, first, begin, end, sums);
    }
};

#if defined(LLMB_HAS_TILES)

// bfloat16 weights on tiles, for any number of rows. Rows are rounded and padded with zeros to whole tiles.
struct TiledBfloat16Kind : FloatRows<bf16> {
    tile::PanelSums sums;
    int chunk_rows = sums.rows;

    // An odd number of cache lines, as of VectorOrder.
    static int64_t stride_of(int k) { return (divide_up(k, tile::Bfloat16::kDepth) | 1) * tile::Bfloat16::kDepth; }
    TiledBfloat16Kind(const LinearOp& op, int places, Carver& memory, int rank, int num_threads)
        : FloatRows(stride_of(op.k), places, memory), sums(places, stride * sizeof(bf16), memory, rank, num_threads) {}
    void fill(const LinearOp& row, int place) {
        FloatRows::fill(row, place);
        std::fill(data + place * stride + row.k, data + (place + 1) * stride, bf16{});
    }
    void run(const LinearOp& linear, int first, int last, int begin, int end) const {
        const tile::WholeRows x{static_cast<ptrdiff_t>(stride * sizeof(bf16)), reinterpret_cast<const char*>(data + first * stride)};
        const auto of = [&](bool second) { return reinterpret_cast<const float*>(sums.of(second)); };
        tile::PanelProduct<tile::Bfloat16>{linear, x, last - first, sums}.run(begin, end, [&](int panel) {
            finish_panel(linear, panel, first, last - first, of(false), of(true));
        });
    }
};

#endif

#if defined(LLMB_HAS_TILES) && defined(LLMB_HAS_VNNI)

// int8 on tiles, which read the same rows as vectors. Sums are exact, so the number of rows may decide: few would leave
// tiles mostly empty.
struct TiledInt8Kind : Int8Kind {
    tile::PanelSums tile_sums;

    TiledInt8Kind(const LinearOp& op, int places, Carver& memory, int rank, int num_threads)
        : Int8Kind(op, places, memory, rank, num_threads), tile_sums(places, x.stride, memory, rank, num_threads) {
        chunk_rows = tile_sums.rows;
    }
    void run(const LinearOp& linear, int first, int last, int begin, int end) const {
        if (last - first <= panels::kFewRows) return Int8Kind::run(linear, first, last, begin, end);
        const tile::WholeRows rows{static_cast<ptrdiff_t>(x.stride), reinterpret_cast<const char*>(x.data + first * x.stride)};
        auto* own = reinterpret_cast<int32_t*>(tile_sums.first);
        const bool two = is_gated(linear.epilogue);
        const int8::Product product{linear, x, own, tile_sums.rows, two ? 2 : 1};
        tile::PanelProduct<tile::Int8>{linear, rows, last - first, tile_sums}.run(begin, end, [&](int panel) {
            const int8::Columns columns(linear, false, panel, int8::kOffset), columns2(linear, two, panel, int8::kOffset);
            for (int row = first; row < last; row++)
                product.finish(row, panel, columns, columns2, own + (row - first) * kPanel, [](bool, PanelRow&) {});
        });
    }
};

#else

using TiledInt8Kind = Int8Kind;

#endif

// A thread's position in the list of tasks.
class Cursor {
  public:
    Cursor(const ExpertsOp& op, int chunk_rows) : op_(op), chunk_rows_(chunk_rows), panels_(num_panels(op.linear.n)) {}

    int count() const {
        int tasks = 0;
        for (int expert = 0; expert < op_.num_experts; expert++) tasks += tasks_of(expert);
        return tasks;
    }

    // Calls run(expert, first place, last place, first panel, last panel) for tasks begin..end-1; begin never
    // decreases.
    template <class Run>
    void tasks(int begin, int end, Run&& run) {
        while (begin < end) {
            while (begin - before_ >= tasks_of(expert_)) before_ += tasks_of(expert_++);
            const int chunk = (begin - before_) / panels_, panel = (begin - before_) % panels_;
            const int count = std::min(end - begin, panels_ - panel);
            const int first = op_.first[expert_] + chunk * chunk_rows_;
            run(expert_, first, std::min(first + chunk_rows_, op_.first[expert_ + 1]), panel, panel + count);
            begin += count;
        }
    }

  private:
    int tasks_of(int expert) const { return divide_up(op_.first[expert + 1] - op_.first[expert], chunk_rows_) * panels_; }

    const ExpertsOp& op_;
    const int chunk_rows_, panels_;
    int expert_ = 0;
    int before_ = 0;  // tasks of the preceding experts
};

constexpr int kPieceBytes = 256 << 10;  // approximate size of the weights that a thread takes at a time
constexpr int kMostPanels = panels::kPiecePanels;

// Panels per piece.
template <class Op>
int grain_of(const Op& op) {
    return std::clamp(static_cast<int>(kPieceBytes / (op.weight_bytes / num_panels(op.linear.n))), 1, kMostPanels);
}

// The expert to which this place belongs.
inline int expert_of(const ExpertsOp& op, int place) {
    return static_cast<int>(std::upper_bound(op.first, op.first + op.num_experts + 1, place) - op.first) - 1;
}

// This row in the order of the weights of the place's expert.
template <class Kind>
void fill_place(const ExpertsOp& op, Kind& kind, int row, int place) {
    LinearOp own = with_row(op.linear, row);
    if (own.order) own.order += static_cast<int64_t>(expert_of(op, place)) * own.k;
    kind.fill(own, place);
}

template <class Kind>
void fill_rows(Worker& worker, const ExpertsOp& op, const Step& step, Kind& kind) {
    const int rows = step.num_tokens * (op.places ? 1 : op.top_k);
    worker.share(rows, std::max(1, rows / (4 * worker.size)), [&](int begin, int end) {
        for (int row = begin; row < end; row++) {
            if (op.places == nullptr) {
                fill_place(op, kind, row, row);
                continue;
            }
            const int32_t* places = op.places + static_cast<int64_t>(row) * op.top_k;
            fill_place(op, kind, row, places[0]);
            for (int rank = 1; rank < op.top_k; rank++) {
                if (op.linear.order) fill_place(op, kind, row, places[rank]);
                else kind.copy(places[0], places[rank]);
            }
        }
    });
    worker.barrier();
}

template <class Kind>
void run(Worker& worker, const ExpertsOp& op, const Step& step, char* scratch) {
    Carver memory(scratch);
    Kind kind(op.linear, step.num_tokens * op.top_k, memory, worker.rank, worker.size);
    fill_rows(worker, op, step, kind);
    Cursor cursor(op, kind.chunk_rows);
    worker.share(cursor.count(), grain_of(op), [&](int begin, int end) {
        cursor.tasks(begin, end, [&](int expert, int first, int last, int panel, int panel_end) {
            kind.run(linear_of(op, expert), first, last, panel, panel_end);
        });
    });
}

template <class Kind>
size_t scratch_bytes(const ExpertsOp& op, const Step& step, int num_threads) {
    Carver counted(nullptr);
    const Kind kind(op.linear, step.num_tokens * op.top_k, counted, 0, num_threads);
    return counted.used();
}

// Calls f with the kind of these weights.
template <class F>
auto with_kind(Type type, F&& f) {
    if (is_ggml(type)) return f.template operator()<GgmlKind>();
    if (is_int4(type)) return f.template operator()<Int4Kind>();
    if (type == Type::kInt8) return f.template operator()<TiledInt8Kind>();
    if (type == Type::kFloat32) return f.template operator()<FloatKind<float, float>>();
#if defined(LLMB_HAS_TILES)
    return f.template operator()<TiledBfloat16Kind>();
#elif defined(LLMB_BF16_DOTS)
    return f.template operator()<FloatKind<bf16, bf16>>();
#else
    return f.template operator()<FloatKind<float, bf16>>();
#endif
}

}  // namespace experts

inline size_t experts_scratch_bytes(const ExpertsOp& op, const Step& step, int num_threads) {
    return experts::with_kind(op.linear.weight_type, [&]<class Kind>() { return experts::scratch_bytes<Kind>(op, step, num_threads); });
}

inline void multiply_experts(Worker& worker, const ExpertsOp& op, const Step& step, char* scratch) {
    experts::with_kind(op.linear.weight_type, [&]<class Kind>() { experts::run<Kind>(worker, op, step, scratch); });
}

}  // namespace llmb
