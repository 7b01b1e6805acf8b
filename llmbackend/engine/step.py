"""The interface between the engine's control side and its compute side: the rows of live requests, the plan of a step,
and what it sampled.

The control side (scheduler, engine core) owns the rows and decides what to compute. The compute side (a `Runner`) owns
the weights and the KV memory. This module is independent of how tokens are scheduled and how logits are computed.
Invariant: a request keeps its row from admission to its end, also while preempted, so a step costs Python time only for
rows that changed. Only the engine core's thread writes to the table; the runner reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from .config import SpeculativeConfig
from .messages import InferRequest, ModelInfo, TokenLogprobs
from .token_masks import PendingMasks

BROKEN_LOGITS: Final = "the model computed logits that are not finite for this request"
"""The error of a row whose logits contain a NaN or an infinity."""

NO_TOKEN: Final = -1
"""Stands for the token sampled after a draft whose logits contain a NaN or an infinity."""

PENDING_TOKEN: Final = -2
"""Stands in table.token_ids for a token of a launched step that has not been read yet."""

Int32Array = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]


class RowTable:
    """The state of every live request, as arrays over permanent rows 0..max_num_seqs-1.

    token_ids            int32 [max_num_seqs, max_model_len]      prompt, then output; valid up to num_tokens[row],
                                                                  during `execute` up to the row's last draft
    num_tokens           int32 [max_num_seqs]                     prompt + output tokens known so far, counting those
                                                                  that launched steps will sample
    num_prompt_tokens    int32 [max_num_seqs]                     the first output token is at this position
    num_computed_tokens  int32 [max_num_seqs]                     tokens whose KV is in the cache once the launched
                                                                  steps have run
    num_pending_drafts   int32 [max_num_seqs]                     drafts of launched steps not read yet: num_tokens and
                                                                  num_computed_tokens count them as accepted, and may
                                                                  decrease
    block_tables         int32 [groups, max_num_seqs, max_blocks_per_seq]
                                                                  KV block ids in 0..num_blocks-1, for each group of
                                                                  layers (ModelInfo.kv_groups)
    block_table          block_tables[0], the only one if all layers are one group
    state_slots          int32 [max_num_seqs]                     slot of the row's recurrent state; -1 = none
    state_sources        int32 [max_num_seqs]                     slot of the state from which the row's next step
                                                                  starts; -1 = its own, or zeros before its first token

    prompt_logprobs: by row, for rows that need logprobs of their prompt; a step returns those of the tokens whose
    predecessors it computes (sampling/sampler.py). state_copies: by row, which of its states the step must save: after
    how many of its tokens, and to which slot.

    During `execute` a row's block tables are valid for positions below num_computed_tokens + the tokens scheduled;
    later entries are stale. In a group of layers with a window, an entry may be -1 if none of the step's queries
    attends to its positions. Position p of a row has slot block_tables[group, row, p // block_size] *
    block_size + p % block_size. Rows without a request have stale contents.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, num_groups: int = 1) -> None:
        max_blocks_per_seq = -(-max_model_len // block_size)
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.token_ids: Int32Array = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.num_tokens: Int32Array = np.zeros(max_num_seqs, np.int32)
        self.num_prompt_tokens: Int32Array = np.zeros(max_num_seqs, np.int32)
        self.num_computed_tokens: Int32Array = np.zeros(max_num_seqs, np.int32)
        self.num_pending_drafts: Int32Array = np.zeros(max_num_seqs, np.int32)
        self.block_tables: Int32Array = np.zeros((num_groups, max_num_seqs, max_blocks_per_seq), np.int32)
        self.block_table: Int32Array = self.block_tables[0]
        self.state_slots: Int32Array = np.full(max_num_seqs, -1, np.int32)
        self.state_sources: Int32Array = np.full(max_num_seqs, -1, np.int32)
        self.state_copies: dict[int, list[tuple[int, int]]] = {}
        self.prompt_logprobs: dict[int, PromptLogprobs] = {}


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of a row's prompt that are still to be computed.

    first  position of the next token
    count  number of top logprobs per position
    """

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes.

    rows                  int32 [n]  each row at most once
    num_scheduled_tokens  int32 [n]  tokens to compute (≥ 1), from num_computed_tokens[row] on
    sample_rows           bool  [n]  rows that sample, because their tokens reach num_tokens[row]; the new token's
                                     position is num_tokens[row]
    num_draft_tokens      int32 [n]  or None if no row has drafts, the common case
    masks                 tokens allowed for each sample; None = all tokens, for all samples. Computed in parallel with
                          the forward pass; a runner waits for them when it samples

    Drafts are predictions of what a row will sample. The d drafts of a row are table.token_ids[row, num_tokens :
    num_tokens + d], the last d of its scheduled tokens; only rows that sample have any. Such a row samples 1 + d
    tokens from the logits of its last 1 + d scheduled tokens, each as if the drafts before it were output tokens: the
    j-th has position num_tokens[row] + j. The control side decides which of them are accepted. For a launched step the
    runner decides it as well, because the next step depends on it. In such a step all drafts of a row may be
    PENDING_TOKEN; the runner then looks them up in the row's text (`look_up`).
    """

    rows: Int32Array
    num_scheduled_tokens: Int32Array
    sample_rows: BoolArray
    num_draft_tokens: Int32Array | None = None
    masks: PendingMasks | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens in the step, drafts included."""
        return int(self.num_scheduled_tokens.sum())

    @property
    def num_samples(self) -> int:
        """Number of tokens that the step samples."""
        num_rows = int(np.count_nonzero(self.sample_rows))
        return num_rows if self.num_draft_tokens is None else num_rows + int(self.num_draft_tokens.sum())

    def samples(self, table: RowTable) -> tuple[Int32Array, Int32Array]:
        """Row and position of each sampled token, both int32 [num_samples], in the order of SampledTokens."""
        rows = self.rows[self.sample_rows]
        positions: Int32Array = table.num_tokens[rows]
        if self.num_draft_tokens is None:
            return rows, positions
        counts = self.num_draft_tokens[self.sample_rows] + 1
        starts = np.cumsum(counts, dtype=np.int32) - counts
        offsets = np.arange(counts.sum(), dtype=np.int32) - np.repeat(starts, counts)
        return np.repeat(rows, counts), np.repeat(positions, counts) + offsets

    def only(self, index: int) -> StepPlan:
        """The part for rows[index] of a plan without drafts."""
        part = slice(index, index + 1)
        masks = None
        if self.masks is not None:
            begin = int(np.count_nonzero(self.sample_rows[:index]))
            masks = self.masks.result().only(begin, begin + int(self.sample_rows[index]))
        return StepPlan(self.rows[part], self.num_scheduled_tokens[part], self.sample_rows[part], masks=masks)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What a step sampled.

    token_ids  int32 [plan.num_samples], in the order of plan.rows[plan.sample_rows], then of positions within a row
               (without drafts, one per row that samples)
    logprobs   by row, if its request asks for them: one for each of the row's tokens in token_ids
    errors     by row, the message for its client; the row ends and its token_ids are ignored
    refusals   as errors, if the request's own fields allow no token; the core adds them from the plan's masks
    forward_s  seconds of the forward pass, by the device's clock
    sample_s   seconds of sampling, by the same clock
    prompt_logprobs  by row, if it needs logprobs of its prompt: those of its next tokens
    num_accepted_tokens  int32 [rows with drafts], in the order of plan.rows: how many of each row's drafts match its
                         tokens, counted from the first; None unless a launched step had drafts

    Non-finite logits: a row's first position gets the error BROKEN_LOGITS; a later one gets NO_TOKEN (its
    logprobs are ignored), because the drafts before it may be wrong. If they are accepted, the position is the first
    one of the next step.
    """

    token_ids: Int32Array
    logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    errors: Mapping[int, str] = field(default_factory=dict)
    refusals: Mapping[int, str] = field(default_factory=dict)
    forward_s: float = 0.0
    sample_s: float = 0.0
    prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    num_accepted_tokens: Int32Array | None = None


@dataclass(frozen=True, slots=True)
class KVCopies:
    """KV blocks to copy as one batch. No two copies have the same target.

    to_host      direction: from the device to the host, else back
    blocks       int32 [n]  the device's blocks
    host_blocks  int32 [n]  the host's blocks
    """

    to_host: bool
    blocks: Int32Array
    host_blocks: Int32Array


class Runner(Protocol):
    """A loaded model with its KV memory (info.num_blocks blocks of info.block_size slots). One thread calls it.

    A row's tokens depend only on its own tokens and sampling parameters, never on other rows of the plan, on how its
    tokens were chunked, or on its drafts.
    """

    @property
    def info(self) -> ModelInfo:
        """Constant. max_model_len is the smaller of the config's and the model's limit."""

    def add_row(self, row: int, request: InferRequest) -> None:
        """Registers the sampling parameters of the request that was given this row. Called once per request, and not
        again after a preemption.

        A ValueError carries the message for the client: the request ends with it, and `remove_row` is not called.
        """

    def remove_row(self, row: int) -> None:
        """The row's request has ended; the row may be reused."""

    def execute(self, plan: StepPlan, table: RowTable) -> SampledTokens:
        """Computes the plan's tokens, writes their KV, and samples. The only call that sees the table.

        Must be repeatable: after an exception the same rows may be run again, together or one by one. So anything
        counted per token (penalties) is read from `table.token_ids`: for the token at position p, the output is
        token_ids[row, num_prompt_tokens[row] : p], including drafts before p. The KV of a draft is written to the slot
        of its position like any other; if the draft is rejected, a later step overwrites that slot before it is read.
        Slots at and beyond num_computed_tokens must not be read. Tokens in stop_token_ids, and end-of-sequence tokens
        unless ignore_eos, are never sampled among the first min_tokens output tokens. Any exception counts as a failure
        of all rows of the plan.
        """

    def close(self) -> None:
        """Frees memory and threads. Must be the last call."""


@runtime_checkable
class OverlappingRunner(Runner, Protocol):
    """A runner that computes a step while the host prepares the next one.

    Steps run in launch order, and each sees everything that earlier ones wrote and sampled: for PENDING_TOKEN in
    table.token_ids, the runner substitutes the token it sampled itself. Among the tokens that a plan computes, only the
    last token of a row can be pending, and it is the one sampled by the row's latest step; pending tokens further back
    in the row's output (which penalties count) were also sampled by steps in flight. If table.num_pending_drafts says
    that a row may be shorter than in the table, the runner knows by how much, and everything that the plan computes and
    samples for the row moves back by that many positions.

    `add_row` and `remove_row` may be called while steps with the row are in flight. Those steps continue with the row
    as launched; their results for it are dropped, and what they write to its blocks is never read. `execute` is
    `launch` followed by `collect`, except that all of its drafts are in the table; it is called only when nothing is in
    flight. `close` may be called at any time.
    """

    @property
    def launches_drafts(self) -> bool:
        """Whether launched plans may contain drafts."""

    @property
    def max_steps_in_flight(self) -> int:
        """Maximum number of steps launched but not collected: at least 1; 2 keeps the device busy."""

    def launch(self, step_id: int, plan: StepPlan, table: RowTable) -> None:
        """Starts a step and returns after reading plan, table and rows. Raises as `execute` does; the step was not
        launched then."""

    def collect(self) -> tuple[int, SampledTokens]:
        """Waits for the oldest launched step and returns its id and what it sampled. An exception ends this runner,
        because the state of the device is unknown."""


@runtime_checkable
class OffloadingRunner(Runner, Protocol):
    """A runner with info.num_host_blocks KV blocks in host memory in addition to those on the device."""

    def copy_blocks(self, copies: KVCopies) -> None:
        """Copies blocks, in order with other copies and with steps. May return before the copies are done. An exception
        ends this runner."""


@dataclass(frozen=True, slots=True)
class FlatStep:
    """A step's rows as one batch of tokens, concatenated. All int32.

    rows            [n]        in the order of the batch
    query_lens      [n]        tokens of each row that the step computes
    seq_lens        [n]        tokens of each row that have KV after the step
    query_start     [n + 1]    where each row's tokens begin in the batch
    token_ids       [tokens]
    positions       [tokens]   within their rows
    slots           [tokens]   KV slots, in the first group of layers
    sampled_tokens  [samples]  batch indices of the tokens whose logits are sampled, in the order of `plan.samples`
    """

    rows: Int32Array
    query_lens: Int32Array
    seq_lens: Int32Array
    query_start: Int32Array
    token_ids: Int32Array
    positions: Int32Array
    slots: Int32Array
    sampled_tokens: Int32Array

    def tokens_at(self, row: int, positions: Int32Array) -> Int32Array:
        """Index in the batch of these positions of a row."""
        index = int(np.flatnonzero(self.rows == row)[0])
        begin = int(self.query_start[index]) + int(self.query_lens[index]) - int(self.seq_lens[index])
        places: Int32Array = positions + np.int32(begin)
        return places

    def blocks_in_use(self, table: RowTable) -> Int32Array:
        """The block tables of the step's rows, cut to the longest one in use; int32 [groups, rows, blocks]."""
        width = -(-int(self.seq_lens.max()) // table.block_size)
        blocks: Int32Array = np.take(table.block_tables[:, :, :width], self.rows, axis=1)
        return blocks

    def slots_of_groups(self, table: RowTable) -> Int32Array:
        """`slots` for each group of layers; int32 [groups, tokens]."""
        if len(table.block_tables) == 1:
            return self.slots[None]
        token_rows, columns = np.repeat(self.rows, self.query_lens), self.positions // table.block_size
        blocks = np.stack([one[token_rows, columns] for one in table.block_tables])
        return blocks * np.int32(table.block_size) + self.positions % table.block_size


def flatten(plan: StepPlan, table: RowTable, order: Int32Array | None = None) -> FlatStep:
    """The plan's rows, in the given order or their own, as one batch."""
    rows, counts = plan.rows, plan.num_scheduled_tokens
    if order is not None:
        rows, counts = rows[order], counts[order]
    lens = table.num_computed_tokens[rows] + counts
    starts = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    ends = starts[1:]
    token_rows = np.repeat(rows, counts)
    positions = np.arange(ends[-1], dtype=np.int32) - np.repeat(ends - lens, counts)
    last_tokens = ends - 1
    if order is not None:
        last_tokens = np.empty_like(ends)
        last_tokens[order] = ends - 1
    blocks = table.block_table[token_rows, positions // table.block_size]
    return FlatStep(
        rows=rows,
        query_lens=counts,
        seq_lens=lens,
        query_start=starts,
        token_ids=table.token_ids[token_rows, positions],
        positions=positions,
        slots=blocks * np.int32(table.block_size) + positions % table.block_size,
        sampled_tokens=_with_drafts(plan, last_tokens[plan.sample_rows]),
    )


def _with_drafts(plan: StepPlan, last_tokens: Int32Array) -> Int32Array:
    """Batch indices of each sampled row's last known token and its drafts, given where each row's chunk ends."""
    if plan.num_draft_tokens is None:
        return last_tokens
    counts = plan.num_draft_tokens[plan.sample_rows] + 1
    ends = np.cumsum(counts, dtype=np.int32)
    return np.arange(counts.sum(), dtype=np.int32) + np.repeat(last_tokens + 1 - ends, counts)


class LookupLengths(NamedTuple):
    """Lengths in tokens of the shortest and the longest suffix of a text to look up in it."""

    shortest: int
    longest: int

    @classmethod
    def of(cls, config: SpeculativeConfig) -> LookupLengths:
        return cls(config.lookup_min, config.lookup_max)


def look_up(text: Int32Array, count: int, lengths: LookupLengths) -> Int32Array:
    """Predicts the next `count` tokens of a text, int32 [n], n ≥ 1: those after the last earlier occurrence of its
    longest matching suffix, repeated if the text ends before `count`. Without such an occurrence, the last token."""
    ends = np.arange(len(text) - 1)
    matched, is_equal = np.zeros(len(ends), np.int32), np.ones(len(ends), np.bool_)
    for back in range(min(lengths.longest, len(text) - 1)):
        is_equal = is_equal & (ends >= back) & (text[ends - back] == text[-1 - back])
        matched += is_equal
    source = len(text) - 1
    if len(ends) and (most := int(matched.max())) >= lengths.shortest:
        source = int(np.flatnonzero(matched == most)[-1]) + 1
    return np.resize(text[source:], count)
