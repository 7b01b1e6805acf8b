// Causal convolutions with few taps, one per channel.
//
// Used by recurrent layers before their state. Invariant: a channel's sum is one chain of fma, starting from its bias
// and the oldest input; inputs are kept as unrounded float32.
#pragma once

#include "epilogue.h"
#include "numbers.h"
#include "state_slots.h"
#include "step_recurrent.h"
#include "team.h"
#include "tile_rows.h"

namespace llmb {

constexpr int kConvChannels = 64;
constexpr int kConvGrain = 4;

// A token's inputs for these channels, and where its result goes.
struct ConvToken {
    const float* gate;  // B, or null
    const float* input;
    const float* out_gate;  // C
};

inline ConvToken conv_token(const ConvOp& op, int token, int channel) {
    const float* x = op.x + static_cast<int64_t>(token) * op.x_stride + channel;
    if (!op.gated) return {nullptr, x, nullptr};
    return {x, x + 2 * op.channels, x + op.channels};
}

inline void store_conv(const ConvOp& op, int token, int channel, Floats value) {
    const int64_t at = static_cast<int64_t>(token) * op.out_stride + channel;
    if (op.out_type == Type::kFloat32) store(static_cast<float*>(op.out) + at, value);
    else if (op.out_type == Type::kBfloat16) store(static_cast<bf16*>(op.out) + at, value);
    else store(TileRow<bf16>(static_cast<bf16*>(op.out), token, op.out_stride) + channel, value);
}

// One vector of channels of one token. past [num_taps - 1], kConvChannels apart: shifted by the token's input.
inline Floats convolve(const ConvOp& op, int channel, Floats input, float* past) {
    Floats sum = op.bias ? load(op.bias + channel) : Floats{};
    const int num_past = op.num_taps - 1;
    for (int j = 0; j < num_past; j++) {
        const Floats old = load(past + j * kConvChannels);
        sum = fma(old, load(op.taps + static_cast<int64_t>(j) * op.channels + channel), sum);
        if (j > 0) store(past + (j - 1) * kConvChannels, old);
    }
    if (num_past > 0) store(past + (num_past - 1) * kConvChannels, input);
    return fma(input, load(op.taps + static_cast<int64_t>(num_past) * op.channels + channel), sum);
}

inline void conv_part(const ConvOp& op, int first, int count, float* state, int begin, int end) {
    for (int token = begin; token < end; token++) {
        const ConvToken from = conv_token(op, token, first);
        for (int c = 0; c < count; c += kLanes) {
            const Floats x = load(from.input + c);
            const Floats sum = convolve(op, first + c, op.gated ? load(from.gate + c) * x : x, state + c);
            store_conv(op, token, first + c, op.gated ? load(from.out_gate + c) * sum : silu(sum));
        }
    }
}

inline void conv(Worker& worker, const ConvOp& op, const Step& step) {
    const int parts = (op.channels + kConvChannels - 1) / kConvChannels;
    const int64_t size = static_cast<int64_t>(op.num_taps - 1) * kConvChannels;
    worker.share(step.num_rows * parts, kConvGrain, [&](int begin, int end) {
        for (int i = begin; i < end; i++) {
            const int part = i % parts, first = part * kConvChannels;
            const int count = std::min(op.channels - first, kConvChannels);
            const StatePiece piece{op.state + part * size, op.slot_stride, size};
            run_row(step, i / parts, piece, [&](float* state, int from, int to) {
                conv_part(op, first, count, state, from, to);
            });
        }
    });
}

}  // namespace llmb
