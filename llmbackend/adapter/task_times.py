"""When a generation reached its stations. A module of its own because tasks, replies and schemas all speak of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TaskTimes:
    """time.monotonic_ns() of a generation's stations; 0 = not reached. taken_ns: an engine took it, for the first
    time."""

    exec_start_ns: int
    compute_start_ns: int = 0
    taken_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
