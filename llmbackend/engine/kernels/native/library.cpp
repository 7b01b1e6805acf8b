// The library's entry points, called through ctypes (see ../library.py); one translation unit per instruction set.
//
// Called from Python. Invariant: a program's operations run one after the other, with a barrier after each, on all
// threads of the team; their results do not depend on the number of threads.
#include <chrono>
#include <cstddef>
#include <exception>
#include <iterator>

#include "arrange.h"
#include "attention.h"
#include "conv.h"
#include "cpu.h"
#include "experts.h"
#include "gate.h"
#include "glibc.h"
#include "heads.h"
#include "linear.h"
#include "lora.h"
#include "memory.h"
#include "pack_ggml.h"
#include "peak.h"
#include "rotary.h"
#include "route.h"
#include "rows.h"
#include "sampling.h"
#include "scan.h"
#include "step.h"
#include "team.h"

#define LLMB_EXPORT extern "C" __attribute__((visibility("default")))

namespace llmb {

// While it exists, this thread's arithmetic flushes subnormal numbers to zero, as dot products of bfloat16 always do.
// Adding a zero to such a sum, in some batch, then changes nothing, and no number is slower than others. In every
// library for x86-64, so that they compute alike.
class FlushToZero {
#if defined(__x86_64__)
  public:
    FlushToZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | kFlushResults | kFlushOperands); }
    ~FlushToZero() { _mm_setcsr(before_); }
    FlushToZero(const FlushToZero&) = delete;
    FlushToZero& operator=(const FlushToZero&) = delete;

  private:
    static constexpr unsigned kFlushResults = 0x8000, kFlushOperands = 0x40;
    const unsigned before_;
#endif
};

// A team and the scratch memory its operations use.
struct Engine {
    explicit Engine(int num_threads) : team(num_threads) {}
    Team team;
    Scratch scratch;
};

inline size_t scratch_bytes(const void* op, const Step& step, int num_threads) {
    switch (*static_cast<const Kind*>(op)) {
        case Kind::kLinear: return linear_scratch_bytes(*static_cast<const LinearOp*>(op), step, num_threads);
        case Kind::kLora: return lora_scratch_bytes(*static_cast<const LoraOp*>(op), num_threads);
        case Kind::kAttention: return attention_scratch_bytes(*static_cast<const AttentionOp*>(op), step, num_threads);
        case Kind::kExperts: return experts_scratch_bytes(*static_cast<const ExpertsOp*>(op), step, num_threads);
        case Kind::kHeads: return heads_scratch_bytes(*static_cast<const HeadsOp*>(op), step, num_threads);
        default: return 0;
    }
}

inline void run_op(Worker& worker, const void* op, const Step& step, char* scratch) {
    switch (*static_cast<const Kind*>(op)) {
        case Kind::kEmbed: return embed(worker, *static_cast<const EmbedOp*>(op), step);
        case Kind::kNorm: return norm(worker, *static_cast<const NormOp*>(op), step);
        case Kind::kLinear: return linear(worker, *static_cast<const LinearOp*>(op), step, scratch);
        case Kind::kRotary: return rotary(worker, *static_cast<const RotaryOp*>(op), step);
        case Kind::kLora: return multiply_loras(worker, *static_cast<const LoraOp*>(op), scratch);
        case Kind::kAttention: return attention(worker, *static_cast<const AttentionOp*>(op), step, scratch);
        case Kind::kHeads: return multiply_heads(worker, *static_cast<const HeadsOp*>(op), step, scratch);
        case Kind::kRoute: return route_tokens(worker, *static_cast<const RouteOp*>(op), step);
        case Kind::kExperts: return multiply_experts(worker, *static_cast<const ExpertsOp*>(op), step, scratch);
        case Kind::kMix: return mix(worker, *static_cast<const MixOp*>(op), step);
        case Kind::kConv: return conv(worker, *static_cast<const ConvOp*>(op), step);
        case Kind::kScan: return scan(worker, *static_cast<const ScanOp*>(op), step);
        case Kind::kGate: return gate(worker, *static_cast<const GateOp*>(op), step);
        case Kind::kArrange: return arrange(worker, *static_cast<const ArrangeOp*>(op), step);
    }
}

// Runs ops[0..num_ops-1] on the step; after each, the calling thread calls after(i). Returns 0, or -1 if scratch memory
// could not be allocated.
template <class After>
inline int run_ops(Engine& engine, const void* const* ops, int num_ops, const Step& step, After after) {
    size_t bytes = 0;
    for (int i = 0; i < num_ops; i++) bytes = std::max(bytes, scratch_bytes(ops[i], step, engine.team.size()));
    char* scratch = engine.scratch.at_least(bytes);
    if (bytes > 0 && scratch == nullptr) return -1;
    engine.team.run([&](Worker& worker) {
        [[maybe_unused]] const FlushToZero flush;
        for (int i = 0; i < num_ops; i++) {
            run_op(worker, ops[i], step, scratch);
            worker.barrier();
            if (worker.rank == 0) after(i);
        }
    });
    return 0;
}

}  // namespace llmb

// Null if its threads could not be started.
LLMB_EXPORT void* llmb_engine_new(int num_threads) {
    try {
        return new llmb::Engine(num_threads);
    } catch (const std::exception&) {
        return nullptr;
    }
}

LLMB_EXPORT void llmb_engine_delete(void* engine) { delete static_cast<llmb::Engine*>(engine); }

