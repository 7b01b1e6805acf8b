// A step's attention as a list of tasks, and where their keys and values are.
//
// Used by attention.h. Invariant: the list depends only on the step and the size of the team, so every worker makes the
// same one; results do not depend on it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "attention_softmax.h"
#include "step.h"

namespace llmb {

constexpr int kTaskRows = 192;  // queries times heads: enough for good reuse of cached data
constexpr int kMaxTaskQueries = 64;
constexpr int kWhole = -1;

// Some adjacent queries of a row, and the query heads of one KV head.
struct Task {
    int32_t row;
    int32_t kv_head;
    int32_t first_query;  // within the row's queries
    int32_t num_queries;
    int32_t key_begin;  // the visited positions; a multiple of kChunk
    int32_t key_end;
    int32_t part;  // kWhole, or the index of this part among those of cut tasks
};

// A task computed partition by partition, as parts first_part..first_part + num_parts - 1.
struct CutTask {
    Task task;
    int32_t first_part;
    int32_t num_parts;
};

// Distance in elements between adjacent columns of a matrix of row pairs: bf16 [n/2][width][2], float [n][width].
template <class T>
constexpr int kColumnStep = sizeof(T) == 2 ? 2 : 1;

// Where the positions of one chunk are, and which sub-blocks' memory to prefetch during the scores and values of each
// sub-block. Only sub-blocks that some row of the task attends to are filled in.
template <class T>
struct Chunk {
    int start;  // absolute position
    const T* keys[kChunkBlocks];
    const T* values[kChunkBlocks];
    const char* ahead_of_keys[kChunkBlocks];
    const char* ahead_of_values[kChunkBlocks];
};

// Memory that will be needed soon, prefetched line by line during the arithmetic.
struct Ahead {
    const char* next;
    int step;  // bytes; 0 = nothing to prefetch

    void fetch() {
        for (int line = 0; line < step; line += 64) __builtin_prefetch(next + line);
        next += step;
    }
};

inline int group_size(const AttentionOp& op) { return op.num_heads / op.num_kv_heads; }

// Dimensions of a head's output.
inline int value_dim(const AttentionOp& op) { return op.values ? op.head_dim : op.value_dim; }

inline int task_queries(const AttentionOp& op) { return std::clamp(kTaskRows / group_size(op), 1, kMaxTaskQueries); }

// Maximum number of rows.
inline int task_rows(const AttentionOp& op) { return task_queries(op) * group_size(op); }

// Which positions tasks attend to, and where those are.
class Places {
  public:
    Places(const AttentionOp& op, const Step& step) : op_(op), step_(step) {}

    int num_queries(int row) const { return step_.query_start[row + 1] - step_.query_start[row]; }

    int position(int row, int query) const { return step_.seq_lens[row] - num_queries(row) + query; }

    int oldest_seen(int position) const { return op_.window > 0 ? std::max(0, position - op_.window + 1) : 0; }

    // Calls f for every task of the step, before cutting.
    template <class F>
    void each_task(F&& f) const {
        const int size = task_queries(op_);
        for (int row = 0; row < step_.num_rows; row++)
            for (int kv_head = 0; kv_head < op_.num_kv_heads; kv_head++)
                for (int first = 0; first < num_queries(row); first += size)
                    f(task(row, kv_head, first, std::min(size, num_queries(row) - first)));
    }

    // The sub-blocks of the chunk at `start` that some query of the task attends to.
    Range seen_of(const Task& task, int start) const {
        const int oldest = oldest_seen(position(task.row, task.first_query)) - start, seen = task.key_end - start;
        return {std::max(0, oldest / kSubBlock), std::min(kChunkBlocks, (seen + kSubBlock - 1) / kSubBlock)};
    }

    // The memory of a position's block for the task's head, as an element offset.
    size_t slab(const Task& task, int position) const {
        const size_t block =
            step_.block_table[static_cast<size_t>(task.row) * step_.block_table_stride + position / op_.block_size];
        const size_t slab = op_.values ? block * op_.num_kv_heads + task.kv_head : block;
        return slab * op_.head_dim * op_.block_size;
    }

  private:
    Task task(int row, int kv_head, int first, int count) const {
        const int begin = position(row, first);
        return {row, kv_head, first, count, oldest_seen(begin) / kChunk * kChunk, begin + count, kWhole};
    }

    const AttentionOp& op_;
    const Step& step_;
};

inline int64_t cost(const Task& task) { return int64_t{task.key_end - task.key_begin} * task.num_queries; }

inline int count_partitions(const Task& task) {
    return (task.key_end - 1) / kPartition - task.key_begin / kPartition + 1;
}

// How many tasks there are, and which are so long that one worker would finish after the others.
struct Plan {
    int num_tasks = 0;
    int num_parts = 0;
    int num_cut = 0;
    int most_cut_queries = 0;  // of a cut task
    int64_t longest = INT64_MAX;

