"""From logits to tokens, for all rows of a step at once.

For: the model runner. Does not know: models, batches, stop rules. Invariants: a row's token depends on its logits, its
request and the tokens in its row alone; plain greedy rows cost one argmax; a broken row gets an error of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from .drawing import Limits, draw, draw_limited, likeliest, most_likely
from .infer_request import InferRequest, TokenLogprobs
from .logit_edits import RowEdits, apply_edits, row_edits
from .random_numbers import uniform
from .step import BROKEN_LOGITS, NO_TOKEN, Int32Array, RowTable, SampledTokens

Int64Array = npt.NDArray[np.int64]

# As vLLM: below this a temperature means greedy.
_GREEDY_TEMPERATURE = 1e-5


class Sampler:
    """Owns the sampling parameters of each row, as arrays over rows."""

    def __init__(self, max_num_seqs: int, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._temperature = np.zeros(max_num_seqs, np.float64)
        self._top_k = np.zeros(max_num_seqs, np.int64)
        self._top_p = np.ones(max_num_seqs, np.float64)
        self._min_p = np.zeros(max_num_seqs, np.float64)
        self._seed = np.zeros(max_num_seqs, np.uint64)
        self._edits: dict[int, RowEdits] = {}
        self._num_logprobs: dict[int, int] = {}

    def add_row(self, row: int, request: InferRequest) -> None:
        """Raises ValueError naming the field, its value and what was expected."""
        sampling = request.sampling
        edits = row_edits(request, self._vocab_size, self._eos_token_ids)
        if sampling.logprobs is not None and not 0 <= sampling.logprobs <= self._vocab_size:
            raise ValueError(f"'logprobs' is {sampling.logprobs}, expected 0 to {self._vocab_size}")
        self.remove_row(row)
        if edits is not None:
            self._edits[row] = edits
        if sampling.logprobs is not None:
            self._num_logprobs[row] = sampling.logprobs
        self._temperature[row] = sampling.temperature
        self._top_k[row] = max(sampling.top_k, 0) if sampling.top_k < self._vocab_size else 0
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p
        self._seed[row] = sampling.seed & 0xFFFFFFFFFFFFFFFF

    def remove_row(self, row: int) -> None:
        self._edits.pop(row, None)
        self._num_logprobs.pop(row, None)

    def sample(self, rows: Int32Array, positions: Int32Array, logits: torch.Tensor, table: RowTable) -> SampledTokens:
        """The token at each (row, position) from logits [len(rows), vocab_size or more], in any float type, left
        unchanged. A row with drafts is there several times in a row, with rising positions."""
        logits = logits[:, : self._vocab_size]
        peaks, peak_ids = likeliest(logits)
        token_ids = peak_ids.cpu().numpy().astype(np.int32)
        # A NaN or an infinity anywhere above the rest shows in the maximum.
        sound = torch.isfinite(peaks).cpu().numpy()
        random = self._temperature[rows] >= _GREEDY_TEMPERATURE
        edited = np.array([row in self._edits for row in rows.tolist()], np.bool_)
        index = np.flatnonzero((random | edited) & sound)
        if len(index):
            work = logits[torch.from_numpy(index).to(logits.device)].float()
            token_ids[index] = self._choose(rows[index], positions[index], work, table)
        token_ids[~sound] = NO_TOKEN
        errors = {int(row): BROKEN_LOGITS for row in rows[~sound & (positions == table.num_tokens[rows])]}
        return SampledTokens(token_ids, self._logprobs(rows, token_ids, logits, errors), errors)

    def _choose(self, rows: Int32Array, positions: Int32Array, logits: torch.Tensor, table: RowTable) -> Int64Array:
        """Tokens for rows that are not plainly greedy; `logits` is a float32 copy."""
        self._edit(rows, positions, logits, table)
        chosen: Int64Array = likeliest(logits)[1].cpu().numpy()
        index = np.flatnonzero(self._temperature[rows] >= _GREEDY_TEMPERATURE)
        if not len(index):
            return chosen
        rows, positions = rows[index], positions[index]
        device = logits.device
        scaled = logits[torch.from_numpy(index).to(device)]
        scaled.div_(torch.from_numpy(self._temperature[rows]).to(device, torch.float32)[:, None])
        uniforms = torch.from_numpy(uniform(self._seed[rows], positions.astype(np.uint64))).to(device)
        chosen[index] = self._draw(rows, scaled, uniforms).cpu().numpy()
        return chosen

    def _edit(self, rows: Int32Array, positions: Int32Array, logits: torch.Tensor, table: RowTable) -> None:
        index = [i for i, row in enumerate(rows.tolist()) if row in self._edits]
        if not index:
            return
        edits = [self._edits[int(rows[i])] for i in index]
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
        limited = (self._top_k[rows] > 0) | (self._top_p[rows] < 1.0) | (self._min_p[rows] > 0.0)
        if not limited.any():
            return draw(logits, uniforms)
        limits = Limits(*(torch.from_numpy(a[rows]).to(logits.device) for a in (self._top_k, self._top_p, self._min_p)))
        if limited.all():
            return draw_limited(logits, uniforms, limits)
        tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        some, others = (torch.from_numpy(np.flatnonzero(m)).to(logits.device) for m in (limited, ~limited))
        tokens[some] = draw_limited(logits[some], uniforms[some], limits.rows(some))
        tokens[others] = draw(logits[others], uniforms[others])
        return tokens

    def _logprobs(
        self, rows: Int32Array, token_ids: Int32Array, logits: torch.Tensor, errors: dict[int, str]
    ) -> dict[int, list[TokenLogprobs]]:
        """Of the model's own distribution, for the rows that ask."""
        index = [i for i, row in enumerate(rows.tolist()) if row in self._num_logprobs and row not in errors]
        if not index:
            return {}
        raw = logits[torch.tensor(index, device=logits.device)].float()
        asked = [self._num_logprobs[int(rows[i])] for i in index]
        # What stands at a position without a token is never looked at.
        chosen = torch.from_numpy(np.maximum(token_ids[index], 0).astype(np.int64)).to(logits.device)[:, None]
        own = raw.gather(-1, chosen)
        norm = torch.logsumexp(raw, dim=-1, keepdim=True)
        ranks = ((raw > own).sum(-1) + 1).tolist()
        values, ids = most_likely(raw, max(asked)) if max(asked) else (raw[:, :0], chosen[:, :0])
        listed = zip(ids.tolist(), (values - norm).tolist(), strict=True)
        logprobs: dict[int, list[TokenLogprobs]] = {}
        for i, n, logprob, rank, (top_ids, top) in zip(
            index, asked, (own - norm)[:, 0].tolist(), ranks, listed, strict=True
        ):
            entry = TokenLogprobs(int(token_ids[i]), logprob, rank, tuple(zip(top_ids[:n], top[:n], strict=True)))
            logprobs.setdefault(int(rows[i]), []).append(entry)
        return logprobs
