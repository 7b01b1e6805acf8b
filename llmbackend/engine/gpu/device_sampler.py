"""From logits to tokens on the device, without waiting for it.

Used by the runner on an accelerator. Invariants: definitions and tokens are those of engine/sampling, except if the
last bits of a float decide (see `DeviceSampler`); a sample depends, bit by bit, only on its logits, its row's request
and its row's tokens; the settings of a row are on the device before its first sample, even if an intermediate step was
abandoned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
from triton import knobs

from ..messages import InferRequest, SamplingParams
from ..sampling.rows import RowEdits, SampleLogprobs, SamplingRows, sampled_tokens
from ..step import Int32Array, RowTable, SampledTokens, StepPlan
from ..token_masks import PendingMasks, TokenMasks, all_tokens
from .device import Device
from .device_rows import DeviceRows
from .kernels import narrowing, ranked_sampling, sampling
from .kernels.ranking import CANDIDATES, LOWEST_KEY
from .kernels.sampling import BLOCK, NUM_WORDS, RECORD

_BLOCKS_AT_ONCE = sampling.BLOCKS_AT_ONCE
"""Blocks of the vocabulary handled by each program that only copies or summarises."""


@dataclass(slots=True, eq=False)
class _Changes:
    """What must be copied to the device before it samples."""

    rows: set[int]
    """The rows of these records."""
    records: torch.Tensor | None
    """int64 [rows, 1 + words]: the row's number, then its record."""
    edits: torch.Tensor | None
    """int32 [2, n]: the ids and values (float32 bits) shared by all rows; None = unchanged."""
    sent: bool = False


@dataclass(frozen=True, slots=True)
class _Features:
    """What the rows need beyond tokens from the whole distribution."""

    num_edited: int
    """Samples that may change their logits."""
    limited: bool
    num_logprobs: int
    """The maximum over the rows; -1 = none."""


