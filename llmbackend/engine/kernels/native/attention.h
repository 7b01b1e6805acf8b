// Causal attention over paged keys and values for a ragged batch: the step's tasks, shared by the team.
//
// Used by the step's program. attention_plan.h divides a step into tasks; attention_vector.h and attention_amx.h
// compute them. Invariant: results do not depend on which worker computes a task.
#pragma once

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "amx.h"
#include "attention_amx.h"
#include "attention_plan.h"
#include "attention_softmax.h"
#include "attention_vector.h"
#include "memory.h"
#include "numbers.h"
#include "step.h"
#include "team.h"
#include "tile_rows.h"

namespace llmb {

// Rows of each part of a cut task: few if the step decodes, even where a context has many parts.
template <class Kernel>
inline size_t rows_per_part(const AttentionOp& op, const Plan& plan) {
    return Kernel::padded_rows(plan.most_cut_queries * group_size(op));
}

template <class Kernel>
inline SoftmaxState take_state(const AttentionOp& op, size_t rows, Carver& memory) {
    const int width = Kernel::value_width(op);
    return {memory.take<float>(rows * kLanes), memory.take<float>(rows), memory.take<float>(rows * width), width};
}

// The memory of one worker.
template <class Kernel>
struct WorkerMemory {
    WorkerMemory(const AttentionOp& op, const Plan& plan, Carver& memory)
        : tasks(memory.take<Task>(plan.num_tasks)), cut(memory.take<CutTask>(plan.num_cut)),
          first(memory.take<int32_t>(task_rows(op))), last(memory.take<int32_t>(task_rows(op))),
          slopes(memory.take<float>(task_rows(op))),
          state(take_state<Kernel>(op, Kernel::padded_rows(task_rows(op)), memory)),
          total(take_state<Kernel>(op, Kernel::padded_rows(task_rows(op)), memory)), kernel(op, task_rows(op), memory) {}

    static size_t bytes(const AttentionOp& op, const Plan& plan) {
        Carver counted(nullptr);
        const WorkerMemory memory(op, plan, counted);
        return counted.used();
    }

    Task* const tasks;
    CutTask* const cut;
    int32_t* const first;
    int32_t* const last;
    float* const slopes;
    const SoftmaxState state;  // of the partition being visited
    const SoftmaxState total;  // of the previous ones
    Kernel kernel;
};

// Computes tasks, one after the other, with one worker's memory.
template <class Kernel>
class TaskRunner {
    using T = typename Kernel::Element;

  public:
    TaskRunner(const AttentionOp& op, const Step& step, const Places& places, const SoftmaxState& parts,
               size_t rows_per_part, WorkerMemory<Kernel>& memory)
        : op_(op), step_(step), places_(places), parts_(parts), rows_per_part_(rows_per_part), memory_(memory),
          ahead_(op, places), group_(group_size(op)) {}

    // next: the task that this worker will probably run afterwards, or null.
    void run(const Task& task, const Task* next) {
        num_rows_ = task.num_queries * group_;
        memory_.kernel.begin(num_rows_);
        place_queries(task);
        ahead_.begin(task, next);
        state_ = task.part == kWhole ? memory_.state : part(task.part);
        clear_state(state_, num_rows_);
        bool merged = false;
        for (int at = task.key_begin; at < task.key_end; at += kChunk) {
            if (at % kPartition == 0 && at > task.key_begin) finish_partition(merged);
            memory_.kernel.visit(chunk_at(task, at), {num_rows_, memory_.first, memory_.last, memory_.slopes, state_});
        }
        if (merged) finish_partition(merged);
        if (task.part == kWhole) write_out(task, merged ? memory_.total : state_);
    }

    // Combines the parts of a task.
    void join(const CutTask& cut) {
        num_rows_ = cut.task.num_queries * group_;
        clear_state(memory_.total, num_rows_);
        for (int i = 0; i < cut.num_parts; i++) merge(part(cut.first_part + i));
        write_out(cut.task, memory_.total);
    }

  private:
    SoftmaxState part(int index) const { return parts_.from(index * rows_per_part_); }

    const float* query(const Task& task, int row) const {
        const size_t token = step_.query_start[task.row] + task.first_query + row / group_;
        return op_.q + token * op_.q_stride + head(task, row) * (op_.head_dim + op_.q_gap);
    }

    int head(const Task& task, int row) const { return task.kv_head * group_ + row % group_; }

    // Row r of the task is head r % group of query r / group.
    void place_queries(const Task& task) {
        const int start = places_.position(task.row, task.first_query);
        for (int r = 0; r < num_rows_; r++) {
            memory_.last[r] = start + r / group_;
            memory_.first[r] = places_.oldest_seen(memory_.last[r]);
            memory_.slopes[r] = op_.slopes ? op_.slopes[head(task, r)] : 0.0f;
            memory_.kernel.place_query(r, query(task, r));
        }
    }

    Chunk<T> chunk_at(const Task& task, int start) {
        Chunk<T> chunk{};
        chunk.start = start;
        const Range subs = places_.seen_of(task, start);
        for (int sub = subs.begin; sub < subs.end; sub++) {
            const int position = start + sub * kSubBlock, offset = position % op_.block_size;
            const size_t slab = places_.slab(task, position);
            chunk.keys[sub] = static_cast<const T*>(op_.keys) + slab + kColumnStep<T> * offset;
            if (op_.values)
                chunk.values[sub] = static_cast<const T*>(op_.values) + slab + static_cast<size_t>(offset) * op_.head_dim;
        }
        for (int sub = subs.begin; sub < subs.end; sub++) chunk.ahead_of_keys[sub] = ahead_.next();
        for (int sub = subs.begin; sub < subs.end; sub++)
            chunk.ahead_of_values[sub] = op_.values ? ahead_.next() : chunk.ahead_of_keys[sub];
        return chunk;
    }