// Runs ops[0..num_ops-1] on the step. Returns 0, or -1 if scratch memory could not be allocated.
LLMB_EXPORT int llmb_run(void* engine, const void* const* ops, int num_ops, const llmb::Step* step) {
    return llmb::run_ops(*static_cast<llmb::Engine*>(engine), ops, num_ops, *step, [](int) {});
}

// As llmb_run; seconds [num_ops]: duration of each operation, including its barrier.
LLMB_EXPORT int llmb_profile(void* engine, const void* const* ops, int num_ops, const llmb::Step* step, double* seconds) {
    using Clock = std::chrono::steady_clock;
    auto begin = Clock::now();
    return llmb::run_ops(*static_cast<llmb::Engine*>(engine), ops, num_ops, *step, [&](int i) {
        const auto end = Clock::now();
        seconds[i] = std::chrono::duration<double>(end - begin).count();
        begin = end;
    });
}

// The sizes of the structures that Python mirrors, in the order of `Kind` after Step.
LLMB_EXPORT void llmb_sizes(int32_t* sizes) {
    const size_t all[] = {sizeof(llmb::Step),   sizeof(llmb::EmbedOp),  sizeof(llmb::NormOp),
                          sizeof(llmb::LinearOp), sizeof(llmb::RotaryOp), sizeof(llmb::AttentionOp),
                          sizeof(llmb::LoraMatrices), sizeof(llmb::LoraStep), sizeof(llmb::LoraOp),
                          sizeof(llmb::RouteOp),  sizeof(llmb::ExpertsOp), sizeof(llmb::MixOp),
                          sizeof(llmb::ConvOp),   sizeof(llmb::ScanOp),   sizeof(llmb::GateOp),
                          sizeof(llmb::ArrangeOp), sizeof(llmb::HeadsOp)};
    for (size_t i = 0; i < std::size(all); i++) sizes[i] = static_cast<int32_t>(all[i]);
}

// Packs float32 or bfloat16 weights [n, k] (row-major, `stride` elements from row to row) into panels of `packed_type`.
// scale and sums: for int8 and int4, as in step.h.
LLMB_EXPORT void llmb_pack(void* engine, const void* weight, llmb::Type type, int n, int k, int64_t stride, void* packed,
                           llmb::Type packed_type, float* scale, int32_t* sums) {
    static_cast<llmb::Engine*>(engine)->team.run([&](llmb::Worker& worker) {
        llmb::pack(worker, weight, type, n, k, stride, packed, packed_type, scale, sums);
    });
}

// Packs weights [n][k / block] in blocks of a GGUF type into panels of the same type; k is a multiple of the block.
LLMB_EXPORT void llmb_pack_blocks(void* engine, const uint8_t* blocks, llmb::Type type, int n, int k, uint8_t* packed) {
    static_cast<llmb::Engine*>(engine)->team.run(
        [&](llmb::Worker& worker) { llmb::pack_ggml(worker, blocks, type, n, k, packed); });
}

// The values of blocks of a GGUF type.
LLMB_EXPORT void llmb_unpack_blocks(const uint8_t* blocks, llmb::Type type, int64_t count, float* values) {
    llmb::unpack_ggml(blocks, type, count, values);
}

LLMB_EXPORT void* llmb_memory_new(size_t bytes) { return llmb::acquire_memory(bytes); }

LLMB_EXPORT void llmb_memory_delete(void* memory, size_t bytes) { llmb::release_memory(memory, bytes); }

// Bits of Feature. Every library answers; the generic one runs on any CPU.
LLMB_EXPORT int32_t llmb_cpu_features() { return llmb::cpu_features(); }

// Whether keys and values of bfloat16 models are best stored in fixed point: pairs of 16-bit integers are multiplied at
// twice the rate of float32, and there are neither dot products nor tiles of bfloat16.
LLMB_EXPORT int32_t llmb_keeps_fixed_point() {
#if defined(LLMB_FIXED_POINT_KV) && !defined(LLMB_BF16_DOTS) && !defined(LLMB_HAS_TILES)
    return 1;
#else
    return 0;
#endif
}

// The best storage type for activations of bfloat16 models: the one that products with bfloat16 weights read.
LLMB_EXPORT llmb::Type llmb_activation_type() {
#if defined(LLMB_HAS_TILES)
    return llmb::Type::kBfloat16Tiles;
#elif defined(LLMB_BF16_DOTS)
    return llmb::Type::kBfloat16;
#else
    return llmb::Type::kFloat32;
#endif
}

// Multiplies registers for `steps` steps on the calling thread; returns the number of operations.
LLMB_EXPORT int64_t llmb_peak(llmb::Type weights, int64_t steps) { return llmb::peak(weights, steps); }

// Samples the tokens of a step. Returns 0, or -1 if scratch memory could not be allocated.
LLMB_EXPORT int llmb_sample(void* engine_pointer, const llmb::SamplingRows* rows, const llmb::Samples* samples) {
    auto& engine = *static_cast<llmb::Engine*>(engine_pointer);
    char* scratch = engine.scratch.at_least(llmb::sampling_scratch_bytes(*samples, engine.team.size()));
    if (scratch == nullptr) return -1;
    engine.team.run([&](llmb::Worker& worker) { llmb::sample(worker, *rows, *samples, scratch); });
    return 0;
}

// The sizes of the structures that Python mirrors for llmb_sample.
LLMB_EXPORT void llmb_sampling_sizes(int32_t* sizes) {
    sizes[0] = sizeof(llmb::Edits);
    sizes[1] = sizeof(llmb::SamplingRows);
    sizes[2] = sizeof(llmb::Samples);
}