class DeviceSampler:
    """Implements `StepSampler` (gpu_runner.py). Owns the settings of all rows, on the host and on the device.

    Tokens are those of `Sampler` for the same logits, seeds and positions: uniform numbers, edits, divisions by the
    temperature, the order of equal logits and top_k are equal bit by bit. Weights are float32 exponentials (the
    device's may differ from the CPU's in the last bits), summed in float64 in another order: if a draw, or the end of
    top_p or min_p, is within about 1e-6 of the border between two tokens, either may be chosen. On one device the same
    logits give the same token whatever else is sampled; the settings of other rows may select another build of a
    kernel, but that changes only the last bit of float64 sums.

    A step without limits, edits and logprobs is two launches.
    """

    max_steps_in_flight = 2

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        device: torch.device | str,
        max_samples: int = 0,
    ) -> None:
        """max_samples: of a step, if that may exceed max_num_seqs. Raises torch.OutOfMemoryError."""
        self._rows = SamplingRows(max_num_seqs, vocab_size, eos_token_ids)
        self._device = torch.device(device)
        self._dirty: set[int] = set(range(max_num_seqs))
        self.is_unused = True
        """Whether no row was ever added."""
        self._unsent: list[_Changes] = []
        self._edits_changed = True
        self._spans: dict[int, tuple[int, int, int, int]] = {}
        """By row: begin and end of its biases, then of its stops, in the shared lists."""
        self._on_device = _DeviceState(max_num_seqs, vocab_size, self._device, max_samples)

    def add_row(self, row: int, request: InferRequest) -> None:
        """Raises ValueError naming field, value and what was expected."""
        if request.sampling.logprob_token_ids:
            raise ValueError("'logprob_token_ids' is not supported on a GPU, expected null")
        if request.sampling.bad_words:  # the host does not know the preceding tokens when it launches a step
            raise ValueError("'bad_words' contains a word of several tokens, expected single-token words on a GPU")
        self._rows.add(row, request)
        self.is_unused = False
        self._edits_changed |= row in self._rows.edits
        self._dirty.add(row)

    def remove_row(self, row: int) -> None:
        self._rows.remove(row)
        self._dirty.add(row)

    def begin(self, plan: StepPlan, table: RowTable) -> PreparedSampling:
        return self.prepare(plan.samples(table)[0], plan.masks)

    def prepare(self, sampled_rows: Int32Array | None = None, masks: PendingMasks | None = None) -> PreparedSampling:
        """Reads everything that the next `sample` needs from the host, except the masks (`complete`). The result is
        used at most once; the next step may be prepared before this one is used. sampled_rows: the row of each sample,
        for `result`."""
        rows = self._rows
        most_logprobs = max((int(rows.num_logprobs[row]) for row in rows.with_logprobs), default=-1)
        features = _Features(self._num_edited(sampled_rows), bool(rows.limited), most_logprobs)
        return PreparedSampling(self, self._on_device, self._changes(), features, sampled_rows, masks)

    def compile(self, logits: torch.Tensor, token_table: torch.Tensor, num_prompt_tokens: torch.Tensor) -> None:
        """Device work: runs every sampling variant once while no row is used, so that no request waits for a compiler
        and memory for this many samples is allocated. Arguments as in PreparedSampling.sample."""
        sampled_rows = np.arange(len(logits), dtype=np.int32) % np.int32(self._rows.max_num_seqs)
        rows, num_rows = torch.from_numpy(sampled_rows).to(self._device), int(sampled_rows.max()) + 1
        ways = SamplingParams(), SamplingParams(top_p=0.5, logprobs=1), SamplingParams(top_p=0.5, presence_penalty=1.0)
        for way in ways:
            for row in range(num_rows):
                self.add_row(row, InferRequest(request_id="", prompt_token_ids=(), sampling=way))
            words = all_tokens(self._rows.vocab_size)[np.newaxis]
            prepared = self.prepare(sampled_rows, TokenMasks(np.zeros(len(logits), np.int32), words))
            prepared.complete()
            prepared.sample(logits, rows, torch.ones_like(rows), token_table, num_prompt_tokens)
        for row in range(num_rows):
            self.remove_row(row)

    def _num_edited(self, sampled_rows: Int32Array | None) -> int:
        """Number of samples that may change their logits, drafts included."""
        edited = self._rows.edits
        if sampled_rows is None or not edited:
            return len(edited)
        return max(len(edited), sum(row in edited for row in sampled_rows.tolist()))

    def _changes(self) -> _Changes:
        for abandoned in self._unsent:
            if not abandoned.sent:
                self._dirty |= abandoned.rows
                self._edits_changed |= abandoned.edits is not None
        edits = self._edit_lists() if self._edits_changed else None
        rows = sorted(self._dirty)
        changes = _Changes(set(rows), self._records(rows) if rows else None, edits)
        self._unsent = [changes] if rows or edits is not None else []
        self._dirty.clear()
        self._edits_changed = False
        return changes

    def _records(self, rows: list[int]) -> torch.Tensor:
        records, all_rows = np.zeros(len(rows), RECORD), self._rows
        for name in ("temperature", "seed", "top_k", "top_p", "min_p", "num_logprobs"):
            records[name] = getattr(all_rows, name)[rows]
        for i, row in enumerate(rows):
            if (edits := all_rows.edits.get(row)) is not None:
                _write_edits(records[i], edits, self._spans[row])
        words = records.view(np.int64).reshape(len(rows), NUM_WORDS)
        return _staged(np.concatenate((np.array(rows, np.int64)[:, None], words), axis=1), self._device)

    def _edit_lists(self) -> torch.Tensor:
        """The biases and stops of all rows, row by row; sets `_spans`."""
        ids: list[npt.NDArray[np.int64]] = [np.zeros(1, np.int64)]
        values: list[npt.NDArray[np.float32]] = [np.zeros(1, np.float32)]
        bias_begin = 1
        for row, edits in self._rows.edits.items():
            bias_end = bias_begin + len(edits.bias_ids)
            stop_end = bias_end + len(edits.stop_ids)
            self._spans[row] = bias_begin, bias_end, bias_end, stop_end
            ids += edits.bias_ids, edits.stop_ids
            values += edits.bias_values, np.zeros(len(edits.stop_ids), np.float32)
            bias_begin = stop_end
            self._dirty.add(row)
        lists = np.stack((np.concatenate(ids).astype(np.int32), np.concatenate(values).view(np.int32)))
        return _staged(lists, self._device)


