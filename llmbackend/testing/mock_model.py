"""`--model mock`: a model without weights. Its logits are a hash of all tokens so far, read through the paged KV cache.

Tests of the scheduler, the adapter and protocols use it: they take milliseconds and have an exact oracle
(tests/helpers/mock_oracle). Independent of torch and of steps in flight (overlapping_mock.py). Invariants: all state of
a sequence is in its KV slots, so that a wrong block table, a lost block or a wrong recomputation changes the tokens; a
token depends only on logits, parameters, the row's tokens and (seed, position).

The vocabulary ends with bos, eos, pad (256, 257, 258 of 259; smaller ids are bytes). Printable ASCII is more likely
than other ids; eos is by far the most likely token at about one position in 32.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.messages import BANNED_BIAS, InferRequest, ModelInfo, SamplingParams, TokenLogprobs
from llmbackend.engine.sampling.rows import splitmix64, uniform
from llmbackend.engine.sampling.sampler import prompt_spans
from llmbackend.engine.step import Int32Array, KVCopies, RowTable, SampledTokens, StepPlan
from llmbackend.engine.token_masks import FORBIDDEN, BadWords, TokenMasks, Words, as_bools

FloatArray = npt.NDArray[np.float64]
DEFAULT_MAX_MODEL_LEN = 4096
MIN_VOCAB_SIZE = 130
EOS_PERIOD = 32


class MockRunner:
    """A Runner over an int32 array of slots that contain token ids."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises ValueError for a vocabulary too small for ASCII, bos, eos and pad."""
        if config.mock_vocab_size < MIN_VOCAB_SIZE:
            raise ValueError(
                f"engine argument 'mock_vocab_size' is {config.mock_vocab_size}, expected at least {MIN_VOCAB_SIZE}"
            )
        max_model_len = config.given_max_model_len or DEFAULT_MAX_MODEL_LEN
        num_blocks = config.num_kv_blocks or config.max_num_seqs * -(-max_model_len // config.block_size)
        self.info = ModelInfo(
            model_type="mock",
            vocab_size=config.mock_vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=(mock_eos_token_id(config.mock_vocab_size),),
            block_size=config.block_size,
            num_blocks=num_blocks,
            dtype="int32",
            device="cpu",
            load_s=0.0,
            description="mock model: logits are a hash of the tokens",
            kv_bytes=num_blocks * config.block_size * np.dtype(np.int32).itemsize,
            path="mock",
            num_host_blocks=config.num_host_blocks(config.block_size * np.dtype(np.int32).itemsize),
        )
        self._step_s = config.mock_step_ms / 1e3
        self._requests: dict[int, InferRequest] = {}
        self._slots: Int32Array = np.full(num_blocks * config.block_size, -1, np.int32)
        self._host_blocks: Int32Array = np.full((self.info.num_host_blocks, config.block_size), -1, np.int32)

    def add_row(self, row: int, request: InferRequest) -> None:
        for token_id in request.sampling.logit_bias:
            if not 0 <= token_id < self.info.vocab_size:
                raise ValueError(f"logit_bias names token {token_id}, expected 0 to {self.info.vocab_size - 1}")
        assert row not in self._requests, f"row {row} is taken"
        self._requests[row] = request

    def remove_row(self, row: int) -> None:
        del self._requests[row]

    def execute(self, plan: StepPlan, table: RowTable) -> SampledTokens:
        if self._step_s:
            time.sleep(self._step_s)
        rows, positions, slots = scheduled_slots(plan, table)
        self._slots[slots] = table.token_ids[rows, positions]
        token_ids: list[int] = []
        logprobs: dict[int, list[TokenLogprobs]] = {}
        masks = None if plan.masks is None else plan.masks.result()
        samples = zip(*(array.tolist() for array in plan.samples(table)), strict=True)
        for i, (row, position) in enumerate(samples):
            context: Int32Array = self._slots[context_slots(row, position, table)]
            token_id, row_logprobs = self._sample(context, self._requests[row], allowed_tokens(masks, i))
            token_ids.append(token_id)
            if row_logprobs is not None:
                logprobs.setdefault(row, []).append(row_logprobs)
        prompt_logprobs = self._of_prompts(prompt_tokens(plan, table))
        return SampledTokens(np.array(token_ids, np.int32), logprobs, prompt_logprobs=prompt_logprobs)

    def copy_blocks(self, copies: KVCopies) -> None:
        """As an OffloadingRunner. The source is overwritten, so that reading it again would change tokens."""
        blocks = self._slots.reshape(-1, self.info.block_size)
        if copies.to_host:
            self._host_blocks[copies.host_blocks] = blocks[copies.blocks]
            blocks[copies.blocks] = -1
        else:
            blocks[copies.blocks] = self._host_blocks[copies.host_blocks]
            self._host_blocks[copies.host_blocks] = -1

    def close(self) -> None:
        pass

    def _of_prompts(self, tokens: list[PromptToken]) -> dict[int, list[TokenLogprobs]]:
        found: dict[int, list[TokenLogprobs]] = {}
        for one in tokens:
            logits = mock_logits(self._slots[one.context_slots], self.info.vocab_size)
            if (logprobs := logprobs_of(logits, one.token_id, one.count)) is not None:
                found.setdefault(one.row, []).append(logprobs)
        return found

    def _sample(
        self, context: Int32Array, request: InferRequest, allowed: Words | None
    ) -> tuple[int, TokenLogprobs | None]:
        """The token after `context`, int32 [n]."""
        logits = mock_logits(context, self.info.vocab_size)
        eos = self.info.eos_token_ids
        return sample(logits, context, len(request.prompt_token_ids), request.sampling, eos, allowed)


def allowed_tokens(masks: TokenMasks | None, sample: int) -> Words | None:
    return None if masks is None or masks.index[sample] < 0 else masks.words[masks.index[sample]]


def scheduled_slots(plan: StepPlan, table: RowTable) -> tuple[Int32Array, Int32Array, Int32Array]:
    """Row, position and slot of each token of the step, int32 [plan.num_tokens] each."""
    counts = plan.num_scheduled_tokens
    rows = np.repeat(plan.rows, counts)
    offsets = np.arange(counts.sum(), dtype=np.int32) - np.repeat(np.cumsum(counts, dtype=np.int32) - counts, counts)
    positions = table.num_computed_tokens[rows] + offsets
    slots = table.block_table[rows, positions // table.block_size] * table.block_size + positions % table.block_size
    return rows, positions, slots


def context_slots(row: int, num_tokens: int, table: RowTable) -> Int32Array:
    """Slots of the row's first `num_tokens` tokens, int32 [num_tokens]."""
    positions = np.arange(num_tokens, dtype=np.int32)
    slots: Int32Array = table.block_table[row, positions // table.block_size] * table.block_size
    return slots + positions % table.block_size


def mock_eos_token_id(vocab_size: int) -> int:
    return vocab_size - 2


def mock_logits(token_ids: Int32Array, vocab_size: int) -> FloatArray:
    """float64 [vocab_size] from the tokens so far, int32 [n]."""
    digest = zlib.crc32(token_ids.astype("<i4").tobytes())
    noise = splitmix64((np.uint64(digest) << np.uint64(20)) + np.arange(vocab_size, dtype=np.uint64))
    logits: FloatArray = (noise >> np.uint64(11)).astype(np.float64) / float(1 << 53) * 8.0
    logits[32:127] += 4.0
    logits[mock_eos_token_id(vocab_size)] = 24.0 if digest % EOS_PERIOD == 0 else 0.0
    return logits


def _uniform(seed: int, position: int) -> float:
    """One number in [0, 1) for the token at `position`."""
    seeds, positions = np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64), np.array([position], np.uint64)
    return float(uniform(seeds, positions)[0])


def sample(
    logits: FloatArray,
    token_ids: Int32Array,
    num_prompt_tokens: int,
    sampling: SamplingParams,
    eos_token_ids: Collection[int],
    allowed: Words | None = None,
) -> tuple[int, TokenLogprobs | None]:
    """The token at position len(token_ids), given logits float64 [vocab_size] and the tokens so far, int32 [n].
    allowed: None = all tokens."""
    processed = logits.copy()
    for token_id, bias in sampling.logit_bias.items():
        processed[token_id] += bias
    if sampling.bad_words:
        processed[BadWords(sampling.bad_words).banned(token_ids)] += BANNED_BIAS
    if len(token_ids) - num_prompt_tokens < sampling.min_tokens:
        processed[list({*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)})] = -np.inf
    _penalise(processed, token_ids, num_prompt_tokens, sampling)
    if allowed is not None:
        processed[~as_bools(allowed, len(processed))] = FORBIDDEN
    if sampling.temperature < 1e-5:
        token_id = int(processed.argmax())
    else:
        token_id = _draw(processed / sampling.temperature, sampling, _uniform(sampling.seed, len(token_ids)))
    return token_id, logprobs_of(logits, token_id, sampling.logprobs, sampling.logprob_token_ids)


def _penalise(logits: FloatArray, token_ids: Int32Array, num_prompt_tokens: int, sampling: SamplingParams) -> None:
    if sampling.repetition_penalty != 1.0:
        seen = np.unique(token_ids)
        penalty = min(max(sampling.repetition_penalty, 1e-6), 1e6)  # so that logits stay finite
        factor = np.where(logits[seen] > 0, 1.0 / penalty, penalty)
        logits[seen] *= factor
    if sampling.frequency_penalty or sampling.presence_penalty:
        counts = np.bincount(token_ids[num_prompt_tokens:], minlength=len(logits))
        logits -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)


