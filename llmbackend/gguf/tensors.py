"""A GGUF model's tensors by the model's names, as torch tensors that are read one by one on demand.

Used by the engine's loader. Invariants: at any time, at most one tensor exists beyond what the caller keeps, plus a few
blocks of it as float32; values are those that llama.cpp computes with, rounded once to the requested type. The gguf
package knows the layouts of the types.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from .families import Floats, ModelTensor, tensors_of
from .rows import Bytes, mapped_rows

T = TypeVar("T")
Unpack = Callable[[str, Bytes], Floats | None]
"""The values of rows of blocks of a type; None = use the gguf package, which takes ten times as long."""
_CHUNK = 1 << 18
"""Numbers that one thread converts at a time."""


class GgufTensors(Mapping[str, torch.Tensor]):
    """Each lookup reads the tensor again, into new memory."""

    def __init__(
        self, files: Sequence[Path], dtype: torch.dtype, unpack: Unpack = lambda kind, rows: None,
        as_float32: Collection[str] = (),
    ) -> None:  # fmt: skip
        """dtype: of every tensor but those of the names as_float32. unpack: called on several threads. Raises GgufError
        or OSError."""
        self._tensors = tensors_of(files)
        self._dtype, self._as_float32 = dtype, frozenset(as_float32)
        self._unpack = unpack

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        dtype = torch.float32 if name in self._as_float32 else self._dtype
        pieces = [_read(piece, dtype, self._unpack) for piece in self._tensors[name].pieces]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    @property
    def description(self) -> str:
        """For the log: the types in the files, and the type they are converted to."""
        read_as = str(self._dtype).removeprefix("torch.")
        infos = {piece.name: piece.info for tensor in self._tensors.values() for piece in tensor.pieces}
        counts = Counter(info.type.name for info in infos.values())
        parts = [f"{count} {name}" for name, count in counts.most_common()]
        return f"{len(infos)} tensors ({', '.join(parts)}) read as {read_as}"


def _read(tensor: ModelTensor, dtype: torch.dtype, unpack: Unpack) -> torch.Tensor:
    raw = mapped_rows(tensor)
    result = torch.empty(tensor.shape[::-1] if tensor.is_transposed else tensor.shape, dtype=dtype)
    flat = result.view(len(raw), -1)
    at_once = max(_CHUNK // flat.shape[1], 1)
    starts = range(0, len(raw), at_once)

    def values(start: int) -> Floats:
        rows = raw[start : start + at_once]
        found = unpack(tensor.info.type.name, rows)
        return _values(rows, tensor) if found is None else found

    for start, found in zip(starts, _in_turn(values, starts), strict=True):
        flat[start : start + at_once] = torch.from_numpy(found if tensor.undo is None else tensor.undo(found))
    if tensor.rows is not None:
        result = result[torch.from_numpy(tensor.rows.of(len(result)))]
    if tensor.is_transposed:
        result = result.t()
    return result if tensor.columns is None else result[:, torch.from_numpy(tensor.columns.of(result.shape[1]))]


def _in_turn(make: Callable[[int], T], starts: Sequence[int]) -> Iterator[T]:
    """The results of `make` for each start, computed by several threads, with at most as many in memory as there are
    threads."""
    if len(starts) == 1:
        yield make(starts[0])
        return
    num_threads = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(num_threads) as threads:
        for first in range(0, len(starts), num_threads):
            yield from threads.map(make, starts[first : first + num_threads])


def _values(raw: Bytes, tensor: ModelTensor) -> Floats:
    from gguf import GGMLQuantizationType, quants

    kind = tensor.info.type.name
    with np.errstate(all="ignore"):  # a file may contain infinities
        if kind in ("F32", "F16"):
            return np.ascontiguousarray(raw).view("<f4" if kind == "F32" else "<f2").astype(np.float32)
        one_row = np.ascontiguousarray(raw).reshape(1, -1)  # quants converts only a few rows at a time, however short
        values: Floats = quants.dequantize(one_row, GGMLQuantizationType[kind])
        return values.reshape(len(raw), -1)