def _staged(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Host memory that can be copied asynchronously; torch keeps it until the copy is complete."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _write_edits(record: np.void, edits: RowEdits, spans: tuple[int, int, int, int]) -> None:
    record["has_edits"], record["min_tokens"] = 1, edits.min_tokens
    record["repetition_penalty"] = np.float32(edits.repetition_penalty)
    record["frequency_penalty"], record["presence_penalty"] = edits.frequency_penalty, edits.presence_penalty
    record["bias_begin"], record["bias_end"], record["stop_begin"], record["stop_end"] = spans


def tokens_on_host(rows: Int32Array, samples: Sequence[torch.Tensor]) -> SampledTokens:
    """The result of PreparedSampling.sample for these rows, copied to the host; empty if nothing was sampled."""
    if not samples:
        return SampledTokens(np.empty(0, np.int32))
    token_ids, *logprobs = (tensor.numpy() for tensor in samples)
    return sampled_tokens(rows, token_ids, SampleLogprobs(*logprobs) if logprobs else None)


class _DeviceState:
    """The records on the device, and memory for copies of logits while any row has edits."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device, max_samples: int) -> None:
        self.vocab_size, self.device, self.max_samples = vocab_size, device, max(max_num_seqs, max_samples)
        self.records = torch.zeros((max_num_seqs, NUM_WORDS), dtype=torch.int64, device=device)
        self.edits = torch.zeros((2, 1), dtype=torch.int32, device=device)
        self.no_slots = torch.empty(0, dtype=torch.int32, device=device)
        self.no_copies = self._copies = torch.empty((0, vocab_size), device=device)
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)

    def update(self, changes: _Changes) -> None:
        """Device work."""
        if changes.edits is not None:
            self.edits = changes.edits.to(self.device, non_blocking=True)
        if changes.records is not None:
            records = changes.records.to(self.device, non_blocking=True)
            self.records.index_copy_(0, records[:, 0], records[:, 1:])
        changes.sent = True

    def copies(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for changed logits, float32 [count, vocab_size], and for counts of tokens, int32, all zero."""
        if len(self._copies) < count:
            room = triton.next_power_of_2(count)
            self._copies = torch.empty((room, self.vocab_size), device=self.device)
            self._counts = torch.zeros((room, self.vocab_size), dtype=torch.int32, device=self.device)
        return self._copies[:count], self._counts[:count]

    def forget_copies(self) -> None:
        if len(self._copies):
            self._copies, self._counts = self._copies[:0].clone(), self._counts[:0].clone()


class PreparedSampling:
    """The sampling of one step with all its host data: a `StepSampling` (gpu_runner.py)."""

    def __init__(
        self,
        sampler: DeviceSampler,
        state: _DeviceState,
        changes: _Changes,
        features: _Features,
        sampled_rows: Int32Array | None,
        masks: PendingMasks | None,
    ) -> None:
        self._pending = masks
        self._masks: tuple[torch.Tensor, torch.Tensor] | None = None
        self._sampler, self._state, self._changes, self._features = sampler, state, changes, features
        self._sampled_rows = sampled_rows
        self._fetched: list[torch.Tensor] = []

    def complete(self) -> None:
        """Copies the masks, because their host memory is reused."""
        if self._pending is not None:
            masks, device = self._pending.result(), self._state.device
            index, words = masks.index.copy(), masks.words.view(np.int32).copy()
            self._masks = _staged(index, device), _staged(words, device)

    def enqueue(self, logits: torch.Tensor, rows: DeviceRows, device: Device) -> None:
        where = rows.samples(len(logits))
        if self._sampler.is_unused and not knobs.runtime.interpret:
            # The largest step, whose memory is measured at engine start.
            self._sampler.compile(logits, rows.token_table, rows.num_prompt_tokens)
        samples = self.sample(logits, *where, rows.token_table, rows.num_prompt_tokens)
        rows.put(*where, samples[0])
        self._fetched = [device.fetch(tensor) for tensor in samples]

    def result(self) -> SampledTokens:
        assert self._sampled_rows is not None, "prepared without the rows of its samples"
        return tokens_on_host(self._sampled_rows, self._fetched)

    def sample(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        token_table: torch.Tensor,
        num_prompt_tokens: torch.Tensor,
    ) -> list[torch.Tensor]:
        """Device work: the token at each (row, position) from logits [samples, vocab_size or more], any float type, not
        modified. rows and positions int32 [samples]: a row with drafts occurs several times; padding comes last (row 0,
        or a negative one, whose token is NO_TOKEN). token_table int32 [max_num_seqs, max_model_len] and
        num_prompt_tokens int32 [max_num_seqs]: as in RowTable.

        Returns token ids int32 [samples], NO_TOKEN for padding and if logits are not finite; and, if any row requested
        logprobs, the fields of SampleLogprobs.
        """
        self._state.update(self._changes)
        if not len(rows):
            return [torch.empty(0, dtype=torch.int32, device=logits.device)]
        launches = _Launches(self._state, self._features, logits, rows, positions)
        if self._features.num_edited:
            launches.edit(token_table, num_prompt_tokens)  # every row with a mask has edits
            if self._masks is not None:
                launches.mask(*self._masks)
        else:
            self._state.forget_copies()
        launches.summarise()
        launches.choose()
        if self._features.limited:
            launches.draw_limited()
        return [launches.token_ids, *(launches.logprobs() if self._features.num_logprobs >= 0 else ())]


class _Launches:
    """The launches of one step and the memory between them."""

    def __init__(
        self,
        state: _DeviceState,
        features: _Features,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        self._state, self._features = state, features
        self._logits, self._stride = logits, logits.stride(0)
        self._rows, self._positions = rows, positions
        self._num_samples, self._vocab_size = len(rows), state.vocab_size
        self._num_blocks = triton.cdiv(self._vocab_size, BLOCK.value)
        self._padded = triton.next_power_of_2(self._num_blocks)
        self._shift = self._vocab_size.bit_length()
        self._edited = features.num_edited > 0
        self._slots, self._copies = state.no_slots, state.no_copies  # read only if there are edits
        summaries = (self._num_samples + features.num_edited, self._num_blocks)
        self._peaks = self._new(summaries, torch.float32)
        self._masses = self._new(summaries, torch.float64)
        self._unit_masses = self._new(summaries, torch.float64) if features.num_logprobs >= 0 else self._masses
        self.token_ids = self._new((self._num_samples,), torch.int32)

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._logits.device)

    def edit(self, token_table: torch.Tensor, num_prompt_tokens: torch.Tensor) -> None:
        """Copies the logits of rows with edits and changes the copies."""
        count = self._features.num_edited
        self._copies, counts = self._state.copies(count)
        self._slots = self._new((self._num_samples,), torch.int32)
        sampling.slots_kernel[(1,)](
            self._rows, self._state.records, self._slots, self._num_samples, count,
            SAMPLES_PADDED=triton.next_power_of_2(max(self._num_samples, self._state.max_samples)),
        )  # fmt: skip
        sampling.copy_kernel[self._tiles()](
            self._logits, self._stride, self._slots, self._copies, self._vocab_size, BLOCKS=_BLOCKS_AT_ONCE
        )
        ids, values = self._state.edits[0], self._state.edits[1].view(torch.float32)
        sampling.edit_kernel[(self._num_samples,)](
            self._rows, self._positions, self._state.records, self._slots, self._copies, counts, ids, values,
            token_table, token_table.stride(0), num_prompt_tokens, self._vocab_size,
        )  # fmt: skip

    def mask(self, index: torch.Tensor, words: torch.Tensor) -> None:
        """Forbids tokens in the changed copies. index int32 [samples], words int32 [n, …]: as in TokenMasks."""
        index, words = (tensor.to(self._logits.device, non_blocking=True) for tensor in (index, words))
        sampling.mask_kernel[self._tiles()](
            self._slots, self._copies, index, words, words.stride(0), self._vocab_size, len(index),
            BLOCKS=_BLOCKS_AT_ONCE,
        )  # fmt: skip

    def summarise(self) -> None:
        """Summarises the logits of all samples, and the changed copies."""
        for edited in (False, True)[: 1 + self._edited]:
            sampling.summarise_kernel[self._tiles()](
                self._logits, self._stride, self._copies, self._slots, self._rows, self._state.records,
                self._peaks, self._masses, self._unit_masses, self._vocab_size, self._num_blocks, self._num_samples,
                BLOCKS=_BLOCKS_AT_ONCE, EDITED=edited,
                UNIT_MASSES=self._features.num_logprobs >= 0 and not edited, num_warps=8,
            )  # fmt: skip

    def choose(self) -> None:
        sampling.choose_kernel[(self._num_samples,)](
            self._logits, self._stride, self._copies, self._slots, self._rows, self._positions, self._state.records,
            self._peaks, self._masses, self.token_ids, self._vocab_size, self._num_blocks, self._num_samples,
            BLOCKS_PADDED=self._padded, EDITED=self._edited,
        )  # fmt: skip

    def draw_limited(self) -> None:
        """Many programs narrow flat rows down to the end of the draw; then one program per row draws."""
        source = self._logits, self._stride, self._copies, self._slots, self._rows
        records, peaks, masses = self._state.records, self._peaks, self._masses
        sizes = self._vocab_size, self._num_blocks, self._num_samples
        samples, pivots = self._num_samples, narrowing.num_pivots(self._vocab_size)
        splits = triton.cdiv(self._num_blocks, narrowing.SPLIT_BLOCKS)
        plans = self._new((samples, narrowing.PLAN_WORDS), torch.int64)
        bounds = self._new((samples, pivots), torch.int64)
        bins = self._new((samples, 2, narrowing.ROOM), torch.int64)
        counts = self._new((samples, splits, pivots), torch.int32)
        sums = self._new((samples, splits, pivots), torch.float64)
        common = {"SHIFT": self._shift, "EDITED": self._edited}
        narrowing.choose_pivots_kernel[(samples, narrowing.RANKING_PROGRAMS)](
            *source, records, peaks, masses, self.token_ids, plans, bounds, *sizes,
            BLOCKS_PADDED=self._padded, PIVOTS=pivots, OWN=narrowing.keys_to_rank(pivots), **common,
        )  # fmt: skip
        narrowing.measure_splits_kernel[(samples, splits)](
            *source, records, peaks, plans, bounds, counts, sums, *sizes,
            PIVOTS=pivots, SPLIT_BLOCKS=narrowing.SPLIT_BLOCKS, num_warps=8, **common,
        )  # fmt: skip
        narrowing.collect_bins_kernel[(samples, triton.cdiv(splits, narrowing.SPLITS_TO_COLLECT))](
            *source, self._positions, records, plans, bounds, counts, sums, bins, self._vocab_size, splits,
            PIVOTS=pivots, SPLITS_PADDED=triton.next_power_of_2(splits), SPLITS=narrowing.SPLITS_TO_COLLECT,
            SPLIT_BLOCKS=narrowing.SPLIT_BLOCKS, ROOM=narrowing.ROOM, num_warps=8, **common,
        )  # fmt: skip
        ranked_sampling.draw_limited_kernel[(samples,)](
            *source, self._positions, records, peaks, masses, plans, bins, *self._scratch(), self.token_ids, *sizes,
            BLOCKS_PADDED=self._padded, ROOM=narrowing.ROOM, num_warps=16, **common,
        )  # fmt: skip

    def logprobs(self) -> tuple[torch.Tensor, ...]:
        """The fields of SampleLogprobs."""
        most, samples = self._features.num_logprobs, self._num_samples
        # What does not fit among the collected keys is sorted by torch.
        collected = most if most <= CANDIDATES.value else 0
        asked, ranks = self._new((samples,), torch.int32), self._new((samples,), torch.int32)
        own, norms = self._new((samples,), torch.float32), self._new((samples,), torch.float64)
        keys = torch.full((samples, collected), LOWEST_KEY.value, dtype=torch.int64, device=self._logits.device)
        ranked_sampling.logprobs_kernel[(samples,)](
            self._logits, self._stride, self._rows, self._state.records, self._peaks, self._unit_masses,
            *self._scratch(), self.token_ids, asked, own, ranks, norms, keys, collected,
            self._vocab_size, self._num_blocks, BLOCKS_PADDED=self._padded, SHIFT=self._shift, num_warps=16,
        )  # fmt: skip
        logits = self._logits[:, : self._vocab_size]
        if collected or not most:
            keys = keys.sort(dim=-1, descending=True).values
            top_ids = self._vocab_size - 1 - (keys & ((1 << self._shift) - 1))
            top_ids = top_ids.clamp(min=0)
            top = logits.gather(1, top_ids)
        else:
            top, top_ids = (part[:, :most] for part in logits.sort(dim=-1, descending=True, stable=True))
        top = (top.double() - norms[:, None]).float()
        return asked, own, ranks, top_ids.int(), top

    def _tiles(self) -> tuple[int, int]:
        return self._num_samples, triton.cdiv(self._num_blocks, _BLOCKS_AT_ONCE)

    def _scratch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for the blocks and candidates of each sample."""
        samples = self._num_samples
        return self._new((samples, self._padded), torch.int32), self._new((samples, CANDIDATES.value), torch.int64)
