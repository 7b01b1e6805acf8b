// Which experts compute which tokens, and the weighted sum of their outputs.
//
// Used by the program's runner. Invariants: a token's experts, shares and sum depend only on that token's row; equal
// scores are taken in ascending order of their indices; sums have a fixed order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "epilogue.h"
#include "numbers.h"
#include "step_experts.h"
#include "team.h"

namespace llmb {

namespace route {

constexpr int kMostExperts = 1024;

// Index of the largest value, the first among equals, excluding `taken`. At least one must not be taken.
inline int largest(const float* values, const bool* taken, int count) {
    int best = -1;
    for (int i = 0; i < count; i++)
        if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
    return best;
}

// One token's experts.
class Choice {
  public:
    Choice(const RouteOp& op, const float* logits) : op_(op) {
        score(logits);
        const float* values = choosable(logits);
        if (op.groups > 0) leave_groups_out(values);
        for (int rank = 0; rank < op.top_k; rank++) {
            chosen_[rank] = largest(values, taken_, op.num_experts);
            taken_[chosen_[rank]] = true;
        }
    }

    void write(int32_t* chosen, float* shares) const {
        float sum = op_.epsilon;
        for (int rank = 0; rank < op_.top_k; rank++) sum += scores_[chosen_[rank]];
        const float whole = op_.renormalises ? sum : op_.scores == Scores::kSoftmax ? total_ : 1.0f;
        for (int rank = 0; rank < op_.top_k; rank++) {
            chosen[rank] = chosen_[rank];
            shares[rank] = scores_[chosen_[rank]] / whole * op_.factor;
        }
    }

  private:
    // Scores; for a softmax, e^(logit - largest logit) and their sum.
    void score(const float* logits) {
        const int n = op_.num_experts;
        float most = logits[0];
        for (int i = 1; i < n; i++) most = logits[i] > most ? logits[i] : most;
        for (int i = 0; i < n; i += kLanes) {
            const int count = std::min(kLanes, n - i);
            const Floats x = load_some(logits + i, count);
            store(scores_ + i, op_.scores == Scores::kSoftmax ? exp(x - splat(most)) : sigmoid(x));
        }
        total_ = 0;
        for (int i = 0; i < n; i++) total_ += scores_[i];
    }

    const float* choosable(const float* logits) {
        if (op_.correction == nullptr) return op_.scores == Scores::kSoftmax ? logits : scores_;
        const float whole = op_.scores == Scores::kSoftmax ? total_ : 1.0f;
        for (int i = 0; i < op_.num_experts; i++) corrected_[i] = scores_[i] / whole + op_.correction[i];
        return corrected_;
    }

    // Marks the experts of all but the best groups as taken.
    void leave_groups_out(const float* values) {
        const int size = op_.num_experts / op_.groups;
        float sums[kMostExperts];
        bool group_taken[kMostExperts] = {};
        for (int group = 0; group < op_.groups; group++) {
            const float* own = values + group * size;
            bool seen[kMostExperts] = {};
            const int first = largest(own, seen, size);
            seen[first] = true;
            sums[group] = own[first] + (op_.of_group > 1 ? own[largest(own, seen, size)] : 0.0f);
        }
        for (int i = 0; i < op_.top_groups; i++) group_taken[largest(sums, group_taken, op_.groups)] = true;
        for (int i = 0; i < op_.num_experts; i++) taken_[i] = !group_taken[i / size];
    }

    const RouteOp& op_;
    alignas(64) float scores_[kMostExperts];
    float corrected_[kMostExperts];
    bool taken_[kMostExperts] = {};
    int32_t chosen_[kMostExperts];
    float total_;
};

// Sorts pairs by expert, in the order of tokens.
inline void sort(const RouteOp& op, int pairs) {
    int32_t next[kMostExperts] = {};
    for (int i = 0; i < pairs; i++) next[op.chosen[i]]++;
    int32_t place = 0;
    for (int expert = 0; expert < op.num_experts; expert++) {
        op.first[expert] = place;
        place += next[expert];
        next[expert] = op.first[expert];
    }
    op.first[op.num_experts] = place;
    for (int i = 0; i < pairs; i++) op.places[i] = next[op.chosen[i]]++;
}

}  // namespace route

inline void route_tokens(Worker& worker, const RouteOp& op, const Step& step) {
    worker.share(step.num_tokens, 16, [&](int begin, int end) {
        for (int t = begin; t < end; t++) {
            const size_t at = static_cast<size_t>(t) * op.top_k;
            route::Choice(op, op.logits + static_cast<int64_t>(t) * op.stride).write(op.chosen + at, op.shares + at);
        }
    });
    worker.barrier();
    if (worker.rank == 0) route::sort(op, step.num_tokens * op.top_k);
}

namespace route {

constexpr int kMixColumns = 512;  // per task

// Columns begin..end-1 of one token.
inline void mix_columns(const MixOp& op, int token, int begin, int end) {
    const size_t at = static_cast<size_t>(token) * op.top_k;
    const float* shared = op.shared ? op.shared + static_cast<int64_t>(token) * op.shared_stride : nullptr;
    const float gate = op.shared_gate ? sigmoid(splat(op.shared_gate[static_cast<int64_t>(token) * op.gate_stride]))[0] : 1.0f;
    float* out = op.out + static_cast<int64_t>(token) * op.out_stride;
    for (int i = begin; i < end; i += kLanes) {
        const int count = std::min(kLanes, end - i);
        Floats sum = {};
        for (int rank = 0; rank < op.top_k; rank++) {
            const float* mixed = op.mixed + static_cast<int64_t>(op.places[at + rank]) * op.mixed_stride;
            sum = fma(load_some(mixed + i, count), splat(op.shares[at + rank]), sum);
        }
        if (shared) sum = fma(load_some(shared + i, count), splat(gate), sum);
        if (op.accumulate) sum = fma(sum, splat(op.factor), load_some(out + i, count));
        std::memcpy(out + i, &sum, count * sizeof(float));
    }
}

}  // namespace route

inline void mix(Worker& worker, const MixOp& op, const Step& step) {
    const int parts = divide_up(op.width, route::kMixColumns);
    worker.share(step.num_tokens * parts, 8, [&](int begin, int end) {
        for (int i = begin; i < end; i++) {
            const int first = i % parts * route::kMixColumns;
            route::mix_columns(op, i / parts, first, std::min(first + route::kMixColumns, op.width));
        }
    });
}

}  // namespace llmb
