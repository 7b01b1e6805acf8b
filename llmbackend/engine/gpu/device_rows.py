"""The rows of live requests on the device, the message that updates them for a step, and the step's batch.

Used by the runner. A row's tokens are sent once, with its first step; later messages contain changes of its block
table, the rows of the step, and how far each is computed. Token ids, positions and slots are computed on the device,
which is the first to know the tokens of the previous step. Invariants: a message depends only on the plan and the
table, and is complete when `write` returns; its memory is reused only after the event that follows its step; if a
message is never sent, its changes are sent with the next one; `layout` reads memory only at fixed addresses, so it can
be captured; nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from ..step import PENDING_TOKEN, Int32Array, LookupLengths, RowTable, StepPlan
from .device import Device, Event
from .ops.ops import NO_ADAPTER, Ops, StepLayout
from .row_messages import NO_CHANGES, NUM_FIELDS, BlockTableMirror, StepSequences, drafted_rows, num_sequences

NUM_SECTIONS = 6
"""rows, query_start, seq_lens, sampled_tokens, sampled_rows, sampled_positions: each of section_words words."""


def section_words(max_sequences: int) -> int:
    """Words (int32) of one section of a message; query_start has one more than there are sequences. Sections begin at
    multiples of 16 bytes, because kernels are compiled for such addresses."""
    return -(-(max_sequences + 1) // 4) * 4


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the host knows about the batch of a step, including padding."""

    num_rows: int
    """Sequences (row_messages.py)."""
    num_tokens: int
    num_samples: int
    max_query_len: int
    """Upper bound on the tokens of one sequence in the batch."""
    max_seq_len: int
    """Upper bound on the keys of one sequence."""
    adapts: bool
    """Whether tokens may have LoRA adapters."""


@dataclass(frozen=True, slots=True)
class Padded:
    """The size to which a captured step is padded. Every sequence of a decode step, padding included, has one token and
    is sampled; padding sequences of a mixed step have no tokens."""

    num_rows: int
    """Sequences."""
    num_tokens: int
    is_decode: bool
    adapts: bool = False
    """Whether tokens may have LoRA adapters."""


@dataclass(frozen=True, slots=True, eq=False)
class _Changes:
    """What the device does not know yet, in message order."""

    drafted: Int32Array
    """[NUM_FIELDS, n]: `drafted_rows`. First, to start at a multiple of 16 bytes."""
    blocks: Int32Array
    """[3, n]: rows, columns and values of the block table."""
    drafts: Int32Array
    """[3, n]: rows, positions and ids of drafts that the host knows. Valid only for this step, whose samples overwrite
    them."""
    prompts: Int32Array
    """[4, n]: rows, lengths of their prompts, total lengths, slots of their LoRA adapters."""
    token_ids: Int32Array
    """[tokens]: all tokens of those rows, row by row."""

    @property
    def parts(self) -> tuple[Int32Array, ...]:
        return self.drafted, self.blocks, self.drafts, self.prompts, self.token_ids


@dataclass(frozen=True, slots=True, eq=False)
class StepMessage:
    """Everything that the device must know before it computes a step."""

    shape: StepShape
    words: torch.Tensor
    """int32, pinned: the sections, then the changes."""
    changes: _Changes = field(repr=False)
    buffer: _Buffer = field(repr=False)

    @property
    def draft_indices(self) -> Int32Array:
        """Indices in `DeviceRows.accepted` of the rows that have drafts in this step."""
        *_, num_drafts, _ = self.changes.drafted
        places: Int32Array = np.flatnonzero(num_drafts).astype(np.int32)
        return places


class _Buffer:
    """Pinned memory of one step in flight."""

    def __init__(self, words: torch.Tensor) -> None:
        self.words = words
        self.event: Event | None = None


