// A row's tokens of a step, with its state loaded from its source and saved where requested.
//
// Used by operations of recurrent layers, which process one piece of a state at a time. Invariant: a piece is advanced
// token by token, in the order of positions, so the division into steps, chunks and batches does not change a bit.
#pragma once

#include <algorithm>
#include <cstdint>

#include "step.h"

namespace llmb {

// Some floats of each slot.
struct StatePiece {
    float* first;  // of slot 0
    int64_t slot_stride;
    int64_t size;

    float* of(int slot) const { return first + slot * slot_stride; }
    void copy(int from, int to) const {
        if (from != to) std::copy(of(from), of(from) + size, of(to));
    }
};

// Calls advance(state, begin, end) for the row's tokens begin .. end-1 of the batch, once for each stretch between
// states to save.
template <class Advance>
inline void run_row(const Step& step, int row, const StatePiece& piece, Advance&& advance) {
    const int slot = step.state_slots[row], source = step.state_sources[row];
    if (source < 0) std::fill(piece.of(slot), piece.of(slot) + piece.size, 0.0f);
    else piece.copy(source, slot);
    const int last = step.query_start[row + 1];
    for (int begin = step.query_start[row], end; begin < last; begin = end) {
        end = begin + 1;
        while (end < last && step.state_copies[end - 1] < 0) end++;
        advance(piece.of(slot), begin, end);
        if (step.state_copies[end - 1] >= 0) piece.copy(slot, step.state_copies[end - 1]);
    }
}

}  // namespace llmb
