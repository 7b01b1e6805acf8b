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
    """A plan and what is new in the table. words: int32 in the machine's order, as table_mirror.py lays them out."""

    step_id: int
    num_rows: int
    num_tokens: int
    """New ones, whichever steps compute them."""
    has_drafts: bool
    words: bytes


class Collect(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The oldest launched step is read."""


class Join(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All have their models: meet the others at this port."""

    port: int


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """There is nothing more to come."""


Message = Join | RowAdded | RowRemoved | Step | Collect | Stop
