"""What the engine's two sides say to each other: rows of live requests, one step's plan, and what the step sampled.

For: the control side (scheduler, engine core), which owns rows and decides, and the compute side (a `Runner`), which
owns the weights and the KV memory and computes. Does not know: how tokens are scheduled, or how logits are made.
Invariant: a request keeps its row from admission to its end, preemptions included, so that a step costs Python time
only for rows that changed. Only the engine core's thread touches a table; a runner reads it, and never writes to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from .infer_request import InferRequest, ModelInfo, TokenLogprobs

BROKEN_LOGITS: Final = "the model computed logits that are not finite for this request"
"""The error of a row whose logits hold a NaN or an infinity."""

Int32Array = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]


class RowTable:
    """The state of every live request, as arrays over permanent rows 0..max_num_seqs-1.

    token_ids            int32 [max_num_seqs, max_model_len]      prompt, then output; valid up to num_tokens[row]
    num_tokens           int32 [max_num_seqs]                     prompt + output tokens known so far
    num_prompt_tokens    int32 [max_num_seqs]                     the first output token is at this position
    num_computed_tokens  int32 [max_num_seqs]                     tokens whose KV is in the cache
    block_table          int32 [max_num_seqs, max_blocks_per_seq] KV block ids, each in 0..num_blocks-1

    During `execute` a row's block_table is valid for positions below num_computed_tokens + the tokens scheduled; later
    entries are stale. Position p of a row has slot block_table[row, p // block_size] * block_size + p % block_size.
    Rows that hold no request have stale contents.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        max_blocks_per_seq = -(-max_model_len // block_size)
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.token_ids: Int32Array = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.num_tokens: Int32Array = np.zeros(max_num_seqs, np.int32)
        self.num_prompt_tokens: Int32Array = np.zeros(max_num_seqs, np.int32)
        self.num_computed_tokens: Int32Array = np.zeros(max_num_seqs, np.int32)
        self.block_table: Int32Array = np.zeros((max_num_seqs, max_blocks_per_seq), np.int32)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes: for `rows[i]`, the `num_scheduled_tokens[i]` (≥ 1) tokens from num_computed_tokens on.

    rows int32 [n], each row at most once; num_scheduled_tokens int32 [n]; sample_rows bool [n]: rows whose chunk
    reaches num_tokens, which therefore sample exactly one token. The new token's position is num_tokens[row].
    """

    rows: Int32Array
    num_scheduled_tokens: Int32Array
    sample_rows: BoolArray

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole step."""
        return int(self.num_scheduled_tokens.sum())


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What a step sampled.

    token_ids: int32 [n_sampled], in the order of plan.rows[plan.sample_rows]. logprobs: by row, exactly for the sampled
    rows whose request asks for them. errors: by row, the text for its client; such a row ends with it (its entry in
    token_ids is ignored) and the step goes on for the rest.
    """

    token_ids: Int32Array
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    errors: Mapping[int, str] = field(default_factory=dict)


class Runner(Protocol):
    """A loaded model with its KV memory (info.num_blocks blocks of info.block_size slots). One thread calls it.

    Law 1 binds it: a row's tokens depend on that row's tokens and sampling parameters alone, never on the plan's other
    rows or on how the tokens were split into chunks.
    """

    @property
    def info(self) -> ModelInfo:
        """Constant. max_model_len is the limit in force: the smaller of the config's and the model's."""

    def add_row(self, row: int, request: InferRequest) -> None:
        """A request got this row: register its sampling parameters. Called once per request, not after a preemption.

        A raised ValueError is the text for its client: the request ends with it and `remove_row` is not called.
        """

    def remove_row(self, row: int) -> None:
        """The row's request is over; the row may be given to another."""

    def execute(self, plan: StepPlan, table: RowTable) -> SampledTokens:
        """Computes the plan's tokens, writes their KV, samples. The only call that sees the table.

        Must be repeatable: after it raised, the same rows may be run again, together or one by one, so anything counted
        per token (penalties) is read from `table.token_ids`, where num_prompt_tokens parts prompt from output.
        Tokens in stop_token_ids, and end-of-sequence tokens unless ignore_eos, are never sampled among the first
        min_tokens output tokens. Any exception counts as the failure of the rows it was given.
        """

    def close(self) -> None:
        """Frees memory and threads. Nothing is called after it."""
