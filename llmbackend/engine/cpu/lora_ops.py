"""The operations for adapters in a native program: one for each input of layers that adapters may change.

Used by decoder_program.py. Invariant: the parts of all operations are numbered in the order of `PackedDecoder.parts`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from ..kernels.library import PANEL, NativeKernels
from ..kernels.operations import LORA_DELTA_TOKENS, LORA_LAYERS, LORA_RANKS, Kind, LinearOp, LoraOp, LoraStep, Type
from .packed_decoder import PackedDecoder
from .packed_parts import TYPE_OF, PackedProjection

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
