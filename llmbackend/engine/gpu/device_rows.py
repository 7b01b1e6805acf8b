"""The rows of live requests on the device, and each step's batch as it follows from them there.

For: the runner, as a part of what it enqueues. Token ids, positions and slots of a step are worked out on the device,
where what the step before sampled is known first. Does not know: models, sampling, graphs, and when its work is done.
Invariants: all is work on device tensors with shapes that the host knows, so that nothing here waits; `layout` reads
memory at fixed addresses alone, so that it can be captured.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from .ops import Ops, StepLayout
from .step_message import NUM_SECTIONS, StepMessage, StepShape, section_words


class DeviceRows:
    """token_table int32 [max_num_seqs, max_model_len], num_prompt_tokens int32 [max_num_seqs], block_table int32
    [max_num_seqs, max_blocks_per_seq]: as of RowTable."""

    def __init__(
        self, device: torch.device, ops: Ops, max_num_seqs: int, max_model_len: int, block_size: int, max_words: int
    ) -> None:
        """max_words: of a usual message. Raises torch.OutOfMemoryError."""
        self._ops = ops
        numbers: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self._block_size = block_size
        self.token_table = torch.zeros((max_num_seqs, max_model_len), **numbers)
        self.num_prompt_tokens = torch.zeros(max_num_seqs, **numbers)
        self.block_table = torch.zeros((max_num_seqs, -(-max_model_len // block_size)), **numbers)
        self._message = torch.zeros(max_words, **numbers)
        self._step_words = NUM_SECTIONS * section_words(max_num_seqs)
        self._sections = self._message[: self._step_words].view(NUM_SECTIONS, -1)
        self._inputs = torch.zeros((3, max_num_seqs), **numbers)
        """Token ids, positions and slots of steps with one token of each sequence."""
        self._places = torch.arange(section_words(max_num_seqs), **numbers)
        self.forget_step()

    def forget_step(self) -> None:
        """Until the next message, all sequences are padding: one token of each, from which one is sampled."""
        self._sections.zero_()
        self._sections[1].copy_(self._places)
        self._sections[3].copy_(self._places)

    def upload(self, message: StepMessage) -> None:
        """Copies the message and does what it tells."""
        num_words = len(message.words)
        if num_words <= len(self._message):
            words = self._message[:num_words]
            words.copy_(message.words, non_blocking=True)
        else:
            words = message.words.to(self._message.device, non_blocking=True)
            self._message[: self._step_words] = words[: self._step_words]
        changes = words[self._step_words :]
        if message.num_blocks:
            rows, columns, values = changes[: 3 * message.num_blocks].view(3, -1)
            self.block_table[rows, columns] = values
        if message.num_prompts:
            self._add_rows(changes[3 * message.num_blocks :], message.num_prompts, message.num_prompt_tokens)

    def layout(self, shape: StepShape) -> StepLayout:
        """The batch of the step whose message was uploaded last; its rows, bounds and samples are views of memory that
        the next upload writes."""
        rows, query_start, seq_lens, sampled_tokens, sampled_rows, _ = self._sections
        rows, seq_lens = rows[: shape.num_rows], seq_lens[: shape.num_rows]
        query_start = query_start[: shape.num_rows + 1]
        if shape.num_tokens == shape.num_rows:
            token_ids, positions, slots = self._inputs[:, : shape.num_rows]
            tables = self.token_table, self.block_table, self._block_size
            self._ops.next_inputs(rows, seq_lens, *tables, token_ids, positions, slots)
        else:
            token_ids, positions, slots = self._ragged_inputs(rows, query_start, seq_lens, shape.num_tokens)
        return StepLayout(
            rows=rows,
            query_start=query_start,
            seq_lens=seq_lens,
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            sampled_tokens=sampled_tokens[: shape.num_samples],
            sampled_rows=sampled_rows[: shape.num_samples],
            max_query_len=shape.max_query_len,
            max_seq_len=shape.max_seq_len,
        )

    def samples(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and position of each of the first `count` tokens to sample; int32 [count] both, views as of `layout`."""
        return self._sections[4, :count], self._sections[5, :count]

    def put(self, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        """What was sampled becomes a part of the rows; int32 [samples] each."""
        self._ops.put_tokens(rows, positions, token_ids, self.token_table)

    def _ragged_inputs(
        self, rows: torch.Tensor, query_start: torch.Tensor, seq_lens: torch.Tensor, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token ids, positions and slots of a step without padding."""
        sequence = torch.repeat_interleave(query_start.diff(), output_size=num_tokens)
        places = torch.arange(num_tokens, dtype=torch.int32, device=rows.device)
        token_rows, positions = rows[sequence], seq_lens[sequence] - query_start[1:][sequence] + places
        blocks = self.block_table[token_rows, positions // self._block_size]
        slots = blocks * self._block_size + positions % self._block_size
        return self.token_table[token_rows, positions], positions, slots

    def _add_rows(self, words: torch.Tensor, num_rows: int, num_tokens: int) -> None:
        rows, num_prompt_tokens, lens = words[: 3 * num_rows].view(3, -1)
        self.num_prompt_tokens[rows] = num_prompt_tokens
        starts = functional.pad(torch.cumsum(lens, 0, dtype=torch.int32), (1, 0))
        sequence = torch.repeat_interleave(lens, output_size=num_tokens)
        places = torch.arange(num_tokens, dtype=torch.int32, device=words.device)
        self.token_table[rows[sequence], places - starts[sequence]] = words[3 * num_rows :]
