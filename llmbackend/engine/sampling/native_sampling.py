"""Samples tokens and logprobs from logits on CPU, with native/sampling.h.

Used by the sampler. Invariant: a step costs the same few microseconds of Python however many rows it samples, because
sampling parameters are in permanent arrays (sampling/rows.py).
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_float, c_int32, c_int64, c_void_p

import numpy as np
import numpy.typing as npt

from ..kernels.library import NativeKernels
from ..kernels.operations import Type
from ..step import Int32Array, RowTable
from ..token_masks import TokenMasks
from .rows import RowEdits, SampleLogprobs, SamplingRows

Float32Array = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]


class _Edits(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("bias_ids", "bias_values", "stop_ids")),
        *((name, c_int32) for name in ("num_biases", "num_stops", "min_tokens")),
        ("repetition_penalty", c_float),
        *((name, c_double) for name in ("frequency_penalty", "presence_penalty")),
    ]


class _SamplingRows(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("temperature", "top_k", "top_p", "min_p", "seed", "num_logprobs", "edits")),
        *((name, c_void_p) for name in ("token_ids", "num_prompt_tokens")),
        ("token_ids_stride", c_int64),
    ]


class _Samples(ctypes.Structure):
    _fields_ = [
        ("logits", c_void_p),
        ("stride", c_int64),
        *((name, c_void_p) for name in ("rows", "positions", "token_ids")),
        *((name, c_void_p) for name in ("logprobs", "ranks", "top_ids", "top_logprobs")),
        ("masks", c_void_p),
        ("mask_index", c_void_p),
        *((name, c_int32) for name in ("top_stride", "num_samples", "vocab", "logits_type")),
    ]


class NativeSampling:
    """Samples with the native kernels; only one thread at a time calls it and them."""

    def __init__(self, kernels: NativeKernels, rows: SamplingRows) -> None:
        """Raises OSError if the library was built from different sources."""
        self._kernels = kernels
        self._num_logprobs, self._with_logprobs = rows.num_logprobs, rows.with_logprobs
        self._function = kernels.library.functions.llmb_sample
        self._function.restype, self._function.argtypes = c_int32, [c_void_p] * 3
        _check_sizes(kernels)
        self._edits = np.zeros(rows.max_num_seqs, np.uintp)
        """By row, the address of its _Edits, or 0."""
        self._kept: dict[int, tuple[object, ...]] = {}
        """By row: keeps alive what its edits point to."""
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "num_logprobs")
        arrays = {name: getattr(rows, name).ctypes.data for name in names}
        self._rows = _SamplingRows(**arrays, edits=self._edits.ctypes.data)
        self._table: RowTable | None = None
        self._samples = _Samples(vocab=rows.vocab_size)

    def set_edits(self, row: int, edits: RowEdits | None) -> None:
        self._kept.pop(row, None)
        self._edits[row] = 0
        if edits is None:
            return
        bias_ids, stop_ids = edits.bias_ids.astype(np.int32), edits.stop_ids.astype(np.int32)
        native = _Edits(
            bias_ids.ctypes.data, edits.bias_values.ctypes.data, stop_ids.ctypes.data, len(bias_ids), len(stop_ids),
            edits.min_tokens, edits.repetition_penalty, edits.frequency_penalty, edits.presence_penalty,
        )  # fmt: skip
        self._kept[row] = (native, bias_ids, stop_ids, edits)
        self._edits[row] = ctypes.addressof(native)

    def sample(
        self, rows: Int32Array, positions: Int32Array, logits: Float32Array, table: RowTable, masks: TokenMasks | None
    ) -> tuple[Int32Array, SampleLogprobs | None]:
        """As TokenChooser.sample; the logits of a row must be contiguous. Raises MemoryError."""
        assert logits.dtype == np.float32 and logits.strides[-1] == 4, "logits are rows of float32"
        address, stride = int(logits.ctypes.data), logits.strides[0] // 4
        return self.sample_from(address, stride, Type.FLOAT32, rows, positions, table, masks)

    def take(self, logits: Float32Array, samples: Int64Array, token_ids: Int64Array) -> Float32Array:
        values: Float32Array = logits[samples, token_ids]
        return values

    def sample_from(
        self, address: int, stride: int, kind: Type, rows: Int32Array, positions: Int32Array, table: RowTable,
        masks: TokenMasks | None,
    ) -> tuple[Int32Array, SampleLogprobs | None]:  # fmt: skip
        """As TokenChooser.sample, from logits of this type at this address; stride: elements from row to row. Raises
        MemoryError."""
        rows, positions = (np.ascontiguousarray(array, np.int32) for array in (rows, positions))
        token_ids = np.empty(len(rows), np.int32)
        samples = self._samples
        samples.logits, samples.stride, samples.logits_type = address, stride, kind
        samples.rows, samples.positions = rows.ctypes.data, positions.ctypes.data
        samples.token_ids, samples.num_samples = token_ids.ctypes.data, len(rows)
        samples.masks = samples.mask_index = None
        if masks is not None:
            samples.masks, samples.mask_index = masks.words.ctypes.data, masks.index.ctypes.data
        logprobs = self._room_for_logprobs(rows) if self._with_logprobs else None
        self._point_to(table)
        if self._function(self._kernels.pointer, ctypes.byref(self._rows), ctypes.byref(samples)):
            raise MemoryError("scratch memory for sampling could not be allocated")
        return token_ids, logprobs

    def _room_for_logprobs(self, rows: Int32Array) -> SampleLogprobs:
        found, samples = SampleLogprobs.empty(self._num_logprobs[rows]), self._samples
        samples.logprobs, samples.ranks = found.own.ctypes.data, found.ranks.ctypes.data
        samples.top_ids, samples.top_logprobs = found.top_ids.ctypes.data, found.top.ctypes.data
        samples.top_stride = found.top.shape[1]
        return found

    def _point_to(self, table: RowTable) -> None:
        if table is self._table:
            return
        self._table = table
        self._rows.token_ids = table.token_ids.ctypes.data
        self._rows.num_prompt_tokens = table.num_prompt_tokens.ctypes.data
        self._rows.token_ids_stride = table.token_ids.strides[0] // table.token_ids.itemsize


def _check_sizes(kernels: NativeKernels) -> None:
    sizes, structures = (c_int32 * 3)(), (_Edits, _SamplingRows, _Samples)
    kernels.library.functions.llmb_sampling_sizes(sizes)
    if list(sizes) != [ctypes.sizeof(structure) for structure in structures]:
        raise OSError("the native sampling was built from different sources: reinstall this package")
