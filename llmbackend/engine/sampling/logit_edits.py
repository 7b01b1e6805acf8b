"""What a request changes about its logits before a token is chosen: bias, forbidden stops, penalties.

For: the sampler. Does not know: temperature, random numbers. Invariant: every edit is a function of the request and of
the tokens in its row, so that a step can be repeated; a request that asks for nothing costs nothing. Order and meaning
are vLLM's: bias, minimum length, then repetition, frequency and presence penalties.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from llmbackend.engine.infer_request import InferRequest

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RowEdits:
    """One request's edits. stop_ids may not be sampled among the first min_tokens output tokens. prompt_ids: the
    distinct tokens of the prompt, kept when there is a repetition penalty (which covers prompt and output)."""

    bias_ids: Int64Array
    bias_values: Float32Array
    stop_ids: Int64Array
    min_tokens: int
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    prompt_ids: Int64Array

    def with_bias(self, bias: Mapping[int, float]) -> RowEdits:
        """These edits with another bias."""
        ids, values = np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)
        return replace(self, bias_ids=ids, bias_values=values)

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or bool(self.frequency_penalty or self.presence_penalty)


def row_edits(request: InferRequest, vocab_size: int, eos_token_ids: Sequence[int]) -> RowEdits | None:
    """None when the request leaves logits alone. Raises ValueError naming the field, its value and what was
    expected."""
    sampling = request.sampling
    for token_id, bias in sampling.logit_bias.items():
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"'logit_bias' names token {token_id}, expected one from 0 to {vocab_size - 1}")
        if not np.isfinite(bias):
            raise ValueError(f"'logit_bias' of token {token_id} is {bias}, expected a finite number")
    for token_id in (token_id for word in sampling.bad_words for token_id in word):
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"'bad_words' names token {token_id}, expected one from 0 to {vocab_size - 1}")
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
    repetition = sampling.repetition_penalty != 1.0
    edits = RowEdits(
        bias_ids=np.array(list(sampling.logit_bias), np.int64),
        bias_values=np.array(list(sampling.logit_bias.values()), np.float32),
        stop_ids=np.array(sorted(token_id for token_id in stops if 0 <= token_id < vocab_size), np.int64),
        min_tokens=sampling.min_tokens,
        repetition_penalty=min(max(sampling.repetition_penalty, 1e-6), 1e6),  # so that logits stay finite
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        prompt_ids=np.unique(np.array(request.prompt_token_ids if repetition else (), np.int64)),
    )
    changes_per_step = (sampling.min_tokens and len(edits.stop_ids)) or edits.has_penalties or sampling.bad_words
    return edits if sampling.logit_bias or changes_per_step else None


def apply_edits(logits: torch.Tensor, edits: Sequence[RowEdits], outputs: Sequence[npt.NDArray[np.int32]]) -> None:
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


def _penalise_repetition(
    logits: torch.Tensor, edits: Sequence[RowEdits], outputs: Sequence[npt.NDArray[np.int32]]
) -> None:
    pieces = []
    for i, edit in enumerate(edits):
        if edit.repetition_penalty != 1.0:
            seen_ids = np.union1d(edit.prompt_ids, outputs[i]).astype(np.int64)
            pieces.append((i, seen_ids, np.full(len(seen_ids), edit.repetition_penalty, np.float32)))
    if pieces:
        rows, ids, penalties = _join(logits, pieces)
        seen = logits[rows, ids]
        logits[rows, ids] = torch.where(seen > 0, seen / penalties, seen * penalties)


def _penalise_output(logits: torch.Tensor, edits: Sequence[RowEdits], outputs: Sequence[npt.NDArray[np.int32]]) -> None:
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
