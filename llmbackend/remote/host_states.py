"""HostStates: tells attached frontends what they need to know of the host, at every change.

For: HostEndpoint. Does not know: sockets. Invariants: a frontend gets a state when it attaches, whenever the host is
asked to announce a change, and within a second of any other; asking the host may wait for backends, so it happens on a
thread of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from llmbackend.core.inference_server import InferenceServer

from .attached_frontend import AttachedFrontend
from .wire import HostState, Peer, WireSample, encode

log = logging.getLogger(__name__)

INTERVAL_S: Final = 1.0
ANNOUNCED_WITHIN_S: Final = 2.0


class HostStates:
    def __init__(
        self, server: InferenceServer, host_id: str, frontends: Callable[[], Iterable[AttachedFrontend]]
    ) -> None:
        self._server = server
        self._host_id = host_id
        self._frontends = frontends
        self._peers: tuple[Peer, ...] = ()
        self._changed = threading.Condition()
        self._asked = 0
        """Announcements so far."""
        self._number = 0
        """Of the latest state: how many announcements it follows."""
        self._is_leaving = False
        self._is_closed = False
        self._told: dict[AttachedFrontend, HostState] = {}
        self._thread = threading.Thread(target=self._run, name="remote-states", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def set_peers(self, peers: Iterable[Peer]) -> None:
        """The other hosts that frontends can use, in order of preference."""
        self._peers = tuple(peers)
        self.ask()

    def ask(self) -> int:
        """Tells frontends the state as it is now, soon. Returns the number that this state has at least."""
        with self._changed:
            self._asked += 1
            self._changed.notify_all()
            return self._asked

    def announce(self, timeout_s: float = ANNOUNCED_WITHIN_S) -> bool:
        """Blocks until every frontend knows the state as it is now; False when one does not within `timeout_s`."""
        number, deadline_s = self.ask(), time.monotonic() + timeout_s
        with self._changed:
            return self._changed.wait_for(
                lambda: self._is_closed or (self._number >= number and self._all_have_read(number)),
                deadline_s - time.monotonic(),
            )

    def leave(self, timeout_s: float) -> bool:
        """`announce`s that the host is about to end."""
        self._is_leaving = True
        return self.announce(timeout_s)

    def read(self) -> None:
        """A frontend has read a state, or is gone."""
        with self._changed:
            self._changed.notify_all()

    def _all_have_read(self, number: int) -> bool:
        return all(one.read_state >= number or one.is_lost for one in self._frontends())

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._number == self._asked:
                    self._changed.wait(INTERVAL_S)
                if self._is_closed:
                    return
                number = self._asked
            try:
                self._tell(number)
            except Exception:
                log.exception("the state of the host cannot be told")
            with self._changed:
                self._number = number
                self._changed.notify_all()

    def _tell(self, number: int) -> None:
        frontends = [one for one in self._frontends() if not one.is_lost]
        self._told = {one: self._told[one] for one in frontends if one in self._told}
        if not frontends:
            return
        state = self._state(number)
        for frontend in frontends:
            samples = {family: self._samples(family) for family in frontend.families}
            wanted = msgspec.structs.replace(state, samples=samples)
            if self._told.get(frontend) != wanted:
                self._told[frontend] = wanted
                frontend.send([encode(wanted)])

    def _state(self, number: int) -> HostState:
        server = self._server
        return HostState(
            number=number,
            host_id=self._host_id,
            is_live=server.is_live(),
            is_ready=not self._is_leaving and server.is_ready(),
            is_exiting=self._is_leaving or server.is_exiting,
            is_tracing=not server.tracing.is_idle,
            server=server.server_metadata(),
            models=msgspec.Raw(encode(server.model_table())),
            index=tuple(server.repository_index()),
            samples={},
            peers=self._peers,
        )

    def _samples(self, family: str) -> list[WireSample]:
        return [
            WireSample(sample.name, dict(sample.labels), sample.value) for sample in self._server.metric_samples(family)
        ]
