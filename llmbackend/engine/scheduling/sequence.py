"""A request inside the engine, its end conditions, and the rows of live requests.

Used by scheduler and engine core. Invariant: a row belongs to at most one sequence, and the runner knows exactly the
rows in use.
"""

from __future__ import annotations

import numpy as np

from ..grammars.row_constraint import RowConstraint
from ..grammars.row_constraint import refusal as constraint_refusal
from ..memory.prefix_cache import Prefix
from ..messages import InferRequest, ModelInfo, OutputEnd, stop_token_ids
from ..step import Int32Array, PromptLogprobs, RowTable, Runner


class Sequence:
    """One live request. Sequences are ordered by key: the smallest is served first and preempted last.

    key                (priority, arrival)
    constraint         which tokens it may get; None = all
    row                -1 until it is admitted, then its row until it ends
    token_ids          its tokens as int32 [n], from its first time at the head of the queue until it has a row
    found              what the prefix cache had for it when it was last at the head of the queue; None once it runs
    num_cached_tokens  prefix-cache hit at its first admission; -1 before
    max_total_tokens   tokens, prompt included, at which it ends
    end                its end conditions; counts include the prompt
    """

    __slots__ = (
        "constraint",
        "end",
        "found",
        "key",
        "max_total_tokens",
        "num_cached_tokens",
        "request",
        "row",
        "token_ids",
    )

    def __init__(self, request: InferRequest, arrival: int, info: ModelInfo) -> None:
        sampling, prompt_len = request.sampling, len(request.prompt_token_ids)
        self.request = request
        self.row = -1
        self.token_ids: Int32Array | None = None
        self.found: Prefix | None = None
        self.constraint: RowConstraint | None = None
        self.num_cached_tokens = -1
        self.key = (request.priority, arrival)
        self.max_total_tokens = min(prompt_len + sampling.max_tokens, info.max_model_len)
        stops = stop_token_ids(sampling, info.eos_token_ids)
        self.end = OutputEnd(stops, prompt_len + sampling.min_tokens, self.max_total_tokens)

    def __lt__(self, other: Sequence) -> bool:
        return self.key < other.key


def refusal(request: InferRequest, info: ModelInfo) -> str:
    """Why this request can never run on this model, naming field, value and limit; "" = it can."""
    prompt, output = request.prompt_token_ids, request.output_token_ids
    if not prompt:
        return "prompt_token_ids is empty, expected at least 1 token"
    if len(prompt) >= info.max_model_len:
        return (
            f"prompt_token_ids has {len(prompt)} tokens, expected at most {info.max_model_len - 1} "
            f"(max_model_len {info.max_model_len}, one token to generate)"
        )
    if error := constraint_refusal(request, info.vocab_size):
        return error
    if request.sampling.max_tokens < 0:
        return f"max_tokens is {request.sampling.max_tokens}, expected at least 0"
    if (request.sampling.prompt_logprobs or 0) < -1:
        return f"prompt_logprobs is {request.sampling.prompt_logprobs}, expected at least 0, or -1 for all"
    if info.kv_groups.max_blocks(len(prompt) + len(output), 1, info.block_size) > info.num_blocks:
        return (
            f"prompt_token_ids and output_token_ids have {len(prompt) + len(output)} tokens, "
            f"expected at most {info.max_request_tokens}, the engine's whole KV cache "
            f"({info.num_blocks} blocks of {info.block_size} tokens)"
        )
    for token_id in (min(prompt), max(prompt), min(output, default=0), max(output, default=0)):
        if not 0 <= token_id < info.vocab_size:
            return f"token id {token_id} is outside the vocabulary, expected 0 to {info.vocab_size - 1}"
    return ""


