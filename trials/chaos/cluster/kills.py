"""What was done to a cluster, and when.

Used by clusters, which do it, and by the code that judges the effects. Independent of processes. Invariant: a Kill
records when something was done, not when it was requested.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

FRONTEND_GRACE_S = 30.0
"""After a frontend's death its port may refuse connections for so long: where all frontends of an address are gone, the
next one imports what it needs first."""
HOST_GRACE_S = 30.0
"""After a host's death requests that are passed on to it may be refused for so long: the next one loads its models."""


class Kind(StrEnum):
    ENGINE = "SIGKILL engine"
    HOST = "SIGKILL host"
    FRONTEND = "SIGKILL frontend"
    NODE = "SIGKILL Ray node"
    HEAD = "SIGKILL Ray head"
    ACTOR = "SIGKILL engine's actor"
    CUT = "network cut"
    PARTITION = "host cut off"


class Ends(StrEnum):
    """Which connections of clients end with what was killed."""

    NONE = "none"
    PASSED_ON = "those that are passed on to a host"
    ALL = "all"


@dataclass(frozen=True)
class Kill:
    """begin_s: monotonic. end_s: the same, but for a cut, which heals. victim: for people."""

    kind: Kind
    begin_s: float
    end_s: float
    victim: str
    ends: Ends = Ends.NONE

    def explains(self, connected_s: float, broke_s: float, *, is_passed_on: bool) -> bool:
        """Whether a connection that was begun and lost then may have been lost by it."""
        if self.ends is Ends.NONE or (self.ends is Ends.PASSED_ON and not is_passed_on):
            return False
        grace_s = FRONTEND_GRACE_S if self.ends is Ends.ALL else HOST_GRACE_S
        return self.begin_s <= broke_s and connected_s <= self.end_s + grace_s
