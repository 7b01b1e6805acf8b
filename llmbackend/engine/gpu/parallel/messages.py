"""What rank 0 tells the other ranks: every call of its own runner, and what is new in the row table; and their answers.

For: rank 0's runner and followers, which keep a table of their own. Does not know: how messages travel, what a step
computes. Invariants: all are frozen, and each is sent to all followers in the order of the calls of rank 0's runner;
after `apply`, a follower's table holds for the plan's rows what `Runner.execute` may read; a message costs array
operations and bytes in proportion to what is new, some tens of bytes for each row of a decode step.
"""

from __future__ import annotations

import msgspec
import numpy as np

from ...infer_request import InferRequest
from ...step import PENDING_TOKEN, Int32Array, RowTable, StepPlan
from ..table_changes import BlockTableMirror


class RowAdded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    row: int
    request: InferRequest


class RowRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    row: int


class Step(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A plan and what is new in the table."""

    step_id: int
    num_rows: int
    num_tokens: int
    """How many new tokens `words` holds; not those that the step computes."""
    has_drafts: bool
    has_masks: bool
    words: bytes
    """int32 in native byte order. Sections of a word for each row: rows, num_scheduled_tokens, sample_rows, num_tokens,
    num_prompt_tokens, num_computed_tokens, where the row's new tokens begin, how many they are, and num_draft_tokens if
    has_drafts. Then the new tokens, and the new blocks: rows, columns, ids."""


class Masks(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Those of the step before it, which said that it has some.

    index  int32 [samples]  as of TokenMasks
    words  uint32 [n, …]
    """

    index: bytes
    words: bytes


class Collect(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Collect the oldest launched step."""


class Join(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All ranks have loaded: meet the others at this address."""

    address: str
    port: int


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The last message."""


Message = Join | RowAdded | RowRemoved | Step | Masks | Collect | Stop


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A follower's first message: it has its part of the model, or an error says why not."""

    rank: int
    machine: str
    """For people."""
    fingerprint: str
    """Of its config and release (`fingerprint_of`)."""
    error: str = ""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A follower's last message: it can not go on."""

    error: str


FromFollower = Loaded | Failed


class TableSender:
    """Makes Step messages: remembers what the followers know of rank 0's table."""

    def __init__(self, max_num_seqs: int) -> None:
        self._known_tokens: Int32Array = np.zeros(max_num_seqs, np.int32)
        self._blocks: BlockTableMirror | None = None

    def forget(self, row: int) -> None:
        """The row has another request: its tokens are sent again."""
        self._known_tokens[row] = 0

    def step(self, step_id: int, plan: StepPlan, table: RowTable) -> Step:
        rows, drafts = plan.rows, plan.num_draft_tokens
        starts, counts, token_ids = self._new_tokens(plan, table)
        sections = (
            rows,
            plan.num_scheduled_tokens,
            plan.sample_rows,
            table.num_tokens[rows],
            table.num_prompt_tokens[rows],
            table.num_computed_tokens[rows],
            starts,
            counts,
            *([] if drafts is None else [drafts]),
        )
        words = np.concatenate((*sections, token_ids, *self._new_blocks(plan, table)), dtype=np.int32)
        return Step(step_id, len(rows), len(token_ids), drafts is not None, plan.masks is not None, words.tobytes())

    def _new_tokens(self, plan: StepPlan, table: RowTable) -> tuple[Int32Array, Int32Array, Int32Array]:
        """For each row, where its new tokens begin and how many they are; and all new tokens. Pending tokens and drafts
        are sent again with the next step."""
        rows, num_tokens = plan.rows, table.num_tokens[plan.rows]
        starts = np.minimum(self._known_tokens[rows], num_tokens)
        ends = num_tokens if plan.num_draft_tokens is None else num_tokens + plan.num_draft_tokens
        counts = (ends - starts).astype(np.int32)
        owners, columns = _ragged(starts, counts)
        token_ids = table.token_ids[rows[owners], columns]
        pending = np.bincount(owners[token_ids == PENDING_TOKEN], minlength=len(rows))
        self._known_tokens[rows] = num_tokens - pending
        return starts, counts, token_ids

    def _new_blocks(self, plan: StepPlan, table: RowTable) -> Int32Array:
        if self._blocks is None:
            self._blocks = BlockTableMirror(*table.block_table.shape)
        changes = self._blocks.changes(plan, table)
        self._blocks.told(changes)
        return changes


def apply(step: Step, table: RowTable) -> StepPlan:
    """Brings a follower's table up to date. Returns the plan."""
    words, num_sections = np.frombuffer(step.words, np.int32), 9 if step.has_drafts else 8
    split = num_sections * step.num_rows
    sections = words[:split].reshape(num_sections, -1)
    token_ids, blocks = words[split : split + step.num_tokens], words[split + step.num_tokens :].reshape(3, -1)
    rows, scheduled, samples, num_tokens, num_prompt_tokens, num_computed_tokens, starts, counts = sections[:8]
    table.num_tokens[rows] = num_tokens
    table.num_prompt_tokens[rows] = num_prompt_tokens
    table.num_computed_tokens[rows] = num_computed_tokens
    owners, columns = _ragged(starts, counts)
    table.token_ids[rows[owners], columns] = token_ids
    table.block_table[blocks[0], blocks[1]] = blocks[2]
    return StepPlan(rows, scheduled, samples != 0, sections[8] if step.has_drafts else None)


def _ragged(starts: Int32Array, counts: Int32Array) -> tuple[Int32Array, Int32Array]:
    """The numbers starts[i] … starts[i] + counts[i] - 1 of all i, one after the other: each number's i, and the
    number."""
    owners = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    firsts = np.cumsum(counts, dtype=np.int32) - counts
    return owners, np.arange(len(owners), dtype=np.int32) - firsts[owners] + starts[owners]