class Rows:
    """Owns the row table and the assignment of rows to sequences; tells the runner about rows that change."""

    def __init__(self, table: RowTable, runner: Runner) -> None:
        self.table = table
        self._runner = runner
        self._vocab_size = runner.info.vocab_size
        self.constraints: dict[int, RowConstraint] = {}
        """By row, for constrained rows."""
        self._free = list(range(table.max_num_seqs - 1, -1, -1))
        self._holder: list[Sequence | None] = [None] * table.max_num_seqs
        self.max_total_tokens: Int32Array = np.zeros(table.max_num_seqs, np.int32)
        """[max_num_seqs] Sequence.max_total_tokens of each row in use."""
        self.generation: Int32Array = np.zeros(table.max_num_seqs, np.int32)
        """[max_num_seqs] Incremented when a row is assigned or released: a step in flight is for one generation."""
        self.recompute_until: Int32Array = np.zeros(table.max_num_seqs, np.int32)
        """[max_num_seqs] Of each row in use: the KV of tokens before this was computed and lost. Only for reports."""

    def __getitem__(self, row: int) -> Sequence:
        sequence = self._holder[row]
        assert sequence is not None, f"row {row} has no request"
        return sequence

    def request_ids(self, rows: Int32Array) -> list[str]:
        """Of rows in use; half the cost of Rows[row] for each of them."""
        holder = self._holder
        return [holder[row].request.request_id for row in rows.tolist()]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def token_ids(self, sequence: Sequence) -> Int32Array:
        """All known tokens of the sequence, with or without a row."""
        if sequence.row >= 0:
            return self.table.token_ids[sequence.row, : self.table.num_tokens[sequence.row]]
        if sequence.token_ids is None:
            request = sequence.request
            sequence.token_ids = np.array(request.prompt_token_ids + request.output_token_ids, np.int32)
        return sequence.token_ids

    def wanted_prompt_logprobs(self, sequence: Sequence) -> PromptLogprobs | None:
        """The logprobs of its prompt that are still missing; None = none are, or none were requested."""
        if sequence.row >= 0:
            return self.table.prompt_logprobs.get(sequence.row)
        request = sequence.request
        count, first = request.sampling.prompt_logprobs, request.num_prompt_logprobs + 1
        if count is None or first >= len(request.prompt_token_ids):
            return None
        return PromptLogprobs(first, self._vocab_size if count < 0 else count)

    def add_prompt_logprobs(self, row: int, count: int) -> None:
        """The logprobs of the next `count` tokens of the row's prompt are known."""
        wanted = self.table.prompt_logprobs[row]
        if wanted.first + count < self.table.num_prompt_tokens[row]:
            self.table.prompt_logprobs[row] = PromptLogprobs(wanted.first + count, wanted.count)
        else:
            del self.table.prompt_logprobs[row]

    def fill(self, sequence: Sequence) -> str:
        """Gives the sequence a free row and writes its tokens there. Returns "", or why the runner refuses it."""
        row, request, table = self._free[-1], sequence.request, self.table
        try:
            self._runner.add_row(row, request)
        except ValueError as error:
            return str(error)
        tokens, sequence.token_ids = self.token_ids(sequence), None
        table.token_ids[row, : len(tokens)] = tokens
        table.num_tokens[row] = len(tokens)
        table.num_prompt_tokens[row] = len(request.prompt_token_ids)
        table.num_computed_tokens[row] = 0
        self.recompute_until[row] = len(tokens) - 1 if request.output_token_ids else 0
        # A prompt samples one token even if max_tokens is 0.
        self.max_total_tokens[row] = max(sequence.max_total_tokens, len(request.prompt_token_ids) + 1)
        if (wanted := self.wanted_prompt_logprobs(sequence)) is not None:
            table.prompt_logprobs[row] = wanted
        self._free.pop()
        if sequence.constraint is not None:
            self.constraints[row] = sequence.constraint
        self._holder[row] = sequence
        self.generation[row] += 1
        sequence.row = row
        return ""

    def release(self, sequence: Sequence) -> None:
        """Releases the row of a sequence that has ended."""
        self._runner.remove_row(sequence.row)
        self.table.prompt_logprobs.pop(sequence.row, None)
        self.table.num_pending_drafts[sequence.row] = 0
        self._holder[sequence.row] = None
        self.constraints.pop(sequence.row, None)
        self.generation[sequence.row] += 1
        self._free.append(sequence.row)
        sequence.row = -1

    def check(self) -> None:
        """Raises AssertionError unless every row is either free or in use, and not both."""
        held = [row for row, holder in enumerate(self._holder) if holder is not None]
        if sorted(held + self._free) != list(range(self.table.max_num_seqs)):
            raise AssertionError(f"rows are lost or held twice: held {held}, free {self._free}")
