"""The rows of live requests on the device, the message that updates them for a step, and the step's batch.

For: the runner. A row's tokens are sent once, with its first step; of its block table, what changed; of a step, its
rows and how far each gets. Token ids, positions and slots are computed on the device, where the tokens of the step
before are known first. Does not know: models, sampling, graphs, when its work is done.
Invariants: a message is written from the plan and the table alone, before `write` returns; its memory is reused only
after the event behind its step; what a message that was not sent held is sent again with the next one; `layout` reads
memory at fixed addresses alone, so that it can be captured, and nothing here waits for the device.
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
    multiples of 16 bytes: kernels are compiled for addresses that do."""
    return -(-(max_sequences + 1) // 4) * 4


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the host knows of a step's batch, padding included."""

    num_rows: int
    """Sequences (row_messages.py)."""
    num_tokens: int
    num_samples: int
    max_query_len: int
    """At least the most tokens of a sequence in the batch."""
    max_seq_len: int
    """At least the most keys of a sequence."""
    adapts: bool
    """Whether tokens may have LoRA adapters."""


@dataclass(frozen=True, slots=True)
class Padded:
    """What a captured step is padded to. A decode step has one token of each sequence, and samples all of them; its
    padding sequences, too, have a token. Those of a mixed step have none."""

    num_rows: int
    """Sequences."""
    num_tokens: int
    is_decode: bool
    adapts: bool = False
    """Whether tokens may have LoRA adapters."""


@dataclass(frozen=True, slots=True, eq=False)
class _Changes:
    """What the device's rows lack."""

    drafted: Int32Array
    """[NUM_FIELDS, n]: `drafted_rows`. The first of all, so that it begins at a multiple of 16 bytes."""
    blocks: Int32Array
    """[3, n]: rows, columns and values of the block table."""
    drafts: Int32Array
    """[3, n]: rows, positions and ids of tokens that the host knows. They hold for this step alone: it samples other
    ones over them."""
    prompts: Int32Array
    """[4, n]: rows, lengths of their prompts, lengths of all their tokens, slots of their LoRA adapters."""
    token_ids: Int32Array
    """[tokens]: all tokens of those rows, one row after the other."""

    @property
    def num_words(self) -> int:
        return sum(part.size for part in self._parts)

    @property
    def _parts(self) -> tuple[Int32Array, ...]:
        """In the order of the message."""
        return self.drafted, self.blocks, self.drafts, self.prompts, self.token_ids

    def write(self, words: Int32Array) -> None:
        if len(words):
            np.concatenate([part.reshape(-1) for part in self._parts], out=words)


@dataclass(frozen=True, slots=True, eq=False)
class StepMessage:
    """Everything that the device must be told before it computes a step."""

    shape: StepShape
    words: torch.Tensor
    """int32, pinned: the sections, rows with drafts (NUM_FIELDS * num_drafted), changed blocks (3 * num_blocks), drafts
    (3 * num_drafts), new rows (4 * num_prompts), their tokens (num_prompt_tokens)."""
    num_drafted: int
    num_blocks: int
    num_drafts: int
    num_prompts: int
    num_prompt_tokens: int
    changes: _Changes = field(repr=False)
    buffer: _Buffer = field(repr=False)

    @property
    def places_of_drafts(self) -> Int32Array:
        """Which of the rows of `DeviceRows.accepted` have drafts in this step: their places."""
        places: Int32Array = np.flatnonzero(self.changes.drafted[5]).astype(np.int32)
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
        """max_sequences: of a step. num_groups: of layers."""
        self._device = device
        self._section_words = section_words(max_sequences)
        self._step_words = NUM_SECTIONS * self._section_words
        self.max_words = self._step_words + (2 + 6 * num_groups + NUM_FIELDS) * max_sequences + max_model_len
        """Words of a usual message; one with many long prompts at once is longer, and gets memory of its own."""
        self._buffers = [_Buffer(device.pinned(self.max_words, torch.int32)) for _ in range(max_steps_in_flight)]
        self._blocks = BlockTableMirror(max_num_seqs, -(-max_model_len // block_size), num_groups)
        self._new_rows: set[int] = set()
        self._adapter_of_row: Int32Array = np.full(max_num_seqs, NO_ADAPTER, np.int32)

    def add(self, row: int, adapter: int = NO_ADAPTER) -> None:
        """The row has a new request. adapter: its slot among LoRA adapters."""
        self._new_rows.add(row)
        self._adapter_of_row[row] = adapter

    def remove(self, row: int) -> None:
        self._new_rows.discard(row)

    def expect_adapters(self) -> None:
        """Steps are launched as if every row had an adapter, until the row is added."""
        self._adapter_of_row.fill(0)

    def adapts(self, plan: StepPlan) -> bool:
        """Whether a row of the step has an adapter."""
        return bool((self._adapter_of_row[plan.rows] != NO_ADAPTER).any())

    def write(self, plan: StepPlan, table: RowTable, padded: Padded | None = None) -> StepMessage:
        """padded: for a captured graph; what is behind the plan's own is padding. None: only the plan's."""
        known = drafted_rows(plan, table), self._blocks.changes(plan, table), _drafts(plan, table)
        changes = _Changes(*known, *self._prompts(plan, table))
        buffer = self._buffer(self._step_words + changes.num_words)
        words = buffer.words.numpy()
        padded = padded or Padded(num_sequences(plan), plan.num_tokens, False, self.adapts(plan))
        shape = self._write_step(StepSequences.of(plan, table), padded, words)
        num_words = self._step_words + changes.num_words
        changes.write(words[self._step_words : num_words])
        return StepMessage(
            shape=shape,
            words=buffer.words[:num_words],
            num_drafted=changes.drafted.shape[1],
            num_blocks=changes.blocks.shape[1],
            num_drafts=changes.drafts.shape[1],
            num_prompts=changes.prompts.shape[1],
            num_prompt_tokens=len(changes.token_ids),
            changes=changes,
            buffer=buffer,
        )

    def sent(self, message: StepMessage, event: Event) -> None:
        """The device reads the message before `event` passes."""
        message.buffer.event = event
        if message.num_blocks:
            self._blocks.told(message.changes.blocks)
        if message.num_prompts:
            self._new_rows.difference_update(message.changes.prompts[0].tolist())

    def _buffer(self, num_words: int) -> _Buffer:
        """Memory that no step in flight reads: that of the oldest step."""
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
    is_draft = rows[1:] == rows[:-1]  # what a row samples last is behind its last draft
    rows, positions = rows[:-1][is_draft], positions[:-1][is_draft]
    drafts = np.stack((rows, positions, table.token_ids[rows, positions]))
    return drafts[:, drafts[2] != PENDING_TOKEN]


class DeviceRows:
    """The rows on the device. As in RowTable, all int32: token_table [max_num_seqs, max_model_len], num_prompt_tokens
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
        """max_words: of a usual message (StepMessages.max_words). max_sequences, max_tokens: of a step. lookup: None
        where no drafts are looked up. Raises torch.OutOfMemoryError."""
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
        """Of the rows with drafts of earlier steps, as many as were accepted."""
        self._drafted = torch.zeros((NUM_FIELDS, 0), **numbers)
        self._accepted = torch.zeros(max_sequences, **numbers)

    def forget_step(self, size: Padded) -> None:
        """Until the next message there is nothing but the padding of a step of this size."""
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
        changes = words[self._step_words :]
        self._drafted = changes[: NUM_FIELDS * message.num_drafted].view(NUM_FIELDS, -1)
        changes = changes[NUM_FIELDS * message.num_drafted :]
        if message.num_blocks:
            rows, columns, values = changes[: 3 * message.num_blocks].view(3, -1)
            self.block_tables.view(-1, self.block_tables.shape[2])[rows, columns] = values
        changes = changes[3 * message.num_blocks :]
        if message.num_drafts:
            rows, positions, token_ids = changes[: 3 * message.num_drafts].view(3, -1)
            self.token_table[rows, positions] = token_ids
        if message.num_prompts:
            self._add_rows(changes[3 * message.num_drafts :], message.num_prompts, message.num_prompt_tokens)
        if message.num_drafted:
            lens, positions = self._sections[2], self._sections[5]
            self._ops.begin_drafts(self._drafted, self._lookup, self.token_table, self._num_tokens, lens, positions)

    def layout(self, shape: StepShape) -> StepLayout:
        """The batch of the step whose message was uploaded last. Its tensors may be views of memory that the next
        upload writes."""
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
        """Places in the batch of the first `count` tokens to sample; a view as of `layout`."""
        return self._sections[3, :count]

    def samples(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and position of each of the first `count` tokens to sample; int32 [count] both, views as of `layout`."""
        return self._sections[4, :count], self._sections[5, :count]

    def put(self, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Adds the step's sampled tokens to the rows; int32 [samples] each."""
        if self._drafted.shape[1]:
            drafts = self._drafted, token_ids, self.token_table, self._num_tokens, self.accepted
            self._ops.accept_drafts(*drafts)
        self._ops.put_tokens(rows, positions, token_ids, self.token_table)

    @property
    def accepted(self) -> torch.Tensor:
        """How many drafts of each of the step's rows with drafts, now or before, are accepted; int32, valid after `put`
        and until the next step's."""
        return self._accepted[: self._drafted.shape[1]]

    def _add_rows(self, words: torch.Tensor, num_rows: int, num_tokens: int) -> None:
        rows, num_prompt_tokens, lens, adapters = words[: 4 * num_rows].view(4, -1)
        self.num_prompt_tokens[rows] = num_prompt_tokens
        self.adapter_of_row[rows] = adapters
        starts = functional.pad(torch.cumsum(lens, 0, dtype=torch.int32), (1, 0))
        sequence = torch.repeat_interleave(lens, output_size=num_tokens)
        places = torch.arange(num_tokens, dtype=torch.int32, device=words.device)
        self.token_table[rows[sequence], places - starts[sequence]] = words[4 * num_rows :]
