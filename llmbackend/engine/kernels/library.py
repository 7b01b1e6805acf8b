"""The native kernels: the library for this CPU, its functions, sizes of packed weights, and its self-test.

Used by code that builds operations or runs steps; independent of models. Invariants: a library is used only if the CPU
can execute it, its structures have the sizes of ours (operations.py), and it passed a self-test of a few milliseconds.
(The verification of a program compares it with modules that use the same kernels, which would not reveal a faulty
library.) Calls release the GIL; memory and threads are freed with their Python owners, or end with the process.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import logging
import time
import weakref
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .operations import STRUCTURES, Kind, LinearOp, Step, Type

logger = logging.getLogger(__name__)

VARIANTS: Final = {
    "amx": 8, "avx512_bf16": 16, "avx512_vnni": 4, "avx512": 2, "avx_vnni": 32, "avx2": 1, "generic": 0,
}  # fmt: skip
"""Widest first, with the bits that the generic library reports if a CPU can execute them (native/cpu.h)."""
PANEL: Final = 32
"""Output columns per panel of a packed weight."""
GROUP: Final = 32
"""Inputs of a 4-bit weight that share a scale."""
FOUR_BITS: Final = (Type.INT4, Type.INT4_MIN, Type.INT4_ZERO)
_K_MULTIPLE: Final = {Type.FLOAT32: 1, Type.BFLOAT16: 32, Type.INT8: 64} | dict.fromkeys(FOUR_BITS, 64)
_ITEM_BITS: Final = {Type.FLOAT32: 32, Type.BFLOAT16: 16, Type.INT8: 8} | dict.fromkeys(FOUR_BITS, 4)


class Blocks(NamedTuple):
    """Block format of a GGUF tensor type: a row is a sequence of blocks."""

    k: int
    """Numbers per block."""
    file_bytes: int
    panel_bytes: int
    """Bytes of the blocks of all columns of a panel."""


BLOCKS: Final = {
    Type.Q5_0: Blocks(32, 22, 704),
    Type.Q5_1: Blocks(32, 24, 768),
    Type.Q8_0: Blocks(32, 34, 1088),
    Type.Q2_K: Blocks(256, 84, 3200),
    Type.Q3_K: Blocks(256, 110, 3648),
    Type.Q4_K: Blocks(256, 144, 4736),
    Type.Q5_K: Blocks(256, 176, 5760),
    Type.Q6_K: Blocks(256, 210, 6720),
    Type.IQ4_NL: Blocks(32, 18, 576),
    Type.IQ4_XS: Blocks(256, 136, 4416),
    Type.MXFP4: Blocks(32, 17, 576),
}
ALIGN_BYTES: Final = 64
"""Packed arrays begin at multiples of this, the size of a cache line."""
_PEAK_STEPS, _PEAK_REPEATS = 20_000, 50
"""Each repeat takes a tenth of a millisecond."""


def aligned(size_bytes: int) -> int:
    """Rounded up to a multiple of ALIGN_BYTES."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def packed_bytes(n: int, k: int, packed_type: Type) -> int:
    """Size of a packed weight with n output and k input features."""
    if (blocks := BLOCKS.get(packed_type)) is not None:
        return -(-n // PANEL) * -(-k // blocks.k) * blocks.panel_bytes
    multiple = _K_MULTIPLE[packed_type]
    return -(-n // PANEL) * PANEL * -(-k // multiple) * multiple * _ITEM_BITS[packed_type] // 8


def scale_bytes(n: int, k: int, packed_type: Type) -> int:
    """Size of its scales; 0 = it has none."""
    if packed_type in FOUR_BITS:
        return 2 * packed_bytes(n, k, Type.INT8) // GROUP
    return 4 * n if packed_type is Type.INT8 else 0


def sums_bytes(n: int, k: int, packed_type: Type) -> int:
    """Size of its sums, or of its groups' minima or zero points; 0 = it has none."""
    if packed_type is Type.INT4_ZERO:
        return scale_bytes(n, k, packed_type) // 2
    return 0 if packed_type is Type.INT4 else scale_bytes(n, k, packed_type)


class KernelLibrary:
    """One loaded library. variant: the instruction set it was compiled for."""

    def __init__(self, variant: str, path: Path) -> None:
        """Raises OSError if it cannot be loaded, or was built from different sources."""
        self.variant = variant
        self.functions: Any = ctypes.CDLL(str(path))
        sizes = (c_int32 * len(STRUCTURES))()
        is_ours = _declare(self.functions)
        self.functions.llmb_sizes(sizes)
        if not is_ours or list(sizes) != [ctypes.sizeof(structure) for structure in STRUCTURES]:
            raise OSError(f"{path.name} was built from different sources: reinstall this package")

    def activation_type(self, model_type: Type) -> Type:
        """How the inputs of linear layers are stored in a model of this type, float32 or bfloat16."""
        return Type(self.functions.llmb_activation_type()) if model_type is Type.BFLOAT16 else model_type

    def kv_type(self, model_type: Type) -> Type:
        """How keys and values are stored for a model of this type, float32 or bfloat16."""
        return Type.FIXED16 if model_type is Type.BFLOAT16 and self.functions.llmb_keeps_fixed_point() else model_type

    def peak_rate(self, weights: Type) -> float:
        """Multiplications and additions per second of one thread that only multiplies registers, as for weights of this
        type: the best of many short, undisturbed runs."""

        def rate() -> float:
            begin = time.perf_counter()
            return float(self.functions.llmb_peak(weights, _PEAK_STEPS)) / (time.perf_counter() - begin)

        return max(rate() for _ in range(_PEAK_REPEATS))

    def unpack_blocks(self, kind: Type, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """The values of rows [n, bytes] of blocks of a GGUF type."""
        rows, form = np.ascontiguousarray(rows), BLOCKS[kind]
        num_blocks = rows.shape[1] // form.file_bytes
        values = np.empty((len(rows), num_blocks * form.k), np.float32)
        self.functions.llmb_unpack_blocks(rows.ctypes.data, kind, len(rows) * num_blocks, values.ctypes.data)
        return values

    def memory(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        """Zeros, uint8 [size_bytes], on huge pages if available. Pages are committed when first written. Raises
        MemoryError."""
        address = self.functions.llmb_memory_new(max(size_bytes, 1))
        if not address:
            raise MemoryError(f"{size_bytes} bytes could not be allocated")
        buffer = (ctypes.c_uint8 * size_bytes).from_address(address)
        # Not at exit, when daemon threads may still compute with it.
        weakref.finalize(buffer, self.functions.llmb_memory_delete, address, max(size_bytes, 1)).atexit = False
        return np.frombuffer(memoryview(buffer).cast("B"), np.uint8)


class NativeKernels:
    """The native kernels, with a team of threads that runs them. Used by one thread at a time."""

    def __init__(self, library: KernelLibrary, num_threads: int) -> None:
        """Raises OSError if the threads cannot be started."""
        self.library = library
        self.num_threads = num_threads
        self.pointer = library.functions.llmb_engine_new(num_threads)
        if self.pointer is None:
            raise OSError(
                f"num_threads is {num_threads}: the system does not start so many; expected fewer, or higher limits "
                "(memory, ulimit -u, pids.max)"
            )
        self._finalizer = weakref.finalize(self, library.functions.llmb_engine_delete, self.pointer)
        self._finalizer.atexit = False  # daemon threads may still compute then

    def run(self, ops: Any, num_ops: int, step: Step) -> None:
        """Runs `ops`, an array of pointers from `op_pointers`. Raises MemoryError."""
        if self.library.functions.llmb_run(self.pointer, ops, num_ops, ctypes.byref(step)):
            raise MemoryError("scratch memory for a step could not be allocated")

    def profile(self, ops: Any, num_ops: int, step: Step) -> npt.NDArray[np.float64]:
        """As `run`; returns the seconds that each operation took. Raises MemoryError."""
        seconds = np.zeros(num_ops, np.float64)
        if self.library.functions.llmb_profile(self.pointer, ops, num_ops, ctypes.byref(step), seconds.ctypes.data):
            raise MemoryError("scratch memory for a step could not be allocated")
        return seconds

    def pack(
        self, weight: int, weight_type: Type, shape: tuple[int, int], stride: int, packed: int, packed_type: Type,
        scale: int = 0, sums: int = 0,
    ) -> None:  # fmt: skip
        """Packs the matrix [n, k] at address `weight` to address `packed`; see llmb_pack in native/library.cpp."""
        n, k = shape
        self.library.functions.llmb_pack(
            self.pointer, weight, weight_type, n, k, stride, packed, packed_type, scale or None, sums or None
        )

    def pack_blocks(self, blocks: int, kind: Type, shape: tuple[int, int], packed: int) -> None:
        """Packs the matrix [n, k] from blocks of a GGUF type at address `blocks`, row by row."""
        self.library.functions.llmb_pack_blocks(self.pointer, blocks, kind, *shape, packed)

    def close(self) -> None:
        """Ends the threads. Must be the last call."""
        self._finalizer()


def op_pointers(ops: Sequence[ctypes.Structure]) -> Any:
    """The array that `NativeKernels.run` takes. The caller must keep the operations alive."""
    return (c_void_p * len(ops))(*(ctypes.addressof(op) for op in ops))


def available() -> tuple[str, ...]:
    """Variants that are built and that this CPU can execute, best first."""
    generic = _path("generic")
    if generic is None:
        return ()
    features = ctypes.CDLL(str(generic)).llmb_cpu_features()
    return tuple(name for name, bit in VARIANTS.items() if features & bit == bit and _path(name) is not None)


@functools.cache
def load(variant: str | None = None) -> KernelLibrary | None:
    """The best library for this CPU, or the named variant if this CPU can execute it; None = there is none, which a
    warning says unless a variant is named."""
    # Called for a named variant too, because `available` requests the AMX registers from Linux.
    for name in available() if variant is None else {variant}.intersection(available()):
        path = _path(name)
        if path is not None and (library := _checked(name, path)) is not None:
            return library
    if variant is None:
        logger.warning(
            "no native kernels (a C++ compiler builds them when the package is installed): torch computes, much more "
            "slowly"
        )
    return None


def _checked(variant: str, path: Path) -> KernelLibrary | None:
    """The library; None, with a warning = it cannot be loaded, or computes wrongly on this CPU."""
    try:
        library = KernelLibrary(variant, path)
        fault = fault_of(library)
    except OSError as error:
        fault = str(error)
    if not fault:
        return library
    logger.warning("the native kernels '%s' cannot be used: %s", variant, fault)
    return None


def _path(variant: str) -> Path | None:
    """Its file. One for every version of Python takes precedence over one for this version, which is from an older
    build."""
    directory = Path(__file__).parent
    paths = (directory / f"_{variant}{suffix}" for suffix in reversed(importlib.machinery.EXTENSION_SUFFIXES))
    return next((path for path in paths if path.exists()), None)


def _declare(functions: Any) -> bool:
    """Declares the entry points (native/library.cpp), with pointers as integers. False = the library lacks one."""
    declare = {
        "llmb_sizes": (None, [c_void_p]),
        "llmb_engine_new": (c_void_p, [c_int32]),
        "llmb_engine_delete": (None, [c_void_p]),
        "llmb_run": (c_int32, [c_void_p, c_void_p, c_int32, c_void_p]),
        "llmb_profile": (c_int32, [c_void_p, c_void_p, c_int32, c_void_p, c_void_p]),
        "llmb_pack": (None, [c_void_p, c_void_p, c_int32, c_int32, c_int32, c_int64, c_void_p, c_int32, c_void_p,
                             c_void_p]),
        "llmb_pack_blocks": (None, [c_void_p, c_void_p, c_int32, c_int32, c_int32, c_void_p]),
        "llmb_unpack_blocks": (None, [c_void_p, c_int32, c_int64, c_void_p]),
        "llmb_activation_type": (c_int32, []),
        "llmb_keeps_fixed_point": (c_int32, []),
        "llmb_peak": (c_int64, [c_int32, c_int64]),
        "llmb_memory_new": (c_void_p, [c_size_t]),
        "llmb_memory_delete": (None, [c_void_p, c_size_t]),
    }  # fmt: skip
    for name, (result, arguments) in declare.items():
        if (function := getattr(functions, name, None)) is None:
            return False
        function.restype, function.argtypes = result, arguments
    return True


Array = npt.NDArray[Any]

ROWS, N, K = 19, 70, 130
_ZERO = 8
_BLOCKS_K: Final = 512
_FINITE: Final = 0xBB
"""Random bytes masked with this are finite as float16."""
_INT8_ERROR: Final = 3e-2
# Relative to the largest element. int8 rounds weights and activations to 127 steps each, int4 weights to 8.
_CASES = (
    (Type.FLOAT32, Type.FLOAT32, 1e-5),
    (Type.BFLOAT16, Type.FLOAT32, 1e-5),
    (Type.BFLOAT16, Type.BFLOAT16, 1e-5),
    (Type.INT8, Type.FLOAT32, _INT8_ERROR),
    (Type.INT4, Type.FLOAT32, 2e-1),
    (Type.INT4_MIN, Type.FLOAT32, 2e-1),
    (Type.INT4_ZERO, Type.FLOAT32, 2e-1),
)


def fault_of(library: KernelLibrary) -> str:
    """What the library computes wrongly; "" = nothing. Multiplies each pair of types that a layer can have once, with
    more rows and columns than one tile."""
    kernels = NativeKernels(library, 1)
    try:
        for weight_type, x_type, tolerance in _CASES:
            error = _error(kernels, weight_type, x_type)
            if not error <= tolerance:
                return f"{weight_type.name} weights times {x_type.name}: off by {error:.2g} of the largest element"
        for kind in BLOCKS:
            if not (error := _error_of_blocks(kernels, kind)) <= _INT8_ERROR:
                return f"{kind.name} weights: off by {error:.2g} of the largest element"
    finally:
        kernels.close()
    return ""


def _error(kernels: NativeKernels, weight_type: Type, x_type: Type) -> float:
    random = np.random.default_rng(7)
    weight, x = (random.standard_normal((rows, K)).astype(np.float32) for rows in (N, ROWS))
    source_type = Type.BFLOAT16 if weight_type is Type.BFLOAT16 else Type.FLOAT32
    if source_type is Type.BFLOAT16:
        weight = _rounded(weight)
    if x_type is Type.BFLOAT16:
        x = _rounded(x)
    y = np.full((ROWS, N), np.nan, np.float32)
    _multiply(kernels, _stored(weight, source_type), source_type, weight_type, _stored(x, x_type), x_type, y)
    return _difference(x, weight, y)


def _error_of_blocks(kernels: NativeKernels, kind: Type) -> float:
    random = np.random.default_rng(7)
    form, per_row = BLOCKS[kind], _BLOCKS_K // BLOCKS[kind].k
    blocks = random.integers(0, 256, (N, per_row * form.file_bytes), np.uint8) & np.uint8(_FINITE)
    weight, y = kernels.library.unpack_blocks(kind, blocks), np.full((ROWS, N), np.nan, np.float32)
    packed = kernels.library.memory(packed_bytes(N, _BLOCKS_K, kind))
    kernels.pack_blocks(blocks.ctypes.data, kind, (N, _BLOCKS_K), packed.ctypes.data)
    x = random.standard_normal((ROWS, _BLOCKS_K)).astype(np.float32)
    _run_linear(kernels, packed, kind, x, Type.FLOAT32, y)
    return _difference(x, weight, y)


def _difference(x: Array, weight: Array, y: Array) -> float:
    expected = x.astype(np.float64) @ weight.astype(np.float64).T
    return float(np.abs(y - expected).max() / np.abs(expected).max())


def _multiply(
    kernels: NativeKernels, weight: Array, source_type: Type, weight_type: Type, x: Array, x_type: Type, y: Array
) -> None:
    packed = kernels.library.memory(packed_bytes(N, K, weight_type))
    scale = np.zeros(max(scale_bytes(N, K, weight_type), 1), np.uint8)
    sums = np.full(max(sums_bytes(N, K, weight_type), 1), _ZERO, np.uint8)
    # Packing never rounds to INT4_ZERO; zero points of 8 are equivalent to INT4.
    rounded_to = Type.INT4 if weight_type is Type.INT4_ZERO else weight_type
    kernels.pack(
        weight.ctypes.data, source_type, (N, K), K, packed.ctypes.data, rounded_to, scale.ctypes.data, sums.ctypes.data
    )
    _run_linear(kernels, packed, weight_type, x, x_type, y, scale=scale.ctypes.data, sums=sums.ctypes.data)


def _run_linear(
    kernels: NativeKernels, packed: Array, weight_type: Type, x: Array, x_type: Type, y: Array, **scales: int
) -> None:
    """y = x · weightᵀ"""
    k = x.shape[1]
    op = LinearOp(
        kind=Kind.LINEAR, weight=packed.ctypes.data, x=x.ctypes.data, y=y.ctypes.data, n=N, k=k, x_stride=k,
        y_stride=N, weight_type=weight_type, x_type=x_type, y_type=Type.FLOAT32, factor=1.0, **scales,
    )  # fmt: skip
    kernels.run(op_pointers([op]), 1, Step(num_tokens=ROWS))


def _rounded(x: Array) -> Array:
    """Truncated to the precision of bfloat16, as float32."""
    return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def _stored(x: Array, kind: Type) -> Array:
    return (x.view(np.uint32) >> np.uint32(16)).astype(np.uint16) if kind is Type.BFLOAT16 else x
