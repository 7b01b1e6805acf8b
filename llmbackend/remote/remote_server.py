"""RemoteServer: hosts in other processes, with the interface of a host in the frontend's own process.

Used by frontend processes. Independent of protocols and of what requests mean. Invariants: a new request goes to the
first host, in order of preference, that serves its model; every request ends, even if no host is left; no response is
delivered twice; a request that was moved to another host can be cancelled like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from prometheus_client.samples import Sample

from llmbackend import __version__
from llmbackend.core.errors import TritonError, cancelled, unavailable
from llmbackend.core.host_protocol import InThread
from llmbackend.core.messages import (
    InferenceHandle,
    InferenceRequest,
    ModelIndex,
    ModelMetadata,
    ResponseCallback,
    ServerMetadata,
    responses_together,
)
from llmbackend.core.models.served_config import Description
from llmbackend.links.secrets import ClusterSecrets

from .host_link import HostLink, KnownHost, OpenRequest
from .requests import RemoteTracing, begun, packed_request
from .wire import PROTOCOL, Cancel, Decision, Frame, Hello, Responses, Traced, encode

log = logging.getLogger(__name__)

WAIT_FOR_HOST_S: Final = 10.0
"""How long a request waits if no host can take it."""


class _UnreadRegions:
    """Shared memory regions that the host reads before it accepts a request."""

    def with_inputs(self, request: InferenceRequest) -> InferenceRequest:
        return request


class RemoteServer:
    """A Host. Created, started and closed on one event loop, on which it delivers responses."""

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        name: str = "frontend",
        keys: ClusterSecrets | None = None,
        metric_families: Iterable[str] = (),
        wait_for_host_s: float = WAIT_FOR_HOST_S,
        heartbeat_timeout_s: float | None = None,
        release: str = __version__,
    ) -> None:
        """endpoints            of HostEndpoints, in order of preference; hosts announce additional ones
        name                 of this frontend, for display
        metric_families      that `metric_samples` can return
        heartbeat_timeout_s  a host that is silent for longer is lost; None = the endpoint kind's default

        Raises ValueError for an endpoint that cannot be used.
        """
        self.shared_memory = _UnreadRegions()
        self.tracing = RemoteTracing()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._wait_for_host_s = wait_for_host_s
        hello = Hello(PROTOCOL, release, name, tuple(metric_families))
        self._new_link = partial(HostLink, owner=self, hello=hello, keys=keys, heartbeat_timeout_s=heartbeat_timeout_s)
        self._given_endpoints = frozenset(endpoints)
        self._links = [self._new_link(endpoint) for endpoint in endpoints]
        self._numbers = itertools.count(1)
        self._open: dict[int, OpenRequest] = {}
        """Requests at a host, by number."""
        self._waiting: dict[OpenRequest, None] = {}
        """Requests waiting for a host, oldest first."""
        self._known: KnownHost | None = None
        """The preferred host and its latest known state."""
        self._attached = asyncio.Event()

    async def start(self, timeout_s: float) -> None:
        """Attaches to the hosts; returns when one has sent its state. If none has within `timeout_s`, raises
        TritonError UNAVAILABLE with the fault of each host."""
        for link in self._links:
            link.open()
        try:
            async with asyncio.timeout(timeout_s):
                await self._attached.wait()
        except TimeoutError:
            raise unavailable("; ".join(link.fault for link in self._links)) from None

    def close(self) -> None:
        """Leaves the hosts. Open requests are cancelled there and end here with an error."""
        links, self._links = self._links, []
        for link in links:
            link.close()
        for request in [*self._open.values(), *self._waiting]:
            self._end(request, unavailable("the frontend is stopping"))

    # --- inference --------------------------------------------------------------------------------------------------

    def infer_async(self, request: InferenceRequest, callback: ResponseCallback) -> InferenceHandle:
        opened, message = self._packed(request, callback, is_confirmed=False)
        self._on_loop(self._submit, opened, message)
        return opened

    async def infer_accepted(
        self, request: InferenceRequest, callback: ResponseCallback, in_thread: InThread | None = None
    ) -> InferenceHandle:
        pack = partial(self._packed, request, callback, is_confirmed=True)
        opened, message = pack() if in_thread is None else await in_thread(pack)
        opened.acceptance = self._loop.create_future()
        self._submit(opened, message)
        try:
            await opened.acceptance
        except asyncio.CancelledError:
            opened.cancel()
            raise
        handle: InferenceHandle = opened
        return handle

    def _packed(
        self, request: InferenceRequest, callback: ResponseCallback, *, is_confirmed: bool
    ) -> tuple[OpenRequest, list[Frame]]:
        """Thread-safe. Raises TritonError for a request that cannot be represented in a message."""
        opened = OpenRequest(request, callback, self._cancel)
        opened.is_resumable = opened.is_resumable or (len(self._links) > 1 and self._resumes(request))
        return opened, self._message(opened, is_confirmed)

    def _message(self, opened: OpenRequest, is_confirmed: bool) -> list[Frame]:
        opened.number = number = next(self._numbers)
        trace = opened.request.trace
        start = None if trace is None else begun(trace, number, partial(self._trace_ended, opened))
        request = opened.request if opened.version < 0 else replace(opened.request, model_version=opened.version)
        return packed_request(number, request, is_confirmed=is_confirmed, trace=start, resume=opened.resume)

    def _submit(self, opened: OpenRequest, message: list[Frame]) -> None:
        link = self._link_for(opened)
        if opened.is_cancelled:
            self._end(opened, cancelled("the request was cancelled"))
        elif link is None:
            opened.link = None
            self._waiting[opened] = None
            opened.deadline = opened.deadline or self._loop.call_later(self._wait_for_host_s, self._give_up, opened)
        else:
            opened.link = link
            self._open[opened.number] = opened
            link.send(message)

    def _resubmit(self, opened: OpenRequest) -> None:
        self._submit(opened, self._message(opened, opened.acceptance is not None))

    def _link_for(self, opened: OpenRequest) -> HostLink | None:
        """The first host that serves the model; else, for a new request, the first host, which reports the error."""
        name, version = opened.request.model_name, opened.version
        attached = [(link, link.host) for link in self._links if link.host is not None]
        staying = [(link, host) for link, host in attached if not host.state.is_exiting] or attached
        for link, host in staying:
            model = host.find(name, version)
            if model is not None and opened.fingerprint in ("", model.description.fingerprint):
                opened.fingerprint, opened.model_resumes = model.description.fingerprint, model.resumes
                return link
        return staying[0][0] if staying and not opened.fingerprint else None

    def _give_up(self, opened: OpenRequest) -> None:
        faults = "; ".join(link.fault for link in self._links)
        self._end(opened, unavailable(f"no host took the request within {self._wait_for_host_s:g} s: {faults}"))

    def _end(self, opened: OpenRequest, error: TritonError) -> None:
        """Ends a request that is not at a host."""
        self._open.pop(opened.number, None)
        self._waiting.pop(opened, None)
        opened.stop_waiting()
        opened.refused(error)

    def _cancel(self, opened: OpenRequest) -> None:
        """Thread-safe."""
        self._on_loop(self._cancel_now, opened)

    def _cancel_now(self, opened: OpenRequest) -> None:
        if opened in self._waiting:
            self._end(opened, cancelled("the request was cancelled"))
        elif opened.link is not None and not opened.is_over:
            opened.link.send([encode(Cancel(opened.number))])

    def _trace_ended(self, opened: OpenRequest, items: list[tuple[int, str]]) -> None:
        self._on_loop(self._send_trace, opened, items)

    def _send_trace(self, opened: OpenRequest, items: list[tuple[int, str]]) -> None:
        if opened.link is not None:
            opened.link.send([encode(Traced(opened.number, items))])

    def _on_loop(self, work: Callable[..., None], *arguments: object) -> None:
        if threading.get_ident() == self._thread:
            work(*arguments)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(work, *arguments)

    # --- links ------------------------------------------------------------------------------------------------------

    def receive(self, link: HostLink, message: Responses, frames: list[memoryview]) -> None:
        open_requests, layouts = self._open, link.layouts
        with responses_together():
            for decision in message.decisions:
                if isinstance(decision, Decision):
                    self._decided(decision)
                elif (named := open_requests.get(decision.number)) is not None and named.request.trace is not None:
                    named.request.trace.trace.traceparent = decision.traceparent
            for item in message.items:
                opened = open_requests.get(item.number)
                if opened is None:
                    continue
                if item.flags:
                    del open_requests[item.number]
                opened.take(item, layouts, frames)

    def _decided(self, decision: Decision) -> None:
        opened = self._open.get(decision.number)
        if opened is None:
            return
        if decision.error is None:
            opened.accepted()
        else:
            self._end(opened, decision.error.error())

    def link_changed(self, link: HostLink) -> None:
        attached = self._attached_hosts()
        self._known = attached[0]
        self.tracing.is_idle = not any(known.state.is_tracing for known in attached)
        if link.host is not None:
            self._attach_to(peer.endpoint for peer in link.host.state.peers)
            self._drop_unwanted(attached)
        self._attached.set()
        for opened in list(self._waiting):
            if self._link_for(opened) is not None:
                del self._waiting[opened]
                opened.stop_waiting()
                self._resubmit(opened)
        if link.host is not None and link.host.state.is_exiting:
            self._move_from(link)

    def _attach_to(self, endpoints: Iterable[str]) -> None:
        """Skips known endpoints."""
        known = {link.endpoint for link in self._links}
        for endpoint in endpoints:
            if endpoint not in known:
                known.add(endpoint)
                self._links.append(link := self._new_link(endpoint))
                link.open()

    def _drop_unwanted(self, attached: Sequence[KnownHost]) -> None:
        """Keeps attached hosts that no list names: lists are empty when the cluster's registry was lost."""
        wanted = self._given_endpoints.union(peer.endpoint for known in attached for peer in known.state.peers)
        for link in list(self._links):
            if link.host is None and link.endpoint not in wanted:
                self._links.remove(link)
                link.close()

    def link_lost(self, link: HostLink) -> None:
        if attached := self._attached_hosts():
            self._known = attached[0]
            self._drop_unwanted(attached)
        for opened in self._opened_on(link):
            del self._open[opened.number]
            if opened.is_cancelled or opened.can_move():
                self._resubmit(opened)
            else:
                self._end(opened, unavailable(f"the request was not finished: {link.fault}"))

    def _move_from(self, link: HostLink) -> None:
        """Moves requests from a host that is about to end to hosts that can continue them."""
        for opened in self._opened_on(link):
            if opened.can_move() and self._link_for(opened) not in (None, link):
                del self._open[opened.number]
                link.send([encode(Cancel(opened.number))])
                self._resubmit(opened)

    def _opened_on(self, link: HostLink) -> list[OpenRequest]:
        return [opened for opened in self._open.values() if opened.link is link]

    def _resumes(self, request: InferenceRequest) -> bool:
        """Whether the request's model can continue requests of other hosts."""
        found = (host.find(request.model_name, request.model_version) for host in self._attached_hosts())
        return any(model is not None and model.resumes for model in found)

    # --- the hosts' state -------------------------------------------------------------------------------------------

    def is_live(self) -> bool:
        return self._known is not None and self._known.state.is_live

    def is_ready(self) -> bool:
        """Whether any host accepts requests."""
        return any(known.state.is_ready for known in self._attached_hosts())

    @property
    def is_exiting(self) -> bool:
        """Whether all attached hosts are exiting."""
        attached = self._attached_hosts()
        return bool(attached) and all(known.state.is_exiting for known in attached)

    def server_metadata(self) -> ServerMetadata:
        return self._host().state.server

    def metric_samples(self, name: str) -> list[Sample]:
        """The samples of one of `metric_families`, at most about one second old."""
        return [Sample(*sample) for sample in self._host().state.samples.get(name, ())]

    def model_is_ready(self, name: str, version: int = -1) -> bool:
        return any(known.find(name, version) for known in self._attached_hosts())

    def model_metadata(self, name: str, version: int = -1) -> ModelMetadata:
        return self._host_with(name, version).metadata(name, version)

    def model_description(self, name: str, version: int = -1) -> Description:
        return self._host_with(name, version).get(name, version).description

    def model_parameters(self, name: str, version: int = -1) -> Mapping[str, str]:
        return self.model_description(name, version).parameters

    def is_decoupled(self, name: str, version: int = -1) -> bool:
        return self._host_with(name, version).get(name, version).is_decoupled

    def repository_index(self, ready_only: bool = False) -> list[ModelIndex]:
        return [row for row in self._host().state.index if not ready_only or row.state == "READY"]

    def _attached_hosts(self) -> list[KnownHost]:
        return [link.host for link in self._links if link.host is not None]

    def _host(self) -> KnownHost:
        """The preferred host, even after it was lost. Raises TritonError before any host was known."""
        if self._known is None:
            raise unavailable("; ".join(link.fault for link in self._links) or "the frontend is stopping")
        return self._known

    def _host_with(self, name: str, version: int) -> KnownHost:
        """The first host that serves the model, else the preferred one, which reports the error."""
        return next((known for known in self._attached_hosts() if known.find(name, version)), None) or self._host()
