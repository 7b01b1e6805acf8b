"""Samples from torch tensors: in plain torch, the reference, or with the native kernels if they are on the CPU.

Used for models that run as modules, and for devices without a sampler of their own. Invariants: plain greedy rows cost
one argmax; a row's token is a function of its logits, one uniform number and its own limits; equal logits are ordered
by token id, so the result does not depend on a sorting algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from ..kernels.library import NativeKernels
from ..kernels.weights import TYPE_OF
from ..step import NO_TOKEN, Int32Array, RowTable
from ..token_masks import FORBIDDEN, TokenMasks, as_bools
from .native_sampling import NativeSampling
from .rows import RowEdits, SampleLogprobs, SamplingRows, uniform
from .sampler import Sampler

# Truncated rows first look at this many of the most likely tokens; the whole vocabulary is sorted only if the kept set
# extends beyond them.
_NUM_CANDIDATES = 1024
_CDF_BLOCK = 1024
_MAX_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Limits:
    """Truncation per row. Applied as in vLLM: min_p, then top_k, then top_p."""

    top_k: torch.Tensor
    """int [rows]: keeps this many of the most likely tokens; 0 = no limit."""
    top_p: torch.Tensor
    """float64 [rows]: keeps the fewest most likely tokens whose share of what is left reaches this; 1 = no limit."""
    min_p: torch.Tensor
    """float64 [rows]: keeps tokens at least this many times as likely as the most likely one; 0 = no limit."""

    def rows(self, index: torch.Tensor) -> Limits:
        return Limits(self.top_k[index], self.top_p[index], self.min_p[index])


def likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit of each row and its token id, the first among equals; NaN counts as the largest.

    In two stages, over blocks of tokens and then within one, because on CPU only a plain maximum over contiguous
    elements is vectorised.
    """
    rows, vocab_size = logits.shape
    if vocab_size % _MAX_BLOCK or not rows:
        plain = logits.max(dim=-1)
        return plain.values, plain.indices
    blocks = logits.reshape(rows, -1, _MAX_BLOCK)
    peaks, block = blocks.amax(-1).max(dim=-1)
    inside = torch.take_along_dim(blocks, block[:, None, None], 1)[:, 0].max(dim=-1).indices
    return peaks, block * _MAX_BLOCK + inside