def _draw(logits: FloatArray, sampling: SamplingParams, u: float) -> int:
    """The token at quantile `u` of the cumulative distribution, most likely tokens first."""
    order = np.argsort(-logits, kind="stable")
    probs = np.exp(logits[order] - logits[order[0]])
    probs[probs < sampling.min_p] = 0.0
    if sampling.top_k > 0:
        probs[sampling.top_k :] = 0.0
    probs /= probs.sum()
    probs[np.cumsum(probs) - probs >= sampling.top_p] = 0.0
    cumulated = np.cumsum(probs)
    return int(order[min(np.searchsorted(cumulated, u * cumulated[-1], side="right"), np.count_nonzero(probs) - 1)])


def logprobs_of(
    logits: FloatArray, token_id: int, count: int | None, token_ids: tuple[int, ...] = ()
) -> TokenLogprobs | None:
    if count is None:
        return None
    logprobs = logits - logits.max()
    logprobs -= np.log(np.exp(logprobs).sum())
    best = np.argsort(-logprobs, kind="stable")[:count]
    rank = 1 + int((logprobs > logprobs[token_id]).sum())
    top, others = (tuple((int(i), float(logprobs[i])) for i in ids) for ids in (best, token_ids))
    return TokenLogprobs(token_id, float(logprobs[token_id]), rank, top, others)


@dataclass(frozen=True, slots=True)
class PromptToken:
    """A prompt token whose logprobs are requested, together with those of the `count` most likely tokens.

    context_slots: those of all tokens before it
    """

    row: int
    token_id: int
    context_slots: Int32Array
    count: int


def prompt_tokens(plan: StepPlan, table: RowTable) -> list[PromptToken]:
    return [
        PromptToken(
            span.row, int(table.token_ids[span.row, position]), context_slots(span.row, position, table), span.count
        )
        for span in prompt_spans(plan, table)
        for position in range(span.first, span.end)
    ]
