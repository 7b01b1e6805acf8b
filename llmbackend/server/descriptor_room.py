"""How many connections a server has descriptors for.

For: the server process and its frontends. Does not know: connections. Invariant: connections leave a reserve of
descriptors free, for engines, files and shared memory: a new descriptor has the lowest free number, so one whose number
lies within the reserve says that all below are in use.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
from dataclasses import dataclass, replace
from typing import Final

from ..frontends.limits import FrontendLimits

log = logging.getLogger(__name__)

_MIN_RESERVE: Final = 20
_MAX_RESERVE: Final = 512
_OWN_DESCRIPTORS: Final = 1024
"""Wanted in addition to connections and the reserve: models, engines, libraries."""


@dataclass(frozen=True)
class DescriptorRoom:
    """How many connections there are descriptors for."""

    limit: int
    """Descriptors that this process may open."""
    in_use: int
    """Those that are open."""

    @classmethod
    def now(cls) -> DescriptorRoom:
        return cls(_finite(resource.getrlimit(resource.RLIMIT_NOFILE)[0]), _count_open())

    @property
    def first_reserved(self) -> int:
        """The first descriptor that no connection gets."""
        return self.limit - max(_MIN_RESERVE, min(self.limit // 8, _MAX_RESERVE))

    @property
    def connections(self) -> int:
        return max(self.first_reserved - self.in_use, 0)


def raise_limit(connections: int) -> None:
    """Raises the soft limit of open descriptors to what so many connections need, as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(connections + _MAX_RESERVE + _OWN_DESCRIPTORS, _finite(hard))
    if _finite(soft) < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def fitted(limits: FrontendLimits, room: DescriptorRoom) -> FrontendLimits:
    """`limits` with as many connections as there are descriptors for, reduced in proportion; logs one warning when
    that is fewer than `limits` permit."""
    permitted = limits.connections
    if room.connections >= permitted:
        return limits

    def share(count: int) -> int:
        return max(1, count * room.connections // permitted)

    http, grpc = share(limits.http.max_connections), share(limits.grpc.max_connections)
    log.warning(
        "the limit of %d open files (ulimit -n), of which %d are in use, is below what the flags permit: "
        "%d instead of %d HTTP and %d instead of %d gRPC connections are served",
        *(room.limit, room.in_use),
        *(http, limits.http.max_connections, grpc, limits.grpc.max_connections),
    )
    return replace(
        limits,
        http=replace(limits.http, max_connections=http),
        grpc=replace(limits.grpc, max_connections=grpc),
        metrics_max_connections=share(limits.metrics_max_connections),
    )


def _finite(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def _count_open() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0
