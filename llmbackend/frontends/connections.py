"""How many connections an endpoint has, in all and from one address.

For: the acceptor, which takes them. Does not know: sockets, protocols. Invariants: a connection is counted from the
moment it is accepted, before its TLS handshake, until it is lost; what is refused with an answer is counted, too, and
bounded.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Sequence
from typing import Final

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_MAX_REFUSED: Final = 64
"""Connections beyond the limit that are open for as long as it takes to refuse them in their protocol."""
_PEER_PREFIX_V6: Final = 64
"""One host has a whole /64."""


class Place:
    """What one connection takes up. `refusal`: why it is not served, "" when it is. `peer`: whose it counts as."""

    __slots__ = ("_places", "peer", "refusal")

    def __init__(self, places: Places | None, peer: str, refusal: str) -> None:
        self._places = places
        self.peer = peer
        self.refusal = refusal

    def reconsider(self) -> str:
        """`refusal` now that the client has said what it wants: others may have left meanwhile."""
        if self.refusal and self._places is not None:
            self._places.reconsider(self)
        return self.refusal

    def leave(self) -> None:
        """Idempotent."""
        places, self._places = self._places, None
        if places is not None:
            places.left(self)


class Places:
    """Of one endpoint, on its event loop."""

    def __init__(self, limit: int, limit_per_peer: int, trusted: Sequence[Network] = ()) -> None:
        """`trusted`: addresses for which `limit_per_peer` does not hold, since many clients come from them; a limit of
        0 per peer is none."""
        self._limit = limit
        self._limit_per_peer = limit_per_peer
        self._trusted = trusted
        self._served = 0
        self._refused = 0
        self._of_peer: Counter[str] = Counter()

    @property
    def count(self) -> int:
        return self._served + self._refused

    def enter(self, address: str) -> Place | None:
        """A place for a connection from `address`; None when there is not even room to refuse it."""
        peer = self._peer_of(address) if self._limit_per_peer else ""
        refusal = self._refusal(peer)
        if refusal and self._refused >= _MAX_REFUSED:
            return None
        place = Place(self, peer, refusal)
        self._count(place, 1)
        return place

    def reconsider(self, place: Place) -> None:
        self._count(place, -1)
        place.refusal = self._refusal(place.peer)
        self._count(place, 1)

    def left(self, place: Place) -> None:
        self._count(place, -1)

    def _count(self, place: Place, change: int) -> None:
        if place.refusal:
            self._refused += change
            return
        self._served += change
        if place.peer:
            self._of_peer[place.peer] += change
            if not self._of_peer[place.peer]:
                del self._of_peer[place.peer]

    def _refusal(self, peer: str) -> str:
        if self._served >= self._limit:
            return f"the server is at its limit of {self._limit} connections"
        if peer and self._of_peer[peer] >= self._limit_per_peer:
            return f"the server is at its limit of {self._limit_per_peer} connections from one address"
        return ""

    def _peer_of(self, text: str) -> str:
        """What counts as one peer; "" for a trusted one."""
        address = ipaddress.ip_address(text.partition("%")[0])
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        if any(address in network for network in self._trusted):
            return ""
        if address.version == 6:
            return str(ipaddress.IPv6Network((address, _PEER_PREFIX_V6), strict=False))
        return str(address)


def networks(texts: Sequence[str]) -> tuple[Network, ...]:
    """Of texts with addresses or networks (10.0.0.0/8), comma-separated. Raises ValueError for a wrong one."""
    return tuple(ipaddress.ip_network(part.strip()) for text in texts for part in text.split(",") if part.strip())
