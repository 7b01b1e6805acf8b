// What Python passes in: one step's ragged batch, and the flat program of operations that computes it.
//
// Shared by Python and the kernels: operations.py mirrors every structure here field by field (sizes are compared when
// the library is loaded). Invariant: the library owns no memory that outlives a call, except its team's threads and
// scratch; all pointers belong to Python and stay valid while a program may run.
#pragma once

#include <cstdint>

namespace llmb {

enum class Type : int32_t {
    kFloat32 = 0,
    kBfloat16 = 1,
    kInt8 = 2,           // weights
    kFixed16 = 3,        // keys and values
    kBfloat16Tiles = 4,  // activations: bfloat16 in the order of tile_rows.h; a stride is the padded number of columns
    kInt4 = 5,           // weights: W = scale * (q - 8)
    kInt4Min = 6,        // weights: W = scale * q + min
    kInt4Zero = 7,       // weights: W = scale * (q - zero)
    // Weights as stored in GGUF files (ggml_forms.h): 32 + ggml's number of the type.
    kQ5_0 = 38,
    kQ5_1 = 39,
    kQ8_0 = 40,
    kQ2_K = 42,
    kQ3_K = 43,
    kQ4_K = 44,
    kQ5_K = 45,
    kQ6_K = 46,
    kIq4Nl = 52,
    kIq4Xs = 55,
    kMxfp4 = 71,
};

// Which rows an operation computes: all tokens of the batch, or those that are sampled.
enum class Rows : int32_t { kTokens = 0, kSampled = 1 };

// The flattened batch. Row r has tokens query_start[r] .. query_start[r+1]-1, the last of its seq_lens[r] positions.
// Position p of row r has the slot block_table[r * block_table_stride + p / block_size] * block_size + p % block_size;
// slots[t] is that of token t.
struct Step {
    int32_t num_tokens;
    int32_t num_rows;
    int32_t num_sampled;
    int32_t block_table_stride;
    const int32_t* token_ids;       // [num_tokens]
    const int32_t* positions;       // [num_tokens]
    const int32_t* slots;           // [num_tokens]
    const int32_t* query_start;     // [num_rows + 1]
    const int32_t* seq_lens;        // [num_rows]
    const int32_t* block_table;     // [num_rows, block_table_stride]
    const int32_t* sampled_tokens;  // [num_sampled]: tokens whose logits are computed
    // For models with recurrent layers (step_recurrent.h); else null.
    const int32_t* state_slots;     // [num_rows]: the slot of a row's state
    const int32_t* state_sources;   // [num_rows]: slot of the state before its first token; -1 = zeros
    const int32_t* state_copies;    // [num_tokens]: slot in which to save the state after this token; -1 = none
};

// Number of rows of an operation that computes these.
inline int num_rows(Rows rows, const Step& step) { return rows == Rows::kSampled ? step.num_sampled : step.num_tokens; }

enum class Kind : int32_t {
    kEmbed = 0,
    kNorm = 1,
    kLinear = 2,
    kRotary = 3,
    kAttention = 4,
    kHeads = 5,     // step_heads.h
    kLora = 8,
    kRoute = 16,    // these: step_experts.h
    kExperts = 17,
    kMix = 18,
    kConv = 24,     // from here: step_recurrent.h
    kScan = 25,
    kGate = 26,
    kArrange = 27,
};

// out[t] = weight[token_ids[t]] * scale
struct EmbedOp {
    Kind kind;
    Type weight_type;     // float32 or bfloat16
    const void* weight;   // [vocab, width], row-major
    float* out;           // [tokens, out_stride]
    int32_t width;
    int32_t out_stride;
    float scale;
    int32_t padding;
};

// out = x / rms(x) * weight, or with `centred` (x - mean(x)) / rms(x - mean(x)) * weight + bias, rounded to out_type;
// with `accumulate`, float32 out += that. With rows = kSampled, out row i is the norm of x row sampled_tokens[i].
struct NormOp {
    Kind kind;
    Rows rows;
    const float* x;       // [tokens, x_stride]
    const float* weight;  // [width]
    const float* bias;    // [width], or null; only with `centred`
    void* out;            // [rows, out_stride]
    int32_t x_stride;
    int32_t out_stride;
    int32_t width;
    Type out_type;
    float eps;
    int32_t accumulate;
    int32_t centred;
    int32_t padding;
};

enum class Epilogue : int32_t {
    kStore = 0,     // y = x·Wᵀ + bias
    kAdd = 1,       // float32 y += (x·Wᵀ + bias) * factor
    kSiluMul = 2,   // y = silu((x·Wᵀ + bias) * factor) * (x·W2ᵀ + bias2)
    kGeluMul = 3,   // likewise with gelu (tanh form)
    kSwigluOai = 4, // y = a * sigmoid(1.702 a) * (b + 1), a = min((x·Wᵀ + bias) * factor, 7), b = x·W2ᵀ + bias2 within ±7
};

// One adapter's matrices for one of the program's layers: y += (x·downᵀ)·upᵀ, with the adapter's
// scale in `up`. The rank is padded to a multiple of 16 with zeros, k to one of 4.
//   float32   down [rank/16][k][16], up [n/32][rank][32]
//   bfloat16  down [rank/16][k/2][16][2], up [n/32][rank/2][32][2]
struct LoraMatrices {
    const void* down;
    const void* up;
    int32_t rank;  // 0 = the adapter does not change this layer
    int32_t padding;
};

// The adapters of a step, filled in by Python before it.
struct LoraStep {
    int32_t num_adapters;  // 0 = nothing else is read
    int32_t num_tokens;    // with an adapter
    const LoraMatrices* const* adapters;  // [num_adapters]: each adapter's matrices, by the numbers of layers
    const int32_t* starts;      // [num_adapters + 1]: each adapter's first index in `tokens`
    const int32_t* tokens;      // [num_tokens], sorted by adapter
    const int32_t* blocks;      // [num_adapters + 1]: each one's first block of kLoraBlock tokens, and how many there are
    const int32_t* adapter_of;  // [num_tokens]: adapter of the token at an index
    const int32_t* place_of;    // [tokens of the step]: index in `tokens`; -1 = none
};

constexpr int kLoraBlock = 16;
constexpr int kLoraLayers = 3;       // maximum number with one input
constexpr int kLoraDeltaTokens = 64;

// For the tokens with an adapter and the layers that it changes, by their indices: hidden = x·downᵀ, over each split of
// the columns; then, for up to kLoraDeltaTokens, delta = the sum of the splits times upᵀ, which the epilogues of these
// layers add. For more tokens, these multiply by `up` themselves, so less memory is written and read.
struct LoraOp {
    Kind kind;
    Type x_type;
    Type weight_type;    // float32 or bfloat16
    int32_t first_layer; // of an adapter's matrices
    const LoraStep* step;
    const void* x;       // [tokens, x_stride]
    float* hidden;       // [tokens, hidden_stride]: [layers][splits][max_rank]
    float* delta;        // [panels of all layers][kLoraDeltaTokens][32]
    int32_t num_layers;
    int32_t first_panels[kLoraLayers];  // of each layer, with the panels of all layers numbered consecutively
    int32_t k;
    int32_t x_stride;
    int32_t hidden_stride;
    int32_t max_rank;
    int32_t split;       // columns of x, a multiple of 32
    int32_t num_splits;
    int32_t num_panels;  // of all layers
    int32_t padding;
};

// With kStore, the function applied to x·Wᵀ + bias.
enum class Activation : int32_t { kNone = 0, kGelu = 1, kRelu2 = 2 };  // the tanh form; max(0, ·)²

// Weights are packed in panels of 32 output columns (the last one padded with zeros), K padded with zeros:
//   float32   [n/32][k][32]          k unpadded
//   bfloat16  [n/32][k/2][32][2]     k padded to a multiple of 32
//   int8      [n/32][k/4][32][4]     k padded to a multiple of 64; scale [n]: W = scale * q; sums [n]: sum of q over k
//   int4      [n/32][k/8][32][4]     k padded to a multiple of 64; a byte has q of k and, in its high nibble, of k + 4;
//                                    scale and, for kInt4Min, sums (the minima): float16 [n/32][k/32][32];
//                                    sums for kInt4Zero: zero points, uint8, in the same order
//   GGUF's    [n/32][k/block]        blocks of ggml_forms.h, including scales and minima; k a multiple of the block
struct LinearOp {
    Kind kind;
    Rows rows;            // rows of x: tokens or sampled
    const void* weight;
    const void* weight2;  // the second factor of gated epilogues, packed likewise
    const float* bias;    // [n] or null
    const float* bias2;
    const float* scale;   // int8: [n]; int4: see above
    const float* scale2;
    const int32_t* sums;  // int8: [n]; int4: see above
    const int32_t* sums2;
    const int32_t* order; // int4: column i of both weights is multiplied by x[order[i]]; null = by x[i]
    const void* x;        // [rows, x_stride], x_type
    void* y;              // [rows, y_stride], y_type
    const LoraOp* lora;   // ran before, on this x; null = no adapter changes this layer
    int32_t n;
    int32_t k;            // unpadded
    int32_t x_stride;
    int32_t y_stride;
    Type weight_type;
    Type x_type;          // of activations: float32, bfloat16 or, with tiles, kBfloat16Tiles
    Type y_type;          // likewise
    Epilogue epilogue;
    float factor;
    int32_t lora_panel;   // number of the first panel in `lora`; those of weight2 follow
    Activation activation;
    int32_t padding;
};

// Per token: normalises (if weights are given) and rotates the heads of q and k in place, and writes k and v to their
// slot. KV memory of one layer, bfloat16: keys [block][kv_head][dim/2][block_size][2], values
// [block][kv_head][block_size/2][dim][2]; fixed16 (fixed16.h) likewise; float32: keys
// [block][kv_head][dim][block_size], values [block][kv_head][block_size][dim]. What is written is finite (NaN becomes
// 0, infinities the largest number). Without `values`, only keys are written.
struct RotaryOp {
    Kind kind;
    Type kv_type;
    float* q;               // [tokens, stride]: num_heads * (head_dim + q_gap); in place
    float* k;               // [tokens, stride]: num_kv_heads * head_dim
    const float* v;         // [tokens, stride]
    void* keys;
    void* values;
    const float* cos_sin;   // [positions, rotary_dim]: cosines of each pair, then sines; null = no rotation
    const float* q_cos_sin; // for queries; null = as for keys
    const float* q_norm;    // [head_dim] (or [num_heads * head_dim] with norm_whole), or null
    const float* k_norm;
    const float* turned;    // [tokens, turned_stride]: source of the rotated part of each head of q; null = it is in q
    int32_t stride;         // of q, k and v, in elements
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t rotary_dim;     // the first rotary_dim of each head are rotated
    int32_t block_size;
    int32_t norm_whole;     // 1: q_norm and k_norm cover all heads of a token together
    float eps;
    int32_t q_gap;          // elements between consecutive heads of q
    int32_t pairs;          // 1: adjacent numbers (2i, 2i + 1) are rotated together; 0: (i, i + rotary_dim / 2)
    int32_t norm_last;      // 1: heads are normalised after the rotation
    int32_t turned_stride;
    int32_t turned_step;    // elements from head to head
    int32_t padding;
};

// Causal attention of each row's queries to that row's keys, all of which have been written.
struct AttentionOp {
    Kind kind;
    Type kv_type;
    const float* q;         // [tokens, q_stride]: num_heads * (head_dim + q_gap)
    const void* keys;       // as RotaryOp writes them
    const void* values;     // null = the last value_dim dimensions of a key are the value, of one KV head, not in fixed16
    const float* sinks;     // [num_heads] or null: one extra score without a value
    const float* slopes;    // [num_heads] or null: a score gets slope * (its key's position - its query's)
    void* out;              // [tokens, out_stride]: num_heads * head_dim, or without `values` num_heads * value_dim
    int32_t q_stride;
    int32_t out_stride;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;       // a multiple of 32
    int32_t block_size;     // a multiple of 32
    int32_t window;         // a query attends to this many positions, its own included; 0 = all
    Type out_type;
    float scaling;
    float softcap;          // 0 = off
    int32_t q_gap;
    int32_t value_dim;      // without `values`: a multiple of 32
};

}  // namespace llmb
