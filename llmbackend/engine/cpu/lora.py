"""LoRA adapters of a native program: their matrices in the kernels' layout, which tokens of a step use one, and the
program's operations for them, one for each input of layers that adapters may change.

The native runner's thread adds and removes adapters and begins steps; another thread reads files. The products are
computed by native/lora.h. Invariants: an adapter's memory lives until no request uses it; a step without adapters
leaves everything unchanged; results do not depend on how tokens are grouped; the parts of all operations are numbered
in the order of `PackedDecoder.parts`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..adapter_files import AdapterArrays, AdapterFiles, Float32Array, LoraArrays
from ..adapter_loads import adapter_number, first_adapters
from ..config import EngineConfig
from ..kernels.library import PANEL, KernelLibrary, NativeKernels, aligned
from ..kernels.operations import (
    LORA_BLOCK,
    LORA_DELTA_TOKENS,
    LORA_LAYERS,
    LORA_RANKS,
    Kind,
    LinearOp,
    LoraMatrices,
    LoraOp,
    LoraStep,
    Type,
)
from ..step import FlatStep, Int32Array
from .packed_decoder import PackedDecoder
from .packed_parts import TYPE_OF, PackedPart, PackedProjection

_CHAINS: Final = 4
"""k is padded to a multiple of this."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """May be created on any thread."""

    matrices: Any
    """An array of LoraMatrices, indexed by the program's parts."""
    memory: npt.NDArray[np.uint8]

    @property
    def address(self) -> int:
        return ctypes.addressof(self.matrices)


class NativeAdapters:
    """The adapters of one program. Any thread may call `read`; everything else belongs to the engine's thread."""

    def __init__(self, config: EngineConfig, decoder: PackedDecoder, library: KernelLibrary) -> None:
        """Loads the adapters named in the config. Raises ValueError naming adapter, file and reason."""
        self.step = LoraStep()
        """What the program reads about the step passed to `begin`."""
        self._parts = tuple(decoder.parts)
        self._type = TYPE_OF[decoder.dtype]
        self._library = library
        self._files = AdapterFiles(_shapes(self._parts), config.max_lora_rank)
        self._adapters: dict[int, PackedAdapter] = {}
        self._numbers: dict[str, int] = {}
        self._num_added = 0
        self._of_row = np.zeros(config.max_num_seqs, np.int32)
        """Adapter number of each row; 0 = none."""
        self._arrays: object = None
        for name, path in first_adapters(config):
            self.add(name, self.read(name, path))

    def read(self, name: str, path: str) -> PackedAdapter:
        """The validated adapter in the folder `path`. Raises ValueError naming adapter, file and reason."""
        return pack_adapter(self._files.read(name, path), self._parts, self._type, self._library)

    def add(self, name: str, matrices: PackedAdapter) -> None:
        """Rows may use it from now on."""
        self._num_added += 1
        self._numbers[name] = self._num_added
        self._adapters[self._num_added] = matrices

    def remove(self, name: str) -> None:
        """Called once no live request uses it; unknown names are ignored."""
        if (number := self._numbers.pop(name, None)) is not None:
            del self._adapters[number]

    def set_row(self, row: int, name: str) -> None:
        """name: "" = the model without an adapter. Raises ValueError if it is not loaded."""
        self._of_row[row] = adapter_number(name, self._numbers, none=0)

    def begin(self, step: FlatStep) -> bool:
        """Tells the program which tokens use which adapter. False = none does."""
        of_row = self._of_row[step.rows]
        if not of_row.any():
            self.step.num_adapters = 0
            return False
        grouped = GroupedTokens.of(np.repeat(of_row, step.query_lens))
        addresses = np.array([self._adapters[number].address for number in grouped.numbers], np.int64)
        arrays: dict[str, npt.NDArray[Any]] = {"adapters": addresses, **grouped.arrays}
        self.step.num_adapters, self.step.num_tokens = len(addresses), len(grouped.arrays["tokens"])
        for field, array in arrays.items():
            setattr(self.step, field, array.ctypes.data)
        self._arrays = arrays  # must outlive the step
        return True


