"""Whose requests the model's code works on at the moment: what it asks of other models, it asks on their behalf.

For: the runner, which sets it, and inner calls, which carry it to the host. Does not know: what a tenant is; the host
packs and unpacks it. Invariant: a coroutine of `execute` keeps its own; a thread that the model started has none, and
then the host goes by the requests that the model has.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final

PackedTenant = tuple[str, bool, str] | None
"""None: the host's own."""

WORKING_FOR: Final[ContextVar[frozenset[PackedTenant] | None]] = ContextVar("working_for", default=None)
"""The tenants of the requests of this execute call; None outside of one."""
