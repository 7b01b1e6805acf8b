// A linear layer per head: the rows of all heads times each head's panels, by the kernels of experts.
//
// Used by the program's runner. Invariant: the result of a head's row depends only on that row; its arithmetic is that
// of an expert's linear layer.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "experts.h"
#include "memory.h"
#include "step_heads.h"
#include "team.h"
#include "tile_rows.h"

namespace llmb {

namespace heads {

// Places per head, one for each token: whole tiles of rows, so that y of a head can start at place 0.
inline int places_of(const Step& step) { return padded_k(step.num_tokens, amx::kTileRows); }

// A single token's part of x for a head.
inline LinearOp row_of(const HeadsOp& op, int token, int head) {
    LinearOp linear = experts::with_row(op.linear, token);
    linear.x = static_cast<const float*>(linear.x) + static_cast<int64_t>(head) * op.x_step;
    return linear;
}

// The linear layer of one head, whose y and x start at place 0.
inline LinearOp linear_of(const HeadsOp& op, int head, int places) {
    LinearOp linear = experts::linear_of(op, head);
    const bool is_tiled = linear.y_type == Type::kBfloat16Tiles;
    const int64_t column = static_cast<int64_t>(head) * op.y_step * (is_tiled ? amx::kTileRows : 1);
    const int64_t before = static_cast<int64_t>(head) * places * linear.y_stride;
    linear.y = static_cast<char*>(linear.y) + (column - before) * (linear.y_type == Type::kFloat32 ? sizeof(float) : sizeof(bf16));
    return linear;
}

template <class Kind>
Kind kind_of(const HeadsOp& op, const Step& step, Carver& memory, int rank, int num_threads) {
    return Kind(op.linear, places_of(step) * op.num_heads, memory, rank, num_threads);
}

template <class Kind>
void run(Worker& worker, const HeadsOp& op, const Step& step, char* scratch) {
    Carver memory(scratch);
    Kind kind = kind_of<Kind>(op, step, memory, worker.rank, worker.size);
    const int tokens = step.num_tokens, places = places_of(step), rows = tokens * op.num_heads;
    worker.share(rows, std::max(1, rows / (4 * worker.size)), [&](int begin, int end) {
        for (int i = begin; i < end; i++) {
            const int head = i % op.num_heads, token = i / op.num_heads;
            kind.fill(row_of(op, token, head), head * places + token);
        }
    });
    worker.barrier();
    const int panels = num_panels(op.linear.n), chunks = divide_up(tokens, kind.chunk_rows);
    worker.share(op.num_heads * chunks * panels, experts::grain_of(op), [&](int begin, int end) {
        for (int i = begin, count; i < end; i += count) {
            const int panel = i % panels, chunk = i / panels % chunks, head = i / panels / chunks;
            count = std::min(end - i, panels - panel);
            const int first = chunk * kind.chunk_rows, last = std::min(first + kind.chunk_rows, tokens);
            kind.run(linear_of(op, head, places), head * places + first, head * places + last, panel, panel + count);
        }
    });
}

}  // namespace heads

inline size_t heads_scratch_bytes(const HeadsOp& op, const Step& step, int num_threads) {
    return experts::with_kind(op.linear.weight_type, [&]<class Kind>() {
        Carver counted(nullptr);
        heads::kind_of<Kind>(op, step, counted, 0, num_threads);
        return counted.used();
    });
}

inline void multiply_heads(Worker& worker, const HeadsOp& op, const Step& step, char* scratch) {
    experts::with_kind(op.linear.weight_type, [&]<class Kind>() { heads::run<Kind>(worker, op, step, scratch); });
}

}  // namespace llmb
