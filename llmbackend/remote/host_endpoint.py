"""HostEndpoint: serves an InferenceServer to frontends in other processes.

Used by a host's process. Independent of protocols and of what requests mean. Invariants: one thread reads all messages;
a frontend of another release is refused with an error that names both releases; requests of a lost frontend are
cancelled; work proportional to a request's size does not delay other requests.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Final

import msgspec

from llmbackend import __version__
from llmbackend.core.errors import TritonError, internal, unavailable
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import InferenceHandle, responses_together
from llmbackend.core.tracing.trace import RequestTrace
from llmbackend.links.secrets import ClusterSecrets

from .attached_frontend import ANNOUNCED_WITHIN_S, MAX_UNREAD_BYTES, AttachedFrontend, HostedRequest, HostStates
from .endpoints import new_host_socket
from .requests import unpacked_request
from .sockets import Sender
from .wire import (
    PROTOCOL,
    Beat,
    Call,
    CallResult,
    Cancel,
    Decision,
    Frame,
    Hello,
    HostPeer,
    Leave,
    Received,
    Refused,
    StateRead,
    Submit,
    Traced,
    TraceName,
    WireError,
    decode_to_host,
    encode,
)

log = logging.getLogger(__name__)

CallHandler = Callable[[Call, Callable[[CallResult], object]], None]
"""Called with the call and a function that accepts its result on any thread."""
LARGE_BYTES: Final = 256 << 10
"""Larger requests are decoded and validated on other threads."""
MAX_WAITING_BYTES: Final = 256 << 20
"""Limit on the large requests of all frontends that are waiting to be decoded; further ones are refused."""
_BEAT_S: Final = 1.0
_PROBES_S: Final = 0.1
"""Interval between beats after a connection was lost, until it is known which frontend it was."""
_PROBED_FOR_S: Final = 2.0
_BEAT: Final = encode(Beat())


class HostEndpoint:
    """Serves between `start` and `close`. endpoint: ipc://PATH, or tcp://HOST:PORT with `keys`; port 0 = any free."""

    def __init__(
        self,
        server: InferenceServer,
        endpoint: str,
        *,
        host_id: str = "host",
        keys: ClusterSecrets | None = None,
        heartbeat_timeout_s: float | None = None,
        max_unread_bytes: int = MAX_UNREAD_BYTES,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        release: str = __version__,
    ) -> None:
        """heartbeat_timeout_s  a frontend that is silent for longer is lost; None = the endpoint kind's default
        max_unread_bytes     of one frontend
        max_waiting_bytes    for large requests waiting to be decoded; a single one may exceed it

        Raises ValueError for an endpoint that cannot be used.
        """
        self._socket = new_host_socket(endpoint, keys, heartbeat_timeout_s)
        self._server = server
        self._max_unread_bytes = max_unread_bytes
        self._release = release
        self._frontends: dict[Sender, AttachedFrontend] = {}
        self._on_call: CallHandler | None = None
        self._on_peers: Callable[[Sequence[HostPeer] | None], None] = lambda peers: None
        self._peers: Sequence[HostPeer] | None = None
        """None = unknown."""
        self._to_cancel: deque[InferenceHandle] = deque()
        self._is_closing = False
        self._probe_until_s = 0.0
        self._states = HostStates(server, host_id, lambda: list(self._frontends.values()))
        self._large = ThreadPoolExecutor(2, thread_name_prefix="remote-large")
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting_bytes = 0
        self._waiting_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="remote-host", daemon=True)

    @property
    def endpoint(self) -> str:
        """Contains the actual port from `start` on."""
        return self._socket.endpoint

    def start(self) -> None:
        """Raises OSError if the endpoint cannot be bound."""
        self._socket.bind()
        self._thread.start()
        self._states.start()

    def set_peers(self, peers: Sequence[HostPeer]) -> None:
        """Sets the other hosts that frontends can use after this one, in order of preference."""
        self._states.set_peers(peers)
        self._peers = peers
        self._on_peers(peers)

    def serve_calls(self, on_call: CallHandler, on_peers: Callable[[Sequence[HostPeer] | None], None]) -> None:
        """Answers calls of other hosts. on_call: called on this endpoint's thread, must only enqueue. on_peers: called
        on any thread with the other hosts, now and whenever they change; None = unknown."""
        self._on_call, self._on_peers = on_call, on_peers
        on_peers(self._peers)

    def announce(self, timeout_s: float = ANNOUNCED_WITHIN_S) -> bool:
        """Blocks until every frontend knows the current models and settings. False after `timeout_s`."""
        return self._states.announce(timeout_s)

    def leave(self, timeout_s: float = ANNOUNCED_WITHIN_S) -> bool:
        """Blocks until every frontend knows that this host is about to end and has moved the requests that other hosts
        can continue. Returns False if one has not within `timeout_s`. Other requests are served until `close`."""
        return self._states.leave(timeout_s)

    def close(self) -> None:
        """Ends all links and their open requests. Must not be called by callbacks."""
        self._is_closing = True
        self._socket.wake()
        self._thread.join()
        self._states.close()
        self._large.shutdown()
        self._socket.close()

    # --- the reading thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        beat_at_s = 0.0
        while not self._is_closing:
            if not self._read_messages():
                is_probing = time.monotonic() < self._probe_until_s
                self._socket.wait(_PROBES_S if is_probing else _BEAT_S)
            if self._socket.has_lost():
                self._probe_until_s = time.monotonic() + _PROBED_FOR_S  # the socket may forget the lost one later
            now_s = time.monotonic()
            if now_s >= beat_at_s or now_s < self._probe_until_s:
                beat_at_s = now_s + _BEAT_S
                for frontend in self._frontends.values():
                    frontend.send([_BEAT])
            self._leave_lost()
        for frontend in self._frontends.values():
            frontend.lost()
        self._cancel_waiting()  # last: those that are no longer among a frontend's requests

    def _read_messages(self) -> bool:
        """Returns whether there may be more."""
        messages = self._socket.receive()
        with responses_together():
            self._cancel_waiting()
            for sender, (header, *frames) in messages:
                try:
                    self._handle(sender, header, frames)
                except msgspec.DecodeError as error:
                    log.error("a frontend sent a message that cannot be read: %s", error)
                    self._refuse(sender, f"a message cannot be read: {error}")
                except Exception:
                    log.exception("a message of a frontend cannot be handled")
        return bool(messages)

    def _handle(self, sender: Sender, header: memoryview, frames: list[memoryview]) -> None:
        message = decode_to_host(header)
        if isinstance(message, Hello):
            self._attach(sender, message)
            return
        if isinstance(message, Call):
            self._called(sender, message)
            return
        if isinstance(message, Leave):
            self._left(sender)
            return
        frontend = self._frontends.get(sender)
        if frontend is None:
            self._refuse(sender, "it is not attached")
        elif isinstance(message, Submit):
            self._submit(frontend, message, frames, len(header) + sum(map(len, frames)))
        elif isinstance(message, Cancel):
            if (request := frontend.requests.get(message.number)) is not None:
                request.cancel()
        elif isinstance(message, Traced):
            if (trace := frontend.traces.pop(message.number, None)) is not None:
                _mark(trace, message.items)
                trace.close()
        elif isinstance(message, Received):
            frontend.has_read(message.num_bytes)
        elif isinstance(message, StateRead):
            frontend.read_state = message.number
            self._states.read()

    def _attach(self, sender: Sender, hello: Hello) -> None:
        if (hello.protocol, hello.release) != (PROTOCOL, self._release):
            self._refuse(
                sender,
                f"frontend '{hello.name}' has release {hello.release} (protocol {hello.protocol}), this host has "
                f"release {self._release} (protocol {PROTOCOL}): they must be equal",
            )
            return
        send = partial(self._socket.send, sender)
        self._frontends[sender] = AttachedFrontend(
            hello.name, hello.families, send, self._cancel_later, self._max_unread_bytes
        )
        self._states.ask()

    def _cancel_later(self, handle: InferenceHandle) -> None:
        """Called on any thread."""
        self._to_cancel.append(handle)
        self._socket.wake()

    def _cancel_waiting(self) -> None:
        while self._to_cancel:
            self._to_cancel.popleft().cancel()

    def _called(self, sender: Sender, call: Call) -> None:
        if self._on_call is None or call.release != self._release:
            why = f"this host has release {self._release}" if self._on_call is not None else "it accepts no calls"
            refusal = unavailable(f"host '{call.host_id}' with release {call.release} is refused: {why}")
            self._socket.send(sender, [encode(CallResult(call.number, error=WireError.of(refusal)))])
            return
        self._on_call(call, lambda result: self._socket.send(sender, [encode(result)]))

    def _left(self, sender: Sender) -> None:
        if (frontend := self._frontends.pop(sender, None)) is not None:
            log.info("frontend '%s' has left, with %d open requests", frontend.name, len(frontend.requests))
            frontend.lost()
            self._states.read()

    def _refuse(self, sender: Sender, reason: str) -> None:
        log.error("a frontend is refused: %s", reason)
        self._socket.send(sender, [encode(Refused(reason, self._release))])

    def _leave_lost(self) -> None:
        if not any(frontend.is_lost for frontend in self._frontends.values()):
            return
        while self._read_messages():  # the last message may be Leave
            pass
        for sender in [sender for sender, frontend in self._frontends.items() if frontend.is_lost]:
            frontend = self._frontends.pop(sender)
            log.warning("frontend '%s' is gone, with %d open requests", frontend.name, len(frontend.requests))
            frontend.lost()
            self._states.read()

    # --- requests ---------------------------------------------------------------------------------------------------

    def _submit(self, frontend: AttachedFrontend, submit: Submit, frames: list[memoryview], num_bytes: int) -> None:
        request = frontend.requests[submit.number] = HostedRequest(submit.number, frontend)
        if num_bytes <= LARGE_BYTES:
            self._infer(frontend, request, submit, frames, self._sampled(frontend, submit))
        elif self._takes_large(num_bytes):
            trace = self._sampled(frontend, submit)  # before the frontend's next message, which may end the trace
            self._large.submit(self._infer_large, frontend, request, submit, frames, trace, num_bytes)
        else:
            limit = self._max_waiting_bytes
            text = f"the host is at its limit of {limit} bytes of large requests that wait to be decoded"
            self._refuse_request(frontend, submit, unavailable(text))

    def _takes_large(self, num_bytes: int) -> bool:
        with self._waiting_lock:
            if self._waiting_bytes and self._waiting_bytes + num_bytes > self._max_waiting_bytes:
                return False
            self._waiting_bytes += num_bytes
            return True

    def _infer_large(
        self,
        frontend: AttachedFrontend,
        request: HostedRequest,
        submit: Submit,
        frames: list[memoryview],
        trace: RequestTrace | None,
        num_bytes: int,
    ) -> None:
        try:
            if not frontend.is_lost:
                self._infer(frontend, request, submit, frames, trace)
        finally:
            with self._waiting_lock:
                self._waiting_bytes -= num_bytes

    def _refuse_request(self, frontend: AttachedFrontend, submit: Submit, error: TritonError) -> None:
        frontend.requests.pop(submit.number, None)
        frontend.decided(Decision(submit.number, WireError.of(error)))

    def _infer(
        self,
        frontend: AttachedFrontend,
        request: HostedRequest,
        submit: Submit,
        frames: Sequence[Frame],
        trace: RequestTrace | None,
    ) -> None:
        try:
            message = unpacked_request(submit, frames)
            if trace is not None:
                message = replace(message, trace=trace)
            request.accepted(self._server.infer_async(message, request))
        except Exception as error:
            if not isinstance(error, TritonError):
                log.exception("a frontend's request to model '%s' cannot be submitted", submit.model_name)
                error = internal("internal error, see the server's log")
            self._refuse_request(frontend, submit, error)
            return
        if submit.is_confirmed:
            frontend.decided(Decision(submit.number))

    def _sampled(self, frontend: AttachedFrontend, submit: Submit) -> RequestTrace | None:
        start = submit.trace
        if start is None:
            return None
        if start.parent:
            parent = frontend.traces.get(start.parent)
            return None if parent is None else parent.child()
        trace = self._server.tracing.sample(submit.model_name, start.headers.get)
        if trace is not None:
            _mark(trace, start.items)
            frontend.decided(TraceName(submit.number, trace.trace.traceparent))
            frontend.traces[submit.number] = trace
        return trace


def _mark(trace: RequestTrace, items: Sequence[tuple[int, str]]) -> None:
    for ns, activity in items:
        trace.mark(activity, ns)