class StepMessages:
    def __init__(
        self,
        device: Device,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        max_sequences: int,
        max_steps_in_flight: int,
        num_groups: int = 1,
    ) -> None:
        """max_sequences: of a step. num_groups: groups of layers."""
        self._device = device
        self._section_words = section_words(max_sequences)
        self._step_words = NUM_SECTIONS * self._section_words
        self.max_words = self._step_words + (2 + 6 * num_groups + NUM_FIELDS) * max_sequences + max_model_len
        """Words of a usual message; one with many long prompts is longer and gets separate memory."""
        self._buffers = [_Buffer(device.pinned(self.max_words, torch.int32)) for _ in range(max_steps_in_flight)]
        self._blocks = BlockTableMirror(max_num_seqs, -(-max_model_len // block_size), num_groups)
        self._new_rows: set[int] = set()
        self._adapter_of_row: Int32Array = np.full(max_num_seqs, NO_ADAPTER, np.int32)

    def add(self, row: int, adapter: int = NO_ADAPTER) -> None:
        """The row has a new request. adapter: the slot of its LoRA adapter."""
        self._new_rows.add(row)
        self._adapter_of_row[row] = adapter

    def remove(self, row: int) -> None:
        self._new_rows.discard(row)

    def expect_adapters(self) -> None:
        """Launches steps as if every row had an adapter, until a request is added to the row."""
        self._adapter_of_row.fill(0)

    def adapts(self, plan: StepPlan) -> bool:
        """Whether a row of the step has an adapter."""
        return bool((self._adapter_of_row[plan.rows] != NO_ADAPTER).any())

    def write(self, plan: StepPlan, table: RowTable, padded: Padded | None = None) -> StepMessage:
        """padded: the size of a captured graph; None = no padding."""
        known = drafted_rows(plan, table), self._blocks.changes(plan, table), _drafts(plan, table)
        changes = _Changes(*known, *self._prompts(plan, table))
        num_words = self._step_words + sum(part.size for part in changes.parts)
        buffer = self._buffer(num_words)
        words = buffer.words.numpy()
        padded = padded or Padded(num_sequences(plan), plan.num_tokens, False, self.adapts(plan))
        shape = self._write_step(StepSequences.of(plan, table), padded, words)
        if num_words > self._step_words:
            changed = words[self._step_words : num_words]
            np.concatenate([part.reshape(-1) for part in changes.parts], out=changed)
        return StepMessage(shape, buffer.words[:num_words], changes, buffer)

    def sent(self, message: StepMessage, event: Event) -> None:
        """The device reads the message before `event` passes."""
        message.buffer.event = event
        if message.changes.blocks.size:
            self._blocks.mark_sent(message.changes.blocks)
        if message.changes.prompts.size:
            self._new_rows.difference_update(message.changes.prompts[0].tolist())

    def _buffer(self, num_words: int) -> _Buffer:
        """Memory that no step in flight reads: the buffer of the oldest step."""
        if num_words > self.max_words:
            return _Buffer(self._device.pinned(num_words, torch.int32))
        buffer = self._buffers.pop(0)
        self._buffers.append(buffer)
        if buffer.event is not None:
            buffer.event.wait()
        return buffer

    def _prompts(self, plan: StepPlan, table: RowTable) -> tuple[Int32Array, Int32Array]:
        new = [row for row in plan.rows.tolist() if row in self._new_rows] if self._new_rows else []
        if not new:
            return np.empty((4, 0), np.int32), NO_CHANGES[0]
        rows = np.array(new, np.int32)
        lens, adapters = table.num_tokens[rows], self._adapter_of_row[rows]
        tokens = [table.token_ids[row, :length] for row, length in zip(new, lens.tolist(), strict=True)]
        return np.stack((rows, table.num_prompt_tokens[rows], lens, adapters)), np.concatenate(tokens)

    def _write_step(self, step: StepSequences, padded: Padded, words: Int32Array) -> StepShape:
        sections = words[: self._step_words].reshape(NUM_SECTIONS, self._section_words)
        rows, query_start, seq_lens, sampled_tokens, sampled_rows, sampled_positions = sections
        n, num_rows = len(step.rows), padded.num_rows
        rows[:n], rows[n:num_rows] = step.rows, 0
        seq_lens[:n], seq_lens[n:num_rows] = step.seq_lens, 0
        query_start[0] = 0
        np.cumsum(step.query_lens, out=query_start[1 : n + 1])
        padding = np.arange(1, num_rows - n + 1) if padded.is_decode else 0
        query_start[n + 1 : num_rows + 1] = query_start[n] + padding
        sampled = np.arange(num_rows) if padded.is_decode else np.flatnonzero(step.samples)
        count = len(sampled)
        sampled_tokens[:count] = query_start[1:][sampled] - 1
        sampled_rows[:count], sampled_positions[:count] = rows[sampled], seq_lens[sampled]
        longest = int(step.query_lens.max()), int(step.seq_lens.max())
        return StepShape(num_rows, padded.num_tokens, count, *longest, padded.adapts)


def _drafts(plan: StepPlan, table: RowTable) -> Int32Array:
    if plan.num_draft_tokens is None:
        return NO_CHANGES
    rows, positions = plan.samples(table)
    is_draft = rows[1:] == rows[:-1]  # the last sample of a row follows its last draft
    rows, positions = rows[:-1][is_draft], positions[:-1][is_draft]
    drafts = np.stack((rows, positions, table.token_ids[rows, positions]))
    return drafts[:, drafts[2] != PENDING_TOKEN]


class DeviceRows:
    """The rows on the device, int32, as in RowTable: token_table [max_num_seqs, max_model_len], num_prompt_tokens
    [max_num_seqs], block_tables [groups, max_num_seqs, max_blocks_per_seq or more], block_table of the first group; and
    adapter_of_row [max_num_seqs], the slot of each row's LoRA adapter."""

    def __init__(
        self,
        device: torch.device,
        ops: Ops,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        max_sequences: int,
        max_words: int,
        max_tokens: int,
        lookup: LookupLengths | None = None,
        num_groups: int = 1,
    ) -> None:
        """max_words: of a usual message (StepMessages.max_words). max_sequences, max_tokens: of a step. lookup: None =
        no drafts are looked up. Raises torch.OutOfMemoryError."""
        self._ops = ops
        numbers: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self._block_size = block_size
        self.token_table = torch.zeros((max_num_seqs, max_model_len), **numbers)
        self.num_prompt_tokens = torch.zeros(max_num_seqs, **numbers)
        self.adapter_of_row = torch.full((max_num_seqs,), NO_ADAPTER, **numbers)
        num_columns = -(-max_model_len // block_size)
        if num_groups > 1:  # kernels are compiled for addresses that are multiples of 16 bytes
            num_columns = -(-num_columns // 4) * 4
        self.block_tables = torch.zeros((num_groups, max_num_seqs, num_columns), **numbers)
        self.block_table = self.block_tables[0]
        self._message = torch.zeros(max_words, **numbers)
        self._step_words = NUM_SECTIONS * section_words(max_sequences)
        self._sections = self._message[: self._step_words].view(NUM_SECTIONS, -1)
        self._inputs = torch.zeros((3 + num_groups, section_words(max_tokens)), **numbers)
        """Token ids, positions and adapters of a step, and its slots in each group of layers."""
        self._places = torch.arange(section_words(max_sequences), **numbers)
        self.looks_up = lookup is not None
        self._lookup = lookup
        self._num_tokens = torch.zeros(max_num_seqs, **numbers)
        """Of rows that had drafts in earlier steps; includes accepted drafts."""
        self._drafted = torch.zeros((NUM_FIELDS, 0), **numbers)
        self._accepted = torch.zeros(max_sequences, **numbers)

    def forget_step(self, size: Padded) -> None:
        """Leaves only the padding of a step of this size, until the next message."""
        self._sections.zero_()
        if size.is_decode:
            self._sections[1].copy_(self._places)
            self._sections[3].copy_(self._places)

    def upload(self, message: StepMessage) -> None:
        """Copies the message and applies its changes."""
        num_words = len(message.words)
        if num_words <= len(self._message):
            words = self._message[:num_words]
            words.copy_(message.words, non_blocking=True)
        else:
            words = message.words.to(self._message.device, non_blocking=True)
            self._message[: self._step_words] = words[: self._step_words]
        sizes = [self._step_words, *(part.size for part in message.changes.parts)]
        _, drafted, blocks, drafts, prompts, prompt_token_ids = torch.split(words, sizes)
        self._drafted = drafted.view(NUM_FIELDS, -1)
        if len(blocks):
            rows, columns, values = blocks.view(3, -1)
            self.block_tables.view(-1, self.block_tables.shape[2])[rows, columns] = values
        if len(drafts):
            rows, positions, token_ids = drafts.view(3, -1)
            self.token_table[rows, positions] = token_ids
        if len(prompts):
            self._add_rows(prompts, prompt_token_ids)
        if len(drafted):
            lens, positions = self._sections[2], self._sections[5]
            self._ops.begin_drafts(self._drafted, self._lookup, self.token_table, self._num_tokens, lens, positions)

    def layout(self, shape: StepShape) -> StepLayout:
        """The batch of the most recently uploaded step. Its tensors may be views of memory that the next upload
        overwrites."""
        rows, query_start, seq_lens = self._sections[:3]
        rows, seq_lens = rows[: shape.num_rows], seq_lens[: shape.num_rows]
        query_start = query_start[: shape.num_rows + 1]
        token_ids, positions, adapters, *slots = self._inputs[:, : shape.num_tokens]
        for block_table, slots_of_group in zip(self.block_tables, slots, strict=True):
            tables = self.token_table, block_table, self._block_size, self.adapter_of_row
            inputs = token_ids, positions, slots_of_group, adapters
            self._ops.step_inputs(rows, query_start, seq_lens, *tables, *inputs)
        return StepLayout(
            rows=rows,
            query_start=query_start,
            seq_lens=seq_lens,
            token_ids=token_ids,
            positions=positions,
            slots=slots[0],
            sampled_tokens=self.sampled_tokens(shape.num_samples),
            max_query_len=shape.max_query_len,
            max_seq_len=shape.max_seq_len,
            adapters=adapters if shape.adapts else None,
            other_groups=tuple(zip(slots[1:], self.block_tables[1:], strict=True)),
        )

    def sampled_tokens(self, count: int) -> torch.Tensor:
        """Indices in the batch of the first `count` tokens to sample; a view as in `layout`."""
        return self._sections[3, :count]

    def samples(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and position of each of the first `count` tokens to sample: int32 [count] each, views as in `layout`."""
        return self._sections[4, :count], self._sections[5, :count]

    def put(self, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Adds the sampled tokens of the step to the rows; int32 [samples] each."""
        if self._drafted.shape[1]:
            drafts = self._drafted, token_ids, self.token_table, self._num_tokens, self.accepted
            self._ops.accept_drafts(*drafts)
        self._ops.put_tokens(rows, positions, token_ids, self.token_table)

    @property
    def accepted(self) -> torch.Tensor:
        """Number of accepted drafts of each row in `_Changes.drafted`; int32, valid from `put` until the next
        upload."""
        return self._accepted[: self._drafted.shape[1]]

    def _add_rows(self, prompts: torch.Tensor, token_ids: torch.Tensor) -> None:
        rows, num_prompt_tokens, lens, adapters = prompts.view(4, -1)
        self.num_prompt_tokens[rows] = num_prompt_tokens
        self.adapter_of_row[rows] = adapters
        starts = functional.pad(torch.cumsum(lens, 0, dtype=torch.int32), (1, 0))
        sequence = torch.repeat_interleave(lens, output_size=len(token_ids))
        places = torch.arange(len(token_ids), dtype=torch.int32, device=token_ids.device)
        self.token_table[rows[sequence], places - starts[sequence]] = token_ids
