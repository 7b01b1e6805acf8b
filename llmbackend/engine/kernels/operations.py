"""The structures that Python passes to a kernel library; native/step.h and its neighbouring headers explain the fields.

The library compares their sizes with its own; programs fill them in. Invariant: a structure has the fields of its
header, in the same order.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from typing import Final


class Type(IntEnum):
    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    FIXED16 = 3
    """Keys and values only (native/fixed16.h)."""
    BFLOAT16_TILES = 4
    """Activations only (native/tile_rows.h)."""
    INT4 = 5
    """Weights only: scale * (q - 8), in groups of 32 along k."""
    INT4_MIN = 6
    """Weights only: scale * q + min, likewise."""
    INT4_ZERO = 7
    """Weights only: scale * (q - zero), likewise."""
    Q5_0 = 38
    """Weights only, as all below: GGUF types, 32 + their number there (native/ggml_forms.h)."""
    Q5_1 = 39
    Q8_0 = 40
    Q2_K = 42
    Q3_K = 43
    Q4_K = 44
    Q5_K = 45
    Q6_K = 46
    IQ4_NL = 52
    IQ4_XS = 55
    MXFP4 = 71


class Rows(IntEnum):
    TOKENS = 0
    SAMPLED = 1


class Kind(IntEnum):
    EMBED = 0
    NORM = 1
    LINEAR = 2
    ROTARY = 3
    ATTENTION = 4
    HEADS = 5
    LORA = 8
    ROUTE = 16
    EXPERTS = 17
    MIX = 18
    CONV = 24
    SCAN = 25
    GATE = 26
    ARRANGE = 27


class Epilogue(IntEnum):
    STORE = 0
    ADD = 1
    SILU_MUL = 2
    GELU_MUL = 3
    SWIGLU_OAI = 4


class Activation(IntEnum):
    NONE = 0
    GELU = 1
    RELU2 = 2


LORA_LAYERS: Final = 3
"""Maximum number of layers of one LoraOp."""
LORA_BLOCK: Final = 16
"""Tokens of one adapter that are multiplied together."""
LORA_DELTA_TOKENS: Final = 64
"""Capacity in tokens of the buffer for what adapters add."""
LORA_RANKS: Final = 16
"""Ranks of adapters are padded to a multiple of this."""


def _named(names: str, kind: type) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


def _fields(pointers: str = "", numbers: str = "", floats: str = "") -> list[tuple[str, type]]:
    kinds = ((pointers, c_void_p), (numbers, c_int32), (floats, c_float))
    return [(name, kind) for names, kind in kinds for name in names.split()]


class Step(ctypes.Structure):
    _fields_ = [
        *_fields(numbers="num_tokens num_rows num_sampled block_table_stride"),
        *_fields("token_ids positions slots query_start seq_lens block_table sampled_tokens"),
        *_fields("state_slots state_sources state_copies"),
    ]


class EmbedOp(ctypes.Structure):
    _fields_ = [
        *_fields(numbers="kind weight_type"),
        *_fields("weight out", "width out_stride", "scale"),
        *_fields(numbers="padding"),
    ]


class NormOp(ctypes.Structure):
    _fields_ = [
        *_fields(numbers="kind rows"),
        *_fields("x weight bias out", "x_stride out_stride width out_type", "eps"),
        *_fields(numbers="accumulate centred padding"),
    ]


class LinearOp(ctypes.Structure):
    _fields_ = [
        *_fields(numbers="kind rows"),
        *_fields("weight weight2 bias bias2 scale scale2 sums sums2 order x y lora"),
        *_fields("", "n k x_stride y_stride weight_type x_type y_type epilogue", "factor"),
        *_fields(numbers="lora_panel activation padding"),
    ]


class RotaryOp(ctypes.Structure):
    _fields_ = [
        *_fields(numbers="kind kv_type"),
        *_fields("q k v keys values cos_sin q_cos_sin q_norm k_norm turned"),
        *_fields("", "stride num_heads num_kv_heads head_dim rotary_dim block_size norm_whole", "eps"),
        *_fields(numbers="q_gap pairs norm_last turned_stride turned_step padding"),
    ]


class AttentionOp(ctypes.Structure):
    _fields_ = [
        *_fields(numbers="kind kv_type"),
        *_fields("q keys values sinks slopes out"),
        *_fields("", "q_stride out_stride num_heads num_kv_heads head_dim block_size window out_type"),
        *_fields(floats="scaling softcap"),
        *_fields(numbers="q_gap value_dim"),
    ]


class LoraMatrices(ctypes.Structure):
    _fields_ = [*_fields("down up", "rank padding")]


class LoraStep(ctypes.Structure):
    _fields_ = [
        *_fields(numbers="num_adapters num_tokens"),
        *_fields("adapters starts tokens blocks adapter_of place_of"),
    ]


class LoraOp(ctypes.Structure):
    _fields_ = [
        *_fields(numbers="kind x_type weight_type first_layer"),
        *_fields("step x hidden delta", "num_layers"),
        ("first_panels", c_int32 * LORA_LAYERS),
        *_fields(numbers="k x_stride hidden_stride max_rank split num_splits num_panels padding"),
    ]


class RouteOp(ctypes.Structure):
    _fields_ = [
        *_fields(numbers="kind scores"),
        *_fields("logits correction shares chosen places first"),
        *_fields("", "stride num_experts top_k groups top_groups renormalises", "factor epsilon"),
        *_fields(numbers="of_group padding"),
    ]


class ExpertsOp(ctypes.Structure):
    _fields_ = [
        *_fields(numbers="kind num_experts"),
        ("linear", LinearOp),
        *_fields("first places"),
        *[(name, c_int64) for name in ("weight_bytes", "scale_bytes", "sums_bytes")],
        *_fields(numbers="top_k padding"),
    ]


class MixOp(ctypes.Structure):
    _fields_ = [
        *_fields(numbers="kind top_k"),
        *_fields("mixed places shares shared shared_gate out"),
        *_fields("", "mixed_stride shared_stride gate_stride out_stride width accumulate", "factor"),
        *_fields(numbers="padding"),
    ]


class GateNorm(IntEnum):
    NONE = 0
    BEFORE = 1
    AFTER = 2


class GateFunction(IntEnum):
    SILU = 0
    SIGMOID = 1
    SOFTPLUS = 2


class ConvOp(ctypes.Structure):
    _fields_ = [
        *_named("kind gated", c_int32),
        *_named("x taps bias out state", c_void_p),
        *_named("slot_stride", c_int64),
        *_named("x_stride out_stride channels num_taps out_type padding", c_int32),
    ]


class ScanOp(ctypes.Structure):
    _fields_ = [
        *_named("kind delta", c_int32),
        *_named("q k v a b decay bias skip state", c_void_p),
        *_named("slot_stride", c_int64),
        *_named("stride a_stride b_stride num_heads num_key_heads key_dim value_dim", c_int32),
        *_named("eps dt_min dt_max beta", c_float),
        *_named("padding", c_int32),
    ]


class GateOp(ctypes.Structure):
    _fields_ = [
        *_named("kind norm", c_int32),
        *_named("x z weight out", c_void_p),
        *_named("x_stride z_stride z_group_stride out_stride group num_groups out_type function", c_int32),
        *_named("eps", c_float),
        *_named("weight_group_stride one_per_group padding", c_int32),
    ]


class ArrangeOp(ctypes.Structure):
    _fields_ = [
        *_fields(numbers="kind columns"),
        *_fields("x order factors out", "x_stride out_stride"),
    ]


class HeadsOp(ctypes.Structure):
    _fields_ = [
        *_fields(numbers="kind num_heads"),
        ("linear", LinearOp),
        *_named("weight_bytes scale_bytes sums_bytes", c_int64),
        *_fields(numbers="x_step y_step"),
    ]


STRUCTURES: Final = (
    Step, EmbedOp, NormOp, LinearOp, RotaryOp, AttentionOp, LoraMatrices, LoraStep, LoraOp, RouteOp, ExpertsOp, MixOp,
    ConvOp, ScanOp, GateOp, ArrangeOp, HeadsOp,
)  # fmt: skip
"""In the order in which the library lists their sizes."""
