"""The Ray actor that knows the hosts of a cluster: who is there, and what all of them must have in common.

For: agents. Does not know: engines, clients. Invariants: all hosts have the versions of the first; one that was not
heard for LEASE_S is gone; agents are told of changes by the answer to a call that waits.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

import msgspec

from .messages import Peer, Versions

NEWS_WAIT_S: Final = 10.0
LEASE_S: Final = 25.0
"""Some waits of NEWS_WAIT_S, so that one that is late is not gone."""
NAME: Final = "hosts"


class HostRegistry:
    def __init__(self) -> None:
        self._hosts: dict[str, Peer] = {}
        self._heard_at_s: dict[str, float] = {}
        self._versions: Versions | None = None
        self._key_name = ""
        self._version = time.time_ns()
        self._changed = asyncio.Event()

    async def join(self, host: bytes, versions: bytes, key_name: str) -> str:
        """host, versions: a Peer and its Versions in msgpack. key_name: of its CURVE key. "" = it has joined, else why
        it was refused."""
        self._forget_silent()
        peer = msgspec.msgpack.decode(host, type=Peer)
        own = msgspec.msgpack.decode(versions, type=Versions)
        if self._hosts.keys() - {peer.id}:
            if own != self._versions:
                return f"this machine has {own}, and the cluster {self._versions}: expected the same on all machines"
            if key_name != self._key_name:
                return (
                    f"this machine's curve.key is the key {key_name}, and the cluster's is {self._key_name}: copy the "
                    "whole secrets folder of its first machine"
                )
        self._versions, self._key_name = own, key_name
        self._heard_at_s[peer.id] = time.monotonic()
        if self._hosts.get(peer.id) != peer:
            self._hosts[peer.id] = peer
            self._change()
        return ""

    async def watch(self, host: str, version: int) -> tuple[int, list[bytes]]:
        """The version of the list and all hosts, as `EngineActor.watch`. A host that is not in it should join."""
        self._heard_at_s[host] = time.monotonic()
        self._forget_silent()
        if self._version == version:
            changed = self._changed
            try:
                await asyncio.wait_for(changed.wait(), NEWS_WAIT_S)
            except TimeoutError:
                self._forget_silent()
        return self._version, [msgspec.msgpack.encode(peer) for peer in self._hosts.values()]

    async def leave(self, host: str) -> None:
        self._heard_at_s.pop(host, None)
        if self._hosts.pop(host, None) is not None:
            self._change()

    def _forget_silent(self) -> None:
        limit_s = time.monotonic() - LEASE_S
        silent = [host for host in self._hosts if self._heard_at_s.get(host, 0.0) < limit_s]
        for host in silent:
            del self._hosts[host]
        if silent:
            self._change()

    def _change(self) -> None:
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()