    bool cuts(const Task& task) const { return cost(task) > longest && count_partitions(task) > 1; }
};

inline Plan plan_tasks(const Places& places, int num_threads) {
    Plan plan;
    int64_t total = 0;
    places.each_task([&](const Task& task) { total += cost(task); });
    if (num_threads > 1) plan.longest = total / (4 * num_threads);
    places.each_task([&](const Task& task) {
        const int parts = plan.cuts(task) ? count_partitions(task) : 0;
        plan.num_parts += parts;
        plan.num_cut += parts > 0;
        if (parts > 0) plan.most_cut_queries = std::max(plan.most_cut_queries, task.num_queries);
        plan.num_tasks += std::max(parts, 1);
    });
    return plan;
}

// Cuts a task at partition borders, appending to the list; returns its new end.
inline Task* cut_task(const Task& task, int first_part, Task* end) {
    for (int begin = task.key_begin; begin < task.key_end; end++) {
        const int stop = std::min((begin / kPartition + 1) * kPartition, task.key_end);
        *end = task;
        end->key_begin = begin;
        end->key_end = stop;
        end->part = first_part++;
        begin = stop;
    }
    return end;
}

// If values are parts of keys, all heads share one KV head. With few tasks, it counts as several, so that each worker
// has a task. With fewer heads per task, making rows of values would take longer than multiplying by them.
inline AttentionOp with_heads_shared(AttentionOp op, const Step& step, int num_threads) {
    constexpr int kLeastHeads = 4;
    const auto count = [&] {
        int tasks = 0;
        Places(op, step).each_task([&](const Task&) { tasks++; });
        return tasks;
    };
    while (!op.values && group_size(op) % 2 == 0 && group_size(op) > kLeastHeads && count() < num_threads) op.num_kv_heads *= 2;
    return op;
}

// Fills in the plan; long tasks come first, so all workers finish at about the same time.
inline void list_tasks(const Places& places, const Plan& plan, Task* tasks, CutTask* cut) {
    Task* end = tasks;
    int part = 0;
    places.each_task([&](const Task& task) {
        if (!plan.cuts(task)) {
            *end++ = task;
            return;
        }
        *cut = {task, part, count_partitions(task)};
        end = cut_task(task, part, end);
        part += cut++->num_parts;
    });
    const auto longer = [](const Task& a, const Task& b) { return cost(a) > cost(b); };
    if (!std::is_sorted(tasks, end, longer)) std::stable_sort(tasks, end, longer);
}

// The sub-blocks of keys and values in the order in which they will be read, some of them ahead of the arithmetic and
// into the next task: blocks are scattered, so the CPU cannot prefetch them by itself.
template <class T>
class LookAhead {
  public:
    LookAhead(const AttentionOp& op, const Places& places) : op_(op), places_(places) {}

    // `task` is computed now and `following`, which may be null, probably afterwards.
    void begin(const Task& task, const Task* following) {
        following_ = following;
        if (task_ == &task) return;
        enter(&task);
        const int slab_bytes = kSubBlock * op_.head_dim * static_cast<int>(sizeof(T));
        for (int i = std::max(1, kDistanceBytes / slab_bytes); i > 0; i--) next();
    }

    // The start of the next kSubBlock positions of memory to be read; if there is none, any existing address, because
    // the CPU searches page tables in vain for others.
    const char* next() {
        if (task_ == nullptr) return static_cast<const char*>(op_.keys);
        const int position = start_ + sub_ * kSubBlock;
        const size_t at = places_.slab(*task_, position) + static_cast<size_t>(position % op_.block_size) * op_.head_dim;
        const T* found = static_cast<const T*>(values_ ? op_.values : op_.keys) + at;
        advance();
        return reinterpret_cast<const char*>(found);
    }

  private:
    static constexpr int kDistanceBytes = 16384;

    void enter(const Task* task) {
        task_ = task;
        if (task) enter_chunk(task->key_begin);
    }

    void enter_chunk(int start) {
        start_ = start;
        subs_ = places_.seen_of(*task_, start);
        sub_ = subs_.begin;
        values_ = false;
    }

    void advance() {
        if (++sub_ < subs_.end) return;
        sub_ = subs_.begin;
        if (!values_ && op_.values) values_ = true;
        else if (start_ + kChunk < task_->key_end) enter_chunk(start_ + kChunk);
        else enter(std::exchange(following_, nullptr));
    }

    const AttentionOp& op_;
    const Places& places_;
    const Task* task_ = nullptr;
    const Task* following_ = nullptr;
    int start_ = 0;
    Range subs_{};
    int sub_ = 0;
    bool values_ = false;
};

}  // namespace llmb
