"""EngineOrder: what a fork server is told of the engine that it is to fork.

For: the host, and the fork server's program. Does not know: engines. Apart from both, because the host must not import
what an engine's process needs before it has ordered one.
"""

from __future__ import annotations

import msgspec

from ..rank_order import RankMeeting


class EngineOrder(msgspec.Struct, frozen=True):
    """endpoint  of the host's socket
    is_whole  whether the engine loads the checkpoint itself, with all that this takes; else it may share what its fork
              server holds, or prepare that and end
    meeting   where the other ranks of a split model come, which others start; None = they are forked
    """

    endpoint: str
    is_whole: bool = False
    meeting: RankMeeting | None = None
