"""Operations of recurrent layers, as native/step_recurrent.h has them, which explains the fields.

For: library.py, which checks their sizes, and the program, which fills them in. Does not know: layers.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from enum import IntEnum


class GateNorm(IntEnum):
    NONE = 0
    BEFORE = 1
    AFTER = 2


def _named(names: str, kind: type) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


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
        *_named("eps dt_min dt_max", c_float),
    ]


class GateOp(ctypes.Structure):
    _fields_ = [
        *_named("kind norm", c_int32),
        *_named("x z weight out", c_void_p),
        *_named("x_stride z_stride z_group_stride out_stride group num_groups out_type is_sigmoid", c_int32),
        *_named("eps", c_float),
        *_named("weight_group_stride", c_int32),
    ]
