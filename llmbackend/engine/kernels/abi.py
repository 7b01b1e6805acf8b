"""The structures of native/step.h, field by field.

For: code that builds operations or runs steps. Does not know: models, how anything is computed. Invariant: sizes are
compared with the library's when it is loaded, so that a field added on one side only is found at once. The fields are
explained in native/step.h.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_void_p
from enum import IntEnum
from typing import Final


class Type(IntEnum):
    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    FIXED16 = 3
    """Of keys and values alone (native/fixed16.h)."""


class Rows(IntEnum):
    TOKENS = 0
    SAMPLED = 1


class Kind(IntEnum):
    EMBED = 0
    NORM = 1
    LINEAR = 2
    ROTARY = 3
    ATTENTION = 4


class Epilogue(IntEnum):
    STORE = 0
    ADD = 1
    SILU_MUL = 2
    GELU_MUL = 3


def _fields(pointers: str = "", numbers: str = "", floats: str = "") -> list[tuple[str, type]]:
    kinds = ((pointers, c_void_p), (numbers, c_int32), (floats, c_float))
    return [(name, kind) for names, kind in kinds for name in names.split()]


class Step(ctypes.Structure):
    _fields_ = [
        *_fields(numbers="num_tokens num_rows num_sampled block_table_stride"),
        *_fields("token_ids positions slots query_start seq_lens block_table sampled_tokens"),
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
        *_fields("x weight out", "x_stride out_stride width out_type", "eps"),
        *_fields(numbers="accumulate"),
    ]


class LinearOp(ctypes.Structure):
    _fields_ = [
        *_fields(numbers="kind rows"),
        *_fields("weight weight2 bias bias2 scale scale2 sums sums2 x y"),
        *_fields("", "n k x_stride y_stride weight_type x_type y_type epilogue", "factor"),
        *_fields(numbers="padding"),
    ]


class RotaryOp(ctypes.Structure):
    _fields_ = [
        *_fields(numbers="kind kv_type"),
        *_fields("q k v keys values cos_sin q_norm k_norm"),
        *_fields("", "stride num_heads num_kv_heads head_dim rotary_dim block_size norm_whole", "eps"),
    ]


class AttentionOp(ctypes.Structure):
    _fields_ = [
        *_fields(numbers="kind kv_type"),
        *_fields("q keys values sinks out"),
        *_fields("", "q_stride out_stride num_heads num_kv_heads head_dim block_size window out_type"),
        *_fields(floats="scaling softcap"),
    ]


STRUCTURES: Final = (Step, EmbedOp, NormOp, LinearOp, RotaryOp, AttentionOp)
"""In the order in which the library lists their sizes."""