    // Merges the result of the last partition into the total.
    void finish_partition(bool& merged) {
        if (!merged) clear_state(memory_.total, num_rows_);
        merged = true;
        merge(state_);
        clear_state(state_, num_rows_);
    }

    void merge(const SoftmaxState& part) const {
        for (int r = 0; r < num_rows_; r++) merge_row(memory_.total, part, r);
    }

    void write_out(const Task& task, const SoftmaxState& state) const {
        for (int r = 0; r < num_rows_; r++) {
            const int token = step_.query_start[task.row] + task.first_query + r / group_;
            const int column = head(task, r) * value_dim(op_);
            const size_t at = static_cast<size_t>(token) * op_.out_stride + column;
            const float factor = normaliser(state, r, op_.sinks ? op_.sinks + head(task, r) : nullptr);
            const float* weighted = state.weighted + static_cast<size_t>(r) * state.width;
            if (op_.out_type == Type::kBfloat16Tiles)
                write_row(TileRow<bf16>(static_cast<bf16*>(op_.out), token, op_.out_stride), column, weighted, factor);
            else if (op_.out_type == Type::kBfloat16) write_row(static_cast<bf16*>(op_.out) + at, 0, weighted, factor);
            else write_row(static_cast<float*>(op_.out) + at, 0, weighted, factor);
        }
    }

    // Writes a row from `column` on; the row is a pointer or a row of tiles. Adding plus zero turns -0 into 0, because
    // a sum of zeros may be either.
    template <class Row>
    void write_row(Row row, int column, const float* weighted, float factor) const {
        const int dim = value_dim(op_);
        int d = 0;
        if (dim % kLanes == 0)  // then no vector crosses a tile border
            for (; d < dim; d += kLanes) store(row + (column + d), load(weighted + d) * factor + 0.0f);
        for (; d < dim; d++) set(row[column + d], weighted[d] * factor + 0.0f);
    }

    const AttentionOp& op_;
    const Step& step_;
    const Places& places_;
    const SoftmaxState parts_;
    const size_t rows_per_part_;
    WorkerMemory<Kernel>& memory_;
    LookAhead<T> ahead_;
    const int group_;
    SoftmaxState state_{};
    int num_rows_ = 0;
};

template <class Kernel>
inline void attend(Worker& worker, const AttentionOp& given, const Step& step, char* scratch) {
    const AttentionOp op = with_heads_shared(given, step, worker.size);
    const Places places(op, step);
    const Plan plan = plan_tasks(places, worker.size);
    Carver shared(scratch);
    const size_t part_rows = rows_per_part<Kernel>(op, plan);
    const SoftmaxState parts = take_state<Kernel>(op, part_rows * plan.num_parts, shared);
    Carver own(scratch + shared.used() + worker.rank * WorkerMemory<Kernel>::bytes(op, plan));
    WorkerMemory<Kernel> memory(op, plan, own);
    list_tasks(places, plan, memory.tasks, memory.cut);
    TaskRunner<Kernel> runner(op, step, places, parts, part_rows, memory);
    // With many tasks, a worker takes several at a time: it then knows what comes next, and prefetches its first keys.
    const int grain = plan.num_tasks >= 32 * worker.size ? 4 : 1;
    tiles_begin();
    worker.share(plan.num_tasks, grain, [&](int begin, int end) {
        for (int i = begin; i < end; i++) {
            // By the end of this piece, the other workers will probably have taken one each.
            const int next = i + 1 < end ? i + 1 : end + grain * (worker.size - 1);
            runner.run(memory.tasks[i], next < plan.num_tasks ? memory.tasks + next : nullptr);
        }
    });
    tiles_end();
    if (plan.num_cut == 0) return;
    worker.barrier();
    worker.share(plan.num_cut, 1, [&](int begin, int) { runner.join(memory.cut[begin]); });
}

// Calls f with the identity of the kernel that computes the operation: one per type, whatever the batch.
template <class F>
inline auto with_kernel(const AttentionOp& op, F&& f) {
#if defined(LLMB_FIXED_POINT_KV)
    if (op.kv_type == Type::kFixed16) return f(std::type_identity<VectorKernel<fixed16>>{});
#endif
#if defined(LLMB_HAS_TILES)
    using Bfloat16Kernel = TileKernel;
#else
    using Bfloat16Kernel = VectorKernel<bf16>;
#endif
    if (op.kv_type == Type::kBfloat16) return f(std::type_identity<Bfloat16Kernel>{});
    return f(std::type_identity<VectorKernel<float>>{});
}

inline size_t attention_scratch_bytes(const AttentionOp& given, const Step& step, int num_threads) {
    const AttentionOp op = with_heads_shared(given, step, num_threads);
    const Plan plan = plan_tasks(Places(op, step), num_threads);
    return with_kernel(op, [&]<class Kernel>(std::type_identity<Kernel>) {
        Carver shared(nullptr);
        take_state<Kernel>(op, rows_per_part<Kernel>(op, plan) * plan.num_parts, shared);
        return shared.used() + num_threads * WorkerMemory<Kernel>::bytes(op, plan);
    });
}

inline void attention(Worker& worker, const AttentionOp& op, const Step& step, char* scratch) {
    with_kernel(op, [&]<class Kernel>(std::type_identity<Kernel>) { attend<Kernel>(worker, op, step, scratch); });
}

}  // namespace llmb
