"""From logits to tokens, for all rows of a step at once, on the host: by the native kernels or by torch.

For: the model runners. Does not know: models, batches, stop rules. Invariants: a row's token depends on its logits, its
request and the tokens in its row alone; plain greedy rows cost one argmax; a broken row gets an error of its own; every
edit follows from the request and the row's tokens, so that a step can be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from ..bad_words import BadWords
from ..infer_request import BANNED_BIAS, InferRequest, TokenLogprobs
from ..kernels.library import NativeKernels
from ..kernels.sampling import NativeSampling
from ..step import NO_TOKEN, Int32Array, RowTable, SampledTokens
from ..token_masks import FORBIDDEN, TokenMasks, as_bools
from .drawing import Limits, draw, draw_limited, likeliest, most_likely
from .rows import RowEdits, SampleLogprobs, SamplingRows, sampled_tokens, uniform

Int64Array = npt.NDArray[np.int64]


class Sampler:
    def __init__(
        self, max_num_seqs: int, vocab_size: int, eos_token_ids: Sequence[int], native: NativeKernels | None = None
    ) -> None:
        """`native`: samples from logits that are on the CPU; without it, torch does."""
        self._rows = SamplingRows(max_num_seqs, vocab_size, eos_token_ids)
        self._bad_words: dict[int, tuple[BadWords, dict[int, float]]] = {}
        """By row; and the bias that its request has besides."""
        self._logprob_token_ids: dict[int, list[int]] = {}
        """By row, of the rows that ask for logprobs of tokens by their ids."""
        self._torch = TorchSampling(self._rows)
        self._native = None if native is None else NativeSampling(native, self._rows)

    def add_row(self, row: int, request: InferRequest) -> None:
        """Raises ValueError naming the field, its value and what was expected."""
        self._rows.add(row, request)
        self._bad_words.pop(row, None)
        if words := request.sampling.bad_words:
            self._bad_words[row] = BadWords(words), request.sampling.logit_bias
        self._logprob_token_ids.pop(row, None)
        if request.sampling.logprob_token_ids:
            self._logprob_token_ids[row] = list(request.sampling.logprob_token_ids)
        self._tell_native(row)

    def remove_row(self, row: int) -> None:
        self._rows.remove(row)
        self._logprob_token_ids.pop(row, None)
        self._bad_words.pop(row, None)
        self._tell_native(row)

    def sample(
        self,
        rows: Int32Array,
        positions: Int32Array,
        logits: torch.Tensor,
        table: RowTable,
        masks: TokenMasks | None = None,
    ) -> SampledTokens:
        """The token at each (row, position) from logits [len(rows), vocab_size or more], in any float type, left
        unchanged. A row with drafts is there several times in a row, with rising positions; rows with bad words have
        no drafts."""
        if self._bad_words:
            self._ban(rows, positions, table)
        native = self._native if logits.device.type == "cpu" else None
        sampled = sampled_tokens(rows, *(native or self._torch).sample(rows, positions, logits, table, masks))
        return self._with_others(sampled, rows, logits) if self._logprob_token_ids else sampled

    def _with_others(self, sampled: SampledTokens, rows: Int32Array, logits: torch.Tensor) -> SampledTokens:
        """With the logprobs of tokens that rows ask for by their ids: what the sampled token's logprob says of the sum
        holds for them, too."""
        logprobs = dict(sampled.logprobs)
        for row, token_ids in self._logprob_token_ids.items():
            if row in logprobs:
                own_logits = logits[torch.from_numpy(np.flatnonzero(rows == row)).to(logits.device)].float()
                columns = own_logits[:, token_ids].cpu().numpy()
                logprobs[row] = [
                    _with_logprobs(entry, token_ids, values, float(own[max(entry.token_id, 0)]))
                    for entry, values, own in zip(logprobs[row], columns, own_logits, strict=True)
                ]
        return replace(sampled, logprobs=logprobs)

    def _ban(self, rows: Int32Array, positions: Int32Array, table: RowTable) -> None:
        """Gives rows with bad words the bias of this step."""
        for row, position in zip(rows.tolist(), positions.tolist(), strict=True):
            if row in self._bad_words:
                words, bias = self._bad_words[row]
                bans = dict.fromkeys(words.banned(table.token_ids[row, :position]), BANNED_BIAS)
                self._rows.edits[row] = self._rows.edits[row].with_bias({**bias, **bans})
                self._tell_native(row)

    def _tell_native(self, row: int) -> None:
        if self._native is not None:
            self._native.set_edits(row, self._rows.edits.get(row))


def _with_logprobs(
    entry: TokenLogprobs, token_ids: Sequence[int], logits: npt.NDArray[np.float32], own: float
) -> TokenLogprobs:
    """logits [token_ids]: of these tokens; own: of the sampled one."""
    norm = own - entry.logprob
    others = tuple((token_id, float(value) - norm) for token_id, value in zip(token_ids, logits, strict=True))
    return msgspec.structs.replace(entry, others=others)


class TorchSampling:
    """The reference, and what samples on a device that has no sampler of its own."""

    def __init__(self, rows: SamplingRows) -> None:
        self._rows = rows

    def sample(
        self,
        rows: Int32Array,
        positions: Int32Array,
        logits: torch.Tensor,
        table: RowTable,
        masks: TokenMasks | None = None,
    ) -> tuple[Int32Array, SampleLogprobs | None]:
        """As Sampler.sample: token ids (NO_TOKEN where logits are not finite) and, if any row asks, logprobs."""
        logits = logits[:, : self._rows.vocab_size]
        peaks, peak_ids = likeliest(logits)
        token_ids = peak_ids.cpu().numpy().astype(np.int32)
        # A NaN or an infinity anywhere above the rest shows in the maximum.
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
        # The logprob of a sample without a token is never looked at.
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
    """Changes logits float32 [rows, vocab] in place; outputs[i] are the output tokens so far of row i."""
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
    """Changes logits float32 [samples, vocab] in place. index int32 [samples]: as of TokenMasks."""
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