def draw(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Token ids int64 [rows] for float32 logits [rows, vocab] and float64 uniforms [rows], without limits.

    Inverts the distribution function in the order of token ids: first over blocks of tokens, then within one block.
    """
    weights = torch.exp(logits - logits.amax(-1, keepdim=True))
    blocks = functional.pad(weights, (0, -weights.shape[-1] % _CDF_BLOCK)).view(len(weights), -1, _CDF_BLOCK)
    mass = blocks.sum(-1, dtype=torch.float64)
    upto = mass.cumsum(-1)
    target = uniforms[:, None] * upto[:, -1:]
    block = _first_above(upto, target)
    inside = torch.take_along_dim(blocks, block[:, None, None], 1)[:, 0].double().cumsum(-1)
    before = torch.take_along_dim(upto - mass, block[:, None], 1)
    return block * _CDF_BLOCK + _first_above(inside, target - before)


def draw_limited(logits: torch.Tensor, uniforms: torch.Tensor, limits: Limits) -> torch.Tensor:
    """As `draw`, among the tokens that the limits keep, in descending order of likelihood."""
    num_candidates = min(_NUM_CANDIDATES, logits.shape[-1])
    tokens, complete = _draw_among(logits, uniforms, limits, num_candidates)
    redo = torch.nonzero(~complete)[:, 0]
    if len(redo):
        tokens[redo], _ = _draw_among(logits[redo], uniforms[redo], limits.rows(redo), logits.shape[-1])
    return tokens


def most_likely(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest logits [rows, count] and their token ids, largest first, equal ones by ascending token id.

    Which of several equal logits at the end of the list are included is unspecified.
    """
    values, ids = torch.topk(logits, count, dim=-1, sorted=False)
    by_id = ids.argsort(-1)
    values, ids = values.gather(-1, by_id), ids.gather(-1, by_id)
    values, order = torch.sort(values, stable=True, dim=-1, descending=True)
    return values, ids.gather(-1, order)


def _draw_among(
    logits: torch.Tensor, uniforms: torch.Tensor, limits: Limits, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and whether `count` candidates sufficed to determine the kept set (bool [rows])."""
    values, ids = most_likely(logits, count)
    peak = values[:, :1]
    weights = torch.exp(values - peak).double()
    rank = torch.arange(count, device=logits.device)
    top_k = torch.where(limits.top_k > 0, limits.top_k, logits.shape[-1])
    kept = (weights >= limits.min_p[:, None]) & (rank < top_k[:, None])
    everything = torch.exp(logits - peak).sum(-1, dtype=torch.float64)
    unlimited = (limits.top_k == 0) & (limits.min_p == 0)
    total = torch.where(unlimited, everything, (weights * kept).sum(-1))
    cut_short = ~unlimited & kept[:, -1] & (top_k > count)
    kept &= weights.cumsum(-1) - weights < (limits.top_p * total)[:, None]
    kept[:, 0] = True
    last_kept = torch.take_along_dim(values, kept.sum(-1, keepdim=True) - 1, 1)
    complete = (~cut_short & (last_kept > values[:, -1:])[:, 0]) | (count == logits.shape[-1])
    upto = (weights * kept).cumsum(-1)
    chosen = _first_above(upto, uniforms[:, None] * upto[:, -1:])
    return ids.gather(-1, chosen[:, None])[:, 0], complete


def _first_above(upto: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Index of the first cumulative sum above the target [rows, 1]; never beyond the last entry with nonzero weight,
    which rounding could otherwise reach."""
    last_with_weight = (upto < upto[:, -1:]).sum(-1)
    return torch.minimum((upto <= target).sum(-1), last_with_weight)


Float32Array = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]


class TorchSampler(Sampler[torch.Tensor]):
    def __init__(
        self, max_num_seqs: int, vocab_size: int, eos_token_ids: Sequence[int], native: NativeKernels | None = None
    ) -> None:
        """native: samples from logits, which are on the CPU; without it, torch does."""
        rows = SamplingRows(max_num_seqs, vocab_size, eos_token_ids)
        super().__init__(rows, TorchSampling(rows) if native is None else NativeTensorSampling(native, rows))


class NativeTensorSampling:
    """Samples with the native kernels from CPU tensors of any float type."""

    def __init__(self, kernels: NativeKernels, rows: SamplingRows) -> None:
        self._native = NativeSampling(kernels, rows)

    def set_edits(self, row: int, edits: RowEdits | None) -> None:
        self._native.set_edits(row, edits)

    def take(self, logits: torch.Tensor, samples: Int64Array, token_ids: Int64Array) -> Float32Array:
        return _take(logits, samples, token_ids)

    def sample(
        self, rows: Int32Array, positions: Int32Array, logits: torch.Tensor, table: RowTable, masks: TokenMasks | None
    ) -> tuple[Int32Array, SampleLogprobs | None]:
        if logits.dtype not in TYPE_OF or logits.stride(-1) != 1:
            logits = logits.float().contiguous()
        address, kind = logits.data_ptr(), TYPE_OF[logits.dtype]
        return self._native.sample_from(address, logits.stride(0), kind, rows, positions, table, masks)


def _take(logits: torch.Tensor, samples: Int64Array, token_ids: Int64Array) -> Float32Array:
    index = (torch.from_numpy(array).to(logits.device) for array in (samples, token_ids))
    values: Float32Array = logits[tuple(index)].float().cpu().numpy()
    return values


class TorchSampling:
    """The reference, and the sampler for devices without their own."""

    def __init__(self, rows: SamplingRows) -> None:
        self._rows = rows

    def set_edits(self, row: int, edits: RowEdits | None) -> None:
        """Edits are read from the rows."""

    def take(self, logits: torch.Tensor, samples: Int64Array, token_ids: Int64Array) -> Float32Array:
        return _take(logits, samples, token_ids)

    def sample(
        self, rows: Int32Array, positions: Int32Array, logits: torch.Tensor, table: RowTable, masks: TokenMasks | None
    ) -> tuple[Int32Array, SampleLogprobs | None]:
        logits = logits[:, : self._rows.vocab_size]
        peaks, peak_ids = likeliest(logits)
        token_ids = peak_ids.cpu().numpy().astype(np.int32)
        # A NaN or an infinity shows in the maximum.
        sound = torch.isfinite(peaks).cpu().numpy()
        random = self._rows.temperature[rows] > 0
        edited = np.array([row in self._rows.edits for row in rows.tolist()], np.bool_)
        index = np.flatnonzero((random | edited) & sound)
        if len(index):
            work = logits[torch.from_numpy(index).to(logits.device)].float()
            self._edit(rows[index], positions[index], work, table)
            if masks is not None:
                apply_masks(work, masks, masks.index[index])
            token_ids[index] = self._choose(rows[index], positions[index], work)
        token_ids[~sound] = NO_TOKEN
        return token_ids, self._logprobs(rows, token_ids, logits) if self._rows.with_logprobs else None

    def _choose(self, rows: Int32Array, positions: Int32Array, logits: torch.Tensor) -> Int64Array:
        """Tokens for rows that are not plainly greedy; `logits` is an edited float32 copy."""
        chosen: Int64Array = likeliest(logits)[1].cpu().numpy()
        index = np.flatnonzero(self._rows.temperature[rows])
        if not len(index):
            return chosen
        rows, positions = rows[index], positions[index]
        device = logits.device
        scaled = logits[torch.from_numpy(index).to(device)]
        scaled.div_(torch.from_numpy(self._rows.temperature[rows]).to(device)[:, None])
        uniforms = torch.from_numpy(uniform(self._rows.seed[rows], positions.astype(np.uint64))).to(device)
        chosen[index] = self._draw(rows, scaled, uniforms).cpu().numpy()
        return chosen

    def _edit(self, rows: Int32Array, positions: Int32Array, logits: torch.Tensor, table: RowTable) -> None:
        index = [i for i, row in enumerate(rows.tolist()) if row in self._rows.edits]
        if not index:
            return
        edits = [self._rows.edits[int(rows[i])] for i in index]
        outputs = [
            table.token_ids[row, table.num_prompt_tokens[row] : position]
            for row, position in zip(rows[index].tolist(), positions[index].tolist(), strict=True)
        ]
        if len(index) == len(rows):
            apply_edits(logits, edits, outputs)
            return
        where = torch.tensor(index, device=logits.device)
        part = logits[where]
        apply_edits(part, edits, outputs)
        logits[where] = part

    def _draw(self, rows: Int32Array, logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        columns = [array[rows] for array in (self._rows.top_k, self._rows.top_p, self._rows.min_p)]
        limited = (columns[0] > 0) | (columns[1] < 1.0) | (columns[2] > 0.0)
        if not limited.any():
            return draw(logits, uniforms)
        limits = Limits(*(torch.from_numpy(column).to(logits.device) for column in columns))
        if limited.all():
            return draw_limited(logits, uniforms, limits)
        tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        some, others = (torch.from_numpy(np.flatnonzero(m)).to(logits.device) for m in (limited, ~limited))
        tokens[some] = draw_limited(logits[some], uniforms[some], limits.rows(some))
        tokens[others] = draw(logits[others], uniforms[others])
        return tokens

    def _logprobs(self, rows: Int32Array, token_ids: Int32Array, logits: torch.Tensor) -> SampleLogprobs | None:
        asked = self._rows.num_logprobs[rows]
        index = np.flatnonzero(asked >= 0)
        if not len(index):
            return None
        raw = logits[torch.from_numpy(index).to(logits.device)].float()
        # The logprob of a sample without a token is never read.
        chosen = torch.from_numpy(np.maximum(token_ids[index], 0).astype(np.int64)).to(logits.device)[:, None]
        own = raw.gather(-1, chosen)
        norm = torch.logsumexp(raw, dim=-1, keepdim=True)
        ranks = (raw > own).sum(-1) + 1
        most = int(asked.max())
        values, ids = most_likely(raw, most) if most else (raw[:, :0], chosen[:, :0])
        columns = [column.cpu().numpy() for column in ((own - norm)[:, 0], ranks, ids, values - norm)]
        found = SampleLogprobs(asked, *columns)
        return found if len(index) == len(rows) else found.spread(index)


def apply_edits(logits: torch.Tensor, edits: Sequence[RowEdits], outputs: Sequence[Int32Array]) -> None:
    """Modifies logits float32 [rows, vocab] in place; outputs[i] are the output tokens so far of row i."""
    biased = [(i, edit.bias_ids, edit.bias_values) for i, edit in enumerate(edits) if len(edit.bias_ids)]
    if biased:
        rows, ids, values = _join(logits, biased)
        logits[rows, ids] += values
    early = [(i, edit.stop_ids) for i, edit in enumerate(edits) if len(outputs[i]) < edit.min_tokens]
    if early:
        rows, ids = _join(logits, early)
        logits[rows, ids] = float("-inf")
    _penalise_repetition(logits, edits, outputs)
    _penalise_output(logits, edits, outputs)


def apply_masks(logits: torch.Tensor, masks: TokenMasks, index: Int32Array) -> None:
    """Modifies logits float32 [samples, vocab] in place. index int32 [samples]: as in TokenMasks."""
    masked = np.flatnonzero(index >= 0)
    if len(masked):
        allowed = torch.from_numpy(as_bools(masks.words[index[masked]], logits.shape[1])).to(logits.device)
        where = torch.from_numpy(masked).to(logits.device)
        logits[where] = logits[where].masked_fill_(~allowed, FORBIDDEN)


def _penalise_repetition(logits: torch.Tensor, edits: Sequence[RowEdits], outputs: Sequence[Int32Array]) -> None:
    pieces = []
    for i, edit in enumerate(edits):
        if edit.repetition_penalty != 1.0:
            seen_ids = np.union1d(edit.prompt_ids, outputs[i]).astype(np.int64)
            pieces.append((i, seen_ids, np.full(len(seen_ids), edit.repetition_penalty, np.float32)))
    if pieces:
        rows, ids, penalties = _join(logits, pieces)
        seen = logits[rows, ids]
        logits[rows, ids] = torch.where(seen > 0, seen / penalties, seen * penalties)


def _penalise_output(logits: torch.Tensor, edits: Sequence[RowEdits], outputs: Sequence[Int32Array]) -> None:
    pieces = []
    for i, edit in enumerate(edits):
        if edit.frequency_penalty or edit.presence_penalty:
            used_ids, counts = np.unique(outputs[i], return_counts=True)
            amounts = edit.frequency_penalty * counts + edit.presence_penalty
            pieces.append((i, used_ids.astype(np.int64), amounts.astype(np.float32)))
    if pieces:
        rows, ids, penalties = _join(logits, pieces)
        logits[rows, ids] -= penalties


def _join(logits: torch.Tensor, pieces: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
    """Pieces (row, ids, *values) → one index tensor of rows, one of ids, and the values, on the logits' device."""
    rows = np.repeat([piece[0] for piece in pieces], [len(piece[1]) for piece in pieces]).astype(np.int64)
    columns = [rows, *(np.concatenate(column) for column in list(zip(*pieces, strict=True))[1:])]
    return [torch.from_numpy(column).to(logits.device) for column in columns]
