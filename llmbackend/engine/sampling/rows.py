"""The sampling parameters of each row, and the results of samples: one format for the native, torch and Triton
samplers.

Samplers read the parameters as arrays over rows (`SamplingRows`), and a row's changes to its logits as `RowEdits`.
Invariants: a row's token is a function of its parameters, its logits and its own tokens, with one random number for
(seed, position), the same in every batch, process and restart; a request that leaves its logits unchanged costs
nothing.

Masks (token_masks.py) come with a step's plan and are applied after a row's edits; so a row that may have masks always
has edits, possibly empty ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..grammars.row_constraint import is_constrained
from ..messages import InferRequest, TokenLogprobs, stop_token_ids
from ..step import BROKEN_LOGITS, NO_TOKEN, Int32Array, SampledTokens

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]
Float32Array = npt.NDArray[np.float32]

_GREEDY_TEMPERATURE = 1e-5
"""Lower temperatures mean greedy, as in vLLM."""
_MAX_TEMPERATURE = 1e6
"""Higher temperatures mean this one: all tokens are equally likely, except banned ones (BANNED_BIAS), which divided by
more would become likely too."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class SamplingRows:
    """Arrays over rows; a row without a request samples greedily.

    temperature    float32  0 = greedy
    top_k          int32    0 = no limit
    top_p          float64  1 = no limit
    min_p          float64  0 = no limit
    seed           uint64
    num_logprobs   int32    number of top logprobs; -1 = no logprobs

    edits: by row, for rows that change their logits. limited: rows with a top_k, top_p or min_p. with_logprobs: rows
    that return logprobs.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.max_num_seqs, self.vocab_size = max_num_seqs, vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int32)
        self.top_p = np.ones(max_num_seqs, np.float64)
        self.min_p = np.zeros(max_num_seqs, np.float64)
        self.seed = np.zeros(max_num_seqs, np.uint64)
        self.num_logprobs = np.full(max_num_seqs, -1, np.int32)
        self.edits: dict[int, RowEdits] = {}
        self.limited: set[int] = set()
        self.with_logprobs: set[int] = set()

    def add(self, row: int, request: InferRequest) -> None:
        """Raises ValueError naming field, value and what was expected; the row is unchanged then."""
        sampling = request.sampling
        edits = row_edits(request, self.vocab_size, self._eos_token_ids)
        for token_id in sampling.logprob_token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(f"'logprob_token_ids' has {token_id}, expected ids from 0 to {self.vocab_size - 1}")
        if sampling.logprobs is not None and not 0 <= sampling.logprobs <= self.vocab_size:
            raise ValueError(f"'logprobs' is {sampling.logprobs}, expected 0 to {self.vocab_size}")
        self.remove(row)
        is_greedy = sampling.temperature < _GREEDY_TEMPERATURE
        self.temperature[row] = 0.0 if is_greedy else min(sampling.temperature, _MAX_TEMPERATURE)
        self.top_k[row] = max(sampling.top_k, 0) if sampling.top_k < self.vocab_size else 0
        self.top_p[row], self.min_p[row] = sampling.top_p, sampling.min_p
        self.seed[row] = sampling.seed & 0xFFFFFFFFFFFFFFFF
        if not is_greedy and (self.top_k[row] > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0):
            self.limited.add(row)
        if sampling.logprobs is not None:
            self.num_logprobs[row] = sampling.logprobs
            self.with_logprobs.add(row)
        if edits is not None:
            self.edits[row] = edits

    def remove(self, row: int) -> None:
        self.temperature[row], self.num_logprobs[row] = 0.0, -1
        self.limited.discard(row)
        self.with_logprobs.discard(row)
        self.edits.pop(row, None)


@dataclass(frozen=True, slots=True)
class RowEdits:
    """One request's changes to its logits. Order and meaning are vLLM's: bias, minimum length, then penalties."""

    bias_ids: Int64Array
    bias_values: Float32Array
    stop_ids: Int64Array
    """Not sampled among the first min_tokens output tokens."""
    min_tokens: int
    repetition_penalty: float
    """For tokens in prompt and output; 1 = none."""
    frequency_penalty: float
    presence_penalty: float
    prompt_ids: Int64Array
    """The distinct prompt tokens; empty without a repetition penalty."""

    def with_bias(self, bias: Mapping[int, float]) -> RowEdits:
        """These edits with another bias."""
        ids, values = np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)
        return replace(self, bias_ids=ids, bias_values=values)

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or bool(self.frequency_penalty or self.presence_penalty)


def row_edits(request: InferRequest, vocab_size: int, eos_token_ids: Sequence[int]) -> RowEdits | None:
    """None if the request leaves its logits unchanged. Raises ValueError naming field, value and what was expected."""
    sampling = request.sampling
    for token_id, bias in sampling.logit_bias.items():
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"'logit_bias' names token {token_id}, expected one from 0 to {vocab_size - 1}")
        if not np.isfinite(bias):
            raise ValueError(f"'logit_bias' of token {token_id} is {bias}, expected a finite number")
    for token_id in (token_id for word in sampling.bad_words for token_id in word):
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"'bad_words' names token {token_id}, expected one from 0 to {vocab_size - 1}")
    stops = stop_token_ids(sampling, eos_token_ids)
    repetition = sampling.repetition_penalty != 1.0
    edits = RowEdits(
        bias_ids=np.array(list(sampling.logit_bias), np.int64),
        bias_values=np.array(list(sampling.logit_bias.values()), np.float32),
        stop_ids=np.array(sorted(token_id for token_id in stops if 0 <= token_id < vocab_size), np.int64),
        min_tokens=sampling.min_tokens,
        repetition_penalty=min(max(sampling.repetition_penalty, 1e-6), 1e6),  # keeps logits finite
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        prompt_ids=np.unique(np.array(request.prompt_token_ids if repetition else (), np.int64)),
    )
    changes_per_step = (sampling.min_tokens and len(edits.stop_ids)) or edits.has_penalties or sampling.bad_words
    return edits if sampling.logit_bias or changes_per_step or is_constrained(request) else None


def uniform(seeds: UInt64Array, positions: UInt64Array) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) for pairs of seed and position, from a counter instead of a generator's state; the arrays have
    equal shapes.

    The position is mixed into the mixed seed, so neighbouring seeds and positions give unrelated numbers.
    """
    bits = splitmix64(splitmix64(seeds) ^ (positions * _GOLDEN))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def splitmix64(values: UInt64Array) -> UInt64Array:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit numbers."""
    mixed = values + _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: UInt64Array = mixed ^ (mixed >> np.uint64(31))
    return result


@dataclass(frozen=True, slots=True)
class SampleLogprobs:
    """Logprobs of a step's samples, of the model's own distribution. Entries with `asked` -1 are undefined."""

    asked: Int32Array
    """[samples]: number of top logprobs requested by the row; -1 = no logprobs."""
    own: Float32Array
    """[samples]: logprob of the sampled token."""
    ranks: Int32Array
    """[samples]: rank of the sampled token, from 1."""
    top_ids: Int32Array
    """[samples, most]: the most likely tokens, by descending logprob."""
    top: Float32Array
    """[samples, most]: their logprobs."""

    @classmethod
    def empty(cls, asked: Int32Array) -> SampleLogprobs:
        """Arrays for what is requested. asked: int32 [samples]."""
        n, most = len(asked), max(int(asked.max(initial=0)), 0)
        own, ranks = np.empty(n, np.float32), np.empty(n, np.int32)
        return cls(asked, own, ranks, np.empty((n, most), np.int32), np.empty((n, most), np.float32))

    def spread(self, index: Int64Array) -> SampleLogprobs:
        """Expands these arrays (except `asked`), which cover only the samples at `index`, to all samples."""
        spread = SampleLogprobs.empty(self.asked)
        for name in ("own", "ranks", "top_ids", "top"):
            getattr(spread, name)[index] = getattr(self, name)
        return spread

    def by_row(self, rows: Int32Array, token_ids: Int32Array) -> dict[int, list[TokenLogprobs]]:
        """The entries of all samples whose rows request logprobs. rows, token_ids: int32 [samples]."""
        found: dict[int, list[TokenLogprobs]] = {}
        asked, own, ranks = self.asked.tolist(), self.own.tolist(), self.ranks.tolist()
        for i, (row, token_id) in enumerate(zip(rows.tolist(), token_ids.tolist(), strict=True)):
            if (n := asked[i]) >= 0:
                top = tuple(zip(self.top_ids[i, :n].tolist(), self.top[i, :n].tolist(), strict=True))
                found.setdefault(row, []).append(TokenLogprobs(token_id, own[i], ranks[i], top))
        return found


def sampled_tokens(rows: Int32Array, token_ids: Int32Array, logprobs: SampleLogprobs | None) -> SampledTokens:
    """The result of a step with samples of `rows`, those of a row in the order of their positions. A row's first sample
    with NO_TOKEN is the row's error; a later one is not, because the drafts before it may be wrong."""
    errors: dict[int, str] = {}
    broken = np.flatnonzero(token_ids == NO_TOKEN)
    if len(broken):
        first_samples = np.unique(rows, return_index=True)[1]
        errors = {int(row): BROKEN_LOGITS for row in rows[np.intersect1d(broken, first_samples)]}
    if logprobs is None:
        return SampledTokens(token_ids, errors=errors)
    found = logprobs.by_row(rows, token_ids)
    return SampledTokens(token_ids, {row: entries for row, entries in found.items() if row not in errors}, errors)
