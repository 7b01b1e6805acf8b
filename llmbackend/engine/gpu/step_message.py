"""What the device must be told for a step, as one message of whole numbers in pinned memory.

For: the runner, which enqueues the message's copy and what follows from it (device_rows.py). A row's tokens are told
once, with its first step; of its block table, what changed; of a step, its rows and how far each gets. Does not know:
models, sampling, the device's work. Invariants: a message is written from the plan and the table alone, before `write`
returns; its memory is left alone until the event behind its step has passed; of a message that was not sent no trace
stays: what it told is told again with the next one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from ..step import Int32Array, RowTable, StepPlan
from .device import Device, Event

NUM_SECTIONS = 6
"""rows · query_start · seq_lens · sampled_tokens · sampled_rows · sampled_positions: each of section_words words."""


_NONE: Int32Array = np.empty((3, 0), np.int32)


def section_words(max_num_seqs: int) -> int:
    return max_num_seqs + 1


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the host knows of a step's batch, padding included: sequences, their tokens, tokens to sample, and bounds on
    a sequence's tokens in the batch and on its keys."""

    num_rows: int
    num_tokens: int
    num_samples: int
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True, slots=True, eq=False)
class _Changes:
    """What the device's rows lack. blocks [3, n]: rows, columns and values of the block table. prompts [3, n]: rows,
    lengths of their prompts and lengths of all their tokens; token_ids: those tokens, one row after the other."""

    blocks: Int32Array
    prompts: Int32Array
    token_ids: Int32Array

    @property
    def num_words(self) -> int:
        return self.blocks.size + self.prompts.size + self.token_ids.size

    def write(self, words: Int32Array) -> None:
        if len(words):
            np.concatenate((self.blocks.reshape(-1), self.prompts.reshape(-1), self.token_ids), out=words)


@dataclass(frozen=True, slots=True, eq=False)
class StepMessage:
    """words int32, pinned: the sections, then changed blocks (3 * num_blocks), new rows (3 * num_prompts) and their
    tokens (num_prompt_tokens)."""

    shape: StepShape
    words: torch.Tensor
    num_blocks: int
    num_prompts: int
    num_prompt_tokens: int
    changes: _Changes = field(repr=False)
    buffer: _Buffer = field(repr=False)


class _Buffer:
    """Pinned memory of one step in flight."""

    def __init__(self, words: torch.Tensor) -> None:
        self.words = words
        self.event: Event | None = None


class StepMessages:
    def __init__(
        self, device: Device, max_num_seqs: int, max_model_len: int, block_size: int, max_steps_in_flight: int
    ) -> None:
        self._device, self._block_size = device, block_size
        self._section_words = section_words(max_num_seqs)
        self._step_words = NUM_SECTIONS * self._section_words
        self.max_words = self._step_words + 8 * max_num_seqs + max_model_len
        """Of a usual message; one that tells of many long prompts at once is longer, and gets memory of its own."""
        self._buffers = [_Buffer(device.pinned(self.max_words, torch.int32)) for _ in range(max_steps_in_flight)]
        self._mirror = np.zeros((max_num_seqs, -(-max_model_len // block_size)), np.int32)
        """What the device's block table holds once it has read all messages that were sent."""
        self._new_rows: set[int] = set()

    def add(self, row: int) -> None:
        """The row has a new request."""
        self._new_rows.add(row)

    def remove(self, row: int) -> None:
        self._new_rows.discard(row)

    def write(self, plan: StepPlan, table: RowTable, num_rows: int | None = None) -> StepMessage:
        """num_rows: as many sequences as a captured graph has, which samples of all of them; those behind the plan's
        are padding. None: the plan's."""
        changes = _Changes(self._changed_blocks(plan, table), *self._prompts(plan, table))
        buffer = self._buffer(self._step_words + changes.num_words)
        words = buffer.words.numpy()
        shape = self._write_step(plan, table, num_rows or len(plan.rows), words)
        num_words = self._step_words + changes.num_words
        changes.write(words[self._step_words : num_words])
        return StepMessage(
            shape=shape,
            words=buffer.words[:num_words],
            num_blocks=changes.blocks.shape[1],
            num_prompts=changes.prompts.shape[1],
            num_prompt_tokens=len(changes.token_ids),
            changes=changes,
            buffer=buffer,
        )

    def sent(self, message: StepMessage, event: Event) -> None:
        """The device will read the message, and has when the event has passed."""
        message.buffer.event = event
        if message.num_blocks:
            rows, columns, values = message.changes.blocks
            self._mirror[rows, columns] = values
        if message.num_prompts:
            self._new_rows.difference_update(message.changes.prompts[0].tolist())

    def _buffer(self, num_words: int) -> _Buffer:
        """Memory that no step in flight reads: that of the step that was sent the longest time ago."""
        if num_words > self.max_words:
            return _Buffer(self._device.pinned(num_words, torch.int32))
        buffer = self._buffers.pop(0)
        self._buffers.append(buffer)
        if buffer.event is not None:
            buffer.event.wait()
        return buffer

    def _changed_blocks(self, plan: StepPlan, table: RowTable) -> Int32Array:
        """Up to the last block of the longest row: what lies behind a shorter row's is stale, and harmless."""
        reach = int((table.num_computed_tokens[plan.rows] + plan.num_scheduled_tokens).max())
        width = -(-reach // self._block_size)
        wanted = table.block_table[plan.rows, :width]  # np.take would copy the whole slice first
        differ = wanted != self._mirror[plan.rows, :width]
        if not differ.any():
            return _NONE
        places, columns = np.nonzero(differ)
        return np.stack((plan.rows[places], columns.astype(np.int32), wanted[places, columns]))

    def _prompts(self, plan: StepPlan, table: RowTable) -> tuple[Int32Array, Int32Array]:
        new = [row for row in plan.rows.tolist() if row in self._new_rows] if self._new_rows else []
        if not new:
            return _NONE, _NONE[0]
        rows = np.array(new, np.int32)
        lens = table.num_tokens[rows]
        tokens = [table.token_ids[row, :length] for row, length in zip(new, lens.tolist(), strict=True)]
        return np.stack((rows, table.num_prompt_tokens[rows], lens)), np.concatenate(tokens)

    def _write_step(self, plan: StepPlan, table: RowTable, num_rows: int, words: Int32Array) -> StepShape:
        sections = words[: self._step_words].reshape(NUM_SECTIONS, self._section_words)
        rows, query_start, seq_lens, sampled_tokens, sampled_rows, sampled_positions = sections
        n, counts = len(plan.rows), plan.num_scheduled_tokens
        rows[:n], rows[n:num_rows] = plan.rows, 0
        seq_lens[:n], seq_lens[n:num_rows] = table.num_computed_tokens[plan.rows] + counts, 0
        query_start[0] = 0
        np.cumsum(counts, out=query_start[1 : n + 1])
        num_tokens = int(query_start[n])
        query_start[n + 1 : num_rows + 1] = np.arange(num_tokens + 1, num_tokens + 1 + num_rows - n)
        sampled = np.arange(num_rows) if num_rows > n else np.flatnonzero(plan.sample_rows)
        count = len(sampled)
        sampled_tokens[:count] = query_start[1:][sampled] - 1
        sampled_rows[:count], sampled_positions[:count] = rows[sampled], seq_lens[sampled]
        return StepShape(num_rows, num_tokens + num_rows - n, count, int(counts.max()), int(seq_lens[:n].max()))