@dataclass(frozen=True, slots=True)
class GroupedTokens:
    """A step's tokens with an adapter, sorted by adapter (native/step.h, LoraStep)."""

    numbers: tuple[int, ...]
    arrays: dict[str, Int32Array]
    """By the names in LoraStep."""

    @classmethod
    def of(cls, numbers: Int32Array) -> GroupedTokens:
        """numbers: int32 [tokens], 0 = no adapter."""
        order = np.argsort(numbers, kind="stable").astype(np.int32)
        tokens = order[np.count_nonzero(numbers == 0) :]
        found, counts = np.unique(numbers[tokens], return_counts=True)
        place_of = np.full(len(numbers), -1, np.int32)
        place_of[tokens] = np.arange(len(tokens), dtype=np.int32)
        adapter_of = np.repeat(np.arange(len(found), dtype=np.int32), counts)
        starts, blocks = _starts(counts), _starts(-(-counts // LORA_BLOCK))
        arrays = {"starts": starts, "tokens": tokens, "blocks": blocks, "adapter_of": adapter_of, "place_of": place_of}
        return cls(tuple(found.tolist()), arrays)


def _starts(counts: npt.NDArray[np.int64]) -> Int32Array:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)


def _shapes(parts: Sequence[tuple[PackedPart, int]]) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the layers that adapters may change."""
    shapes: dict[str, tuple[int, int]] = {}
    for part, k in parts:
        n, _ = shapes.get(part.layer, (0, k))
        shapes[part.layer] = n + part.n, k
    return shapes


def pack_adapter(
    arrays: AdapterArrays, parts: Sequence[tuple[PackedPart, int]], kind: Type, library: KernelLibrary
) -> PackedAdapter:
    """parts: of the program, with their numbers of inputs. kind: type of the matrices. Raises MemoryError."""
    packed = [_packed(arrays.get(part.layer), part, kind) for part, _ in parts]
    offsets, size_bytes = [], 0
    for pair in packed:
        for matrix in pair:
            offsets.append(size_bytes)
            size_bytes += aligned(matrix.nbytes)
    memory = library.memory(size_bytes)
    base, places = int(memory.ctypes.data), iter(offsets)
    matrices = (LoraMatrices * len(parts))()
    for native, (down, up) in zip(matrices, packed, strict=True):
        for field, matrix in (("down", down), ("up", up)):
            begin = next(places)
            memory[begin : begin + matrix.nbytes] = matrix.reshape(-1).view(np.uint8)
            setattr(native, field, base + begin)
        native.rank = down.shape[0] * LORA_RANKS
    return PackedAdapter(matrices, memory)


_NOTHING: Final = np.zeros((0, 0), np.float32)
Matrix = npt.NDArray[np.float32] | npt.NDArray[np.uint16]


def _packed(arrays: LoraArrays | None, part: PackedPart, kind: Type) -> tuple[Matrix, Matrix]:
    """`down` and `up` in the order of native/step.h."""
    if arrays is None:
        return _NOTHING, _NOTHING
    fill = -arrays.rank % LORA_RANKS
    k = arrays.down.shape[1]
    up = arrays.up[part.first : part.first + part.n]
    down = np.pad(arrays.down, ((0, fill), (0, -k % _CHAINS))).reshape(-1, LORA_RANKS, k + -k % _CHAINS)
    panels = np.pad(up, ((0, -part.n % PANEL), (0, fill))).reshape(-1, PANEL, arrays.rank + fill)
    return _in_order(down, kind), _in_order(panels, kind)


def _in_order(matrices: Float32Array, kind: Type) -> Matrix:
    """For matrices [n][columns][depth]: the columns of each depth step side by side; for bfloat16, of pairs of
    steps."""
    if kind is Type.FLOAT32:
        return np.ascontiguousarray(matrices.transpose(0, 2, 1))
    n, columns, depth = matrices.shape
    pairs = _bfloat16(matrices).reshape(n, columns, depth // 2, 2)
    return np.ascontiguousarray(pairs.transpose(0, 2, 1, 3))


def _bfloat16(x: Float32Array) -> npt.NDArray[np.uint16]:
    """Rounded to nearest, ties to even; NaNs are preserved."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    kept = bits >> np.uint32(16) | np.uint32(0x40)
    return np.where(np.isnan(x), kept, rounded).astype(np.uint16)


_SPLIT_COLUMNS: Final = 512
_MAX_SPLITS: Final = 8
_COLUMNS_MULTIPLE: Final = 32
_ROW_PADDING: Final = 16


class ProgramAdapters(NamedTuple):
    """What a program knows about adapters."""

    step: LoraStep
    max_rank: int


class Input(NamedTuple):
    address: int
    type: Type
    stride: int


class LoraOps:
    def __init__(
        self, kernels: NativeKernels, decoder: PackedDecoder, max_tokens: int, adapters: ProgramAdapters
    ) -> None:
        """max_tokens: of the largest step. Raises MemoryError."""
        self._type = TYPE_OF[decoder.dtype]
        self._step = adapters.step
        self._max_rank = -(-adapters.max_rank // LORA_RANKS) * LORA_RANKS
        self._stride = LORA_LAYERS * _MAX_SPLITS * self._max_rank + _ROW_PADDING
        self._hidden = kernels.library.memory(4 * max_tokens * self._stride)
        widest = max(_num_panels(input) for input in _inputs(decoder))
        self._delta = kernels.library.memory(4 * LORA_DELTA_TOKENS * PANEL * widest)
        self._num_parts = 0

    def of(self, x: Input, projections: Sequence[PackedProjection]) -> LoraOp:
        """The operation for projections of this input. Must be called in program order."""
        sizes = [part.n for projection in projections for part in projection.parts]
        assert 0 < len(sizes) <= LORA_LAYERS, f"{len(sizes)} layers have one input"
        k = projections[0].weight.k
        split, num_splits = splits_of(k)
        op = LoraOp(
            kind=Kind.LORA, x_type=x.type, weight_type=self._type, first_layer=self._num_parts,
            step=ctypes.addressof(self._step), x=x.address, hidden=int(self._hidden.ctypes.data),
            delta=int(self._delta.ctypes.data), num_layers=len(sizes), k=k, x_stride=x.stride,
            hidden_stride=self._stride, max_rank=self._max_rank, split=split, num_splits=num_splits,
            num_panels=_num_panels(projections),
        )  # fmt: skip
        panels = 0
        for index, n in enumerate(sizes):
            op.first_panels[index] = panels
            panels += -(-n // PANEL)
        self._num_parts += len(sizes)
        return op


def _inputs(decoder: PackedDecoder) -> Iterator[tuple[PackedProjection, ...]]:
    for layer in decoder.layers:
        yield from layer.inputs


def _num_panels(projections: Sequence[PackedProjection]) -> int:
    return sum(-(-part.n // PANEL) for projection in projections for part in projection.parts)


def splits_of(k: int) -> tuple[int, int]:
    """Columns per split, and number of splits: a function of k alone."""
    columns = -(-k // min(-(-k // _SPLIT_COLUMNS), _MAX_SPLITS))
    columns = -(-columns // _COLUMNS_MULTIPLE) * _COLUMNS_MULTIPLE
    return columns, -(-k // columns)


def adapt(linear: LinearOp, lora: LoraOp | None, first_panel: int = 0) -> None:
    """Lets adapters change what an operation computes. first_panel: index of its first panel among all panels of this
    input."""
    if lora is not None:
        linear.lora, linear.lora_panel = ctypes.addressof(lora), first_panel
