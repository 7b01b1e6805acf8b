"""The counters of an engine that several hosts share, as one of its hosts counts them.

For: RemoteTransport. Does not know: messages. Invariant: what the hosts of an engine count is together what the engine
did while hosts were attached: a host's own tokens are its own, and everything else is counted by one of them.
"""

from __future__ import annotations

from typing import Final

import msgspec

from ..infer_request import EngineStats
from .remote_messages import Head

_COUNTED_BY_ONE: Final = (
    *("num_preemptions", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_invariant_breaches"),
    *("num_offloaded_blocks", "num_reloaded_blocks", "prefix_cache_queries", "prefix_cache_hits"),
)


class SharedCounters:
    def __init__(self) -> None:
        self._latest = EngineStats()
        self._head = Head(False, 0, 0, 0)
        self._sums = dict.fromkeys(_COUNTED_BY_ONE, 0)
        self._has_seen = False

    def add(self, head: Head, stats: EngineStats) -> None:
        """With each message: `stats` are the engine's."""
        if head.counts and self._has_seen:
            for name in _COUNTED_BY_ONE:
                self._sums[name] += getattr(stats, name) - getattr(self._latest, name)
        self._latest, self._head, self._has_seen = stats, head, True

    def stats(self, stats: EngineStats) -> EngineStats:
        """The engine's, with the counters of this host."""
        head = self._head
        return msgspec.structs.replace(
            stats, prompt_tokens=head.prompt_tokens, generation_tokens=head.generation_tokens, **self._sums
        )
