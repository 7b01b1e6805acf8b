"""From logits to tokens, for all rows of a step at once.

For: the model runner. Does not know: models, batches, stop rules. Invariants: a row's token depends on its logits, its
request and the tokens in its row alone; plain greedy rows cost one argmax; a broken row gets an error of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from .infer_request import BANNED_BIAS, InferRequest, TokenLogprobs
from .kernels.library import NativeEngine
from .kernels.sampling import NativeSampling, RowParameters
from .sampling.bad_words import BadWords
from .sampling.drawing import Limits, draw, draw_limited, likeliest, most_likely
from .sampling.logit_edits import RowEdits, apply_edits, row_edits
from .sampling.random_numbers import uniform
from .step import BROKEN_LOGITS, NO_TOKEN, Int32Array, RowTable, SampledTokens

Int64Array = npt.NDArray[np.int64]

# As vLLM: below this a temperature means greedy.
_GREEDY_TEMPERATURE = 1e-5


class Sampler:
    """Owns the sampling parameters of each row, as arrays over rows."""

    def __init__(
        self, max_num_seqs: int, vocab_size: int, eos_token_ids: Sequence[int], native: NativeEngine | None = None
    ) -> None:
        """`native`: computes logits that are on the CPU; without it, torch does."""
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._parameters = RowParameters(max_num_seqs)
        self._edits: dict[int, RowEdits] = {}
        self._bad_words: dict[int, tuple[BadWords, dict[int, float]]] = {}  # and the row's own bias
        self._logprob_rows: set[int] = set()
        self._native = None if native is None else NativeSampling(native, self._parameters, vocab_size)

    def add_row(self, row: int, request: InferRequest) -> None:
        """Raises ValueError naming the field, its value and what was expected."""
        sampling = request.sampling
        edits = row_edits(request, self._vocab_size, self._eos_token_ids)
        if sampling.logprobs is not None and not 0 <= sampling.logprobs <= self._vocab_size:
            raise ValueError(f"'logprobs' is {sampling.logprobs}, expected 0 to {self._vocab_size}")
        self.remove_row(row)
        if edits is not None:
            self._set_edits(row, edits)
        if sampling.bad_words:
            self._bad_words[row] = BadWords(sampling.bad_words), sampling.logit_bias
        if sampling.logprobs is not None:
            self._logprob_rows.add(row)
        parameters = self._parameters
        parameters.num_logprobs[row] = -1 if sampling.logprobs is None else sampling.logprobs
        parameters.temperature[row] = 0 if sampling.temperature < _GREEDY_TEMPERATURE else sampling.temperature
        parameters.top_k[row] = max(sampling.top_k, 0) if sampling.top_k < self._vocab_size else 0
        parameters.top_p[row] = sampling.top_p
        parameters.min_p[row] = sampling.min_p
        parameters.seed[row] = sampling.seed & 0xFFFFFFFFFFFFFFFF

    def remove_row(self, row: int) -> None:
        if row in self._edits:
            self._set_edits(row, None)
        self._bad_words.pop(row, None)
        self._logprob_rows.discard(row)
        self._parameters.num_logprobs[row] = -1

    def _set_edits(self, row: int, edits: RowEdits | None) -> None:
        if edits is None:
            del self._edits[row]
        else:
            self._edits[row] = edits
        if self._native is not None:
            self._native.set_edits(row, edits)

    def sample(self, rows: Int32Array, positions: Int32Array, logits: torch.Tensor, table: RowTable) -> SampledTokens:
        """The token at each (row, position) from logits [len(rows), vocab_size or more], in any float type, left
        unchanged. A row with drafts is there several times in a row, with rising positions; rows with bad words have
        none."""
        if self._bad_words:
            self._ban(rows, positions, table)
        if self._native is not None and logits.device.type == "cpu":
            return self._sample_natively(self._native, rows, positions, logits, table)
        logits = logits[:, : self._vocab_size]
        peaks, peak_ids = likeliest(logits)
        token_ids = peak_ids.cpu().numpy().astype(np.int32)
        # A NaN or an infinity anywhere above the rest shows in the maximum.
        sound = torch.isfinite(peaks).cpu().numpy()
        random = self._parameters.temperature[rows] > 0
        edited = np.array([row in self._edits for row in rows.tolist()], np.bool_)
        index = np.flatnonzero((random | edited) & sound)
        if len(index):
            work = logits[torch.from_numpy(index).to(logits.device)].float()
            token_ids[index] = self._choose(rows[index], positions[index], work, table)
        token_ids[~sound] = NO_TOKEN
        errors = _errors(rows, positions, token_ids, table)
        return SampledTokens(token_ids, self._logprobs(rows, token_ids, logits, errors), errors)

    def _ban(self, rows: Int32Array, positions: Int32Array, table: RowTable) -> None:
        """Gives rows with bad words the bias of this step."""
        for row, position in zip(rows.tolist(), positions.tolist(), strict=True):
            if row in self._bad_words:
                words, bias = self._bad_words[row]
                bans = dict.fromkeys(words.banned(table.token_ids[row, :position]), BANNED_BIAS)
                self._set_edits(row, self._edits[row].with_bias({**bias, **bans}))

    def _sample_natively(
        self, native: NativeSampling, rows: Int32Array, positions: Int32Array, logits: torch.Tensor, table: RowTable
    ) -> SampledTokens:
        token_ids, found = native.sample(rows, positions, logits, table, bool(self._logprob_rows))
        errors = _errors(rows, positions, token_ids, table)
        if found is None:
            return SampledTokens(token_ids, errors=errors)
        logprobs: dict[int, list[TokenLogprobs]] = {}
        for i, row in enumerate(rows.tolist()):
            if row in self._logprob_rows and row not in errors:
                n = int(self._parameters.num_logprobs[row])
                top = tuple(zip(found.top_ids[i, :n].tolist(), found.top[i, :n].tolist(), strict=True))
                entry = TokenLogprobs(int(token_ids[i]), float(found.own[i]), int(found.ranks[i]), top)
                logprobs.setdefault(row, []).append(entry)
        return SampledTokens(token_ids, logprobs, errors)

    def _choose(self, rows: Int32Array, positions: Int32Array, logits: torch.Tensor, table: RowTable) -> Int64Array:
        """Tokens for rows that are not plainly greedy; `logits` is a float32 copy."""
        self._edit(rows, positions, logits, table)
        chosen: Int64Array = likeliest(logits)[1].cpu().numpy()
        index = np.flatnonzero(self._parameters.temperature[rows])
        if not len(index):
            return chosen
        rows, positions = rows[index], positions[index]
        device = logits.device
        scaled = logits[torch.from_numpy(index).to(device)]
        scaled.div_(torch.from_numpy(self._parameters.temperature[rows]).to(device)[:, None])
        uniforms = torch.from_numpy(uniform(self._parameters.seed[rows], positions.astype(np.uint64))).to(device)
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
        parameters = self._parameters
        columns = [array[rows] for array in (parameters.top_k, parameters.top_p, parameters.min_p)]
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

    def _logprobs(
        self, rows: Int32Array, token_ids: Int32Array, logits: torch.Tensor, errors: dict[int, str]
    ) -> dict[int, list[TokenLogprobs]]:
        """Of the model's own distribution, for the rows that ask."""
        index = [i for i, row in enumerate(rows.tolist()) if row in self._logprob_rows and row not in errors]
        if not index:
            return {}
        raw = logits[torch.tensor(index, device=logits.device)].float()
        asked = self._parameters.num_logprobs[rows[index]].tolist()
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


def _errors(rows: Int32Array, positions: Int32Array, token_ids: Int32Array, table: RowTable) -> dict[int, str]:
    broken = np.flatnonzero(token_ids == NO_TOKEN)
    first = broken[positions[broken] == table.num_tokens[rows[broken]]]
    return {int(row): BROKEN_LOGITS for row in rows[first]}
