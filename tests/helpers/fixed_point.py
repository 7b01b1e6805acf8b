"""The contents of the native kernels' 16-bit fixed-point memory: native/fixed16.h in numpy."""

from __future__ import annotations

import numpy as np

from .native_engines import Array


def fixed_point(k: Array, v: Array) -> tuple[Array, Array]:
    """What memory in fixed point holds of keys and values [..., dim]; see native/fixed16.h."""
    of_keys = 127 + -(-np.frexp(np.square(k).sum(-1, keepdims=True))[1] // 2)
    of_values = 127 + np.frexp(np.abs(v).max(-1, keepdims=True))[1]
    keys, values = (np.minimum(np.rint(np.ldexp(x, 142 - e)), 32767) for x, e in ((k, of_keys), (v, of_values)))
    dims = np.arange(16)
    bits = np.where(dims % 2, of_values, of_keys) >> dims // 2 & 1
    keys[..., :16] = keys[..., :16].astype(np.int32) & ~1 | bits
    return np.ldexp(keys, of_keys - 142), np.ldexp(values, of_values - 142)
