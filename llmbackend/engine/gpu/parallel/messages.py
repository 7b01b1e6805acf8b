"""What rank 0 tells the other ranks: everything that is asked of its own runner.

For: rank 0's runner and followers. Does not know: how the messages travel. Invariants: all are frozen, and each is told
to all followers, in the order in which rank 0's runner was asked, so that every rank makes the same calls.
"""

from __future__ import annotations

import msgspec

from ...infer_request import InferRequest


class RowAdded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    row: int
    request: InferRequest


class RowRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    row: int


class Step(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A plan and what is new in the table; all arrays are int32 in the machine's order.

    plan: rows, num_scheduled_tokens, sample_rows and, if there are any, num_draft_tokens, one after the other. counts:
    num_tokens, num_prompt_tokens, num_computed_tokens of these rows. new_starts, new_counts: where the new tokens of
    each row begin and how many they are; new_token_ids: all of them. new_blocks: rows, columns and ids.
    """

    step_id: int
    plan: bytes
    counts: bytes
    new_starts: bytes
    new_counts: bytes
    new_token_ids: bytes
    new_blocks: bytes
    has_drafts: bool


class Collect(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The oldest launched step is read."""


class Join(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All have their models: meet the others at this port."""

    port: int


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """There is nothing more to come."""


Message = Join | RowAdded | RowRemoved | Step | Collect | Stop
