"""A library's linear layers against plain arithmetic: some milliseconds, before the library is used.

For: `library.load`. Does not know: models. Why: the proof of a loaded model compares its program with modules that run
on the same kernels, so a library that computes wrongly on a CPU nobody tried it on would go unnoticed. Invariant: every
pair of types that a model's layers can have is multiplied once, with more rows and columns than one tile has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .abi import Kind, LinearOp, Step, Type

if TYPE_CHECKING:
    from .library import Library, NativeEngine

Array = npt.NDArray[Any]

ROWS, N, K = 19, 70, 130
# Of the largest element. int8 rounds weights and activations to 127 steps each.
_CASES = (
    (Type.FLOAT32, Type.FLOAT32, 1e-5),
    (Type.BFLOAT16, Type.FLOAT32, 1e-5),
    (Type.BFLOAT16, Type.BFLOAT16, 1e-5),
    (Type.INT8, Type.FLOAT32, 3e-2),
)


def fault_of(library: Library) -> str:
    """What the library computes wrongly; "" when all is well."""
    from .library import NativeEngine

    engine = NativeEngine(library, 1)
    try:
        for weight_type, x_type, tolerance in _CASES:
            error = _error(engine, weight_type, x_type)
            if not error <= tolerance:
                return f"{weight_type.name} weights times {x_type.name}: off by {error:.2g} of the largest element"
    finally:
        engine.close()
    return ""


def _error(engine: NativeEngine, weight_type: Type, x_type: Type) -> float:
    random = np.random.default_rng(7)
    weight, x = (random.standard_normal((rows, K)).astype(np.float32) for rows in (N, ROWS))
    source_type = Type.BFLOAT16 if weight_type is Type.BFLOAT16 else Type.FLOAT32
    if source_type is Type.BFLOAT16:
        weight = _rounded(weight)
    if x_type is Type.BFLOAT16:
        x = _rounded(x)
    y = np.full((ROWS, N), np.nan, np.float32)
    _multiply(engine, _stored(weight, source_type), source_type, weight_type, _stored(x, x_type), x_type, y)
    expected = x.astype(np.float64) @ weight.astype(np.float64).T
    return float(np.abs(y - expected).max() / np.abs(expected).max())


def _multiply(
    engine: NativeEngine, weight: Array, source_type: Type, weight_type: Type, x: Array, x_type: Type, y: Array
) -> None:
    from .library import op_pointers, packed_bytes

    packed = engine.library.memory(packed_bytes(N, K, weight_type))
    scale, sums = np.zeros(N, np.float32), np.zeros(N, np.int32)
    engine.pack(
        weight.ctypes.data, source_type, (N, K), K, packed.ctypes.data, weight_type, scale.ctypes.data, sums.ctypes.data
    )
    op = LinearOp(
        kind=Kind.LINEAR, weight=packed.ctypes.data, scale=scale.ctypes.data, sums=sums.ctypes.data, x=x.ctypes.data,
        y=y.ctypes.data, n=N, k=K, x_stride=K, y_stride=N, weight_type=weight_type, x_type=x_type,
        y_type=Type.FLOAT32, factor=1.0,
    )  # fmt: skip
    engine.run(op_pointers([op]), 1, Step(num_tokens=ROWS))


def _rounded(x: Array) -> Array:
    """Cut to what bfloat16 holds."""
    return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def _stored(x: Array, kind: Type) -> Array:
    return (x.view(np.uint32) >> np.uint32(16)).astype(np.uint16) if kind is Type.BFLOAT16 else x
