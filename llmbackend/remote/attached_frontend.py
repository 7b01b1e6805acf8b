"""AttachedFrontend: the host's view of a frontend and its open requests. HostStates: the state announced to all
frontends.

Used by HostEndpoint. Independent of sockets (it receives a function for sending). Invariants: responses of one step are
sent in one message, in order; unread bytes are bounded, except for one response of each request; when a frontend is
lost, its requests are cancelled.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, cast

import msgspec

from llmbackend.core.backend_api import ResponseFlag, is_final
from llmbackend.core.errors import TritonError, cancelled, internal
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import InferenceHandle, InferenceResponse, wake_receiver
from llmbackend.core.outputs import OutputLayout, Outputs
from llmbackend.core.tracing.trace import RequestTrace

from .wire import (
    Decision,
    Frame,
    HostPeer,
    HostState,
    Item,
    Layout,
    Responses,
    TraceName,
    WireError,
    WireResponse,
    WireSample,
    encode,
    packed,
)

log = logging.getLogger(__name__)

MAX_UNREAD_BYTES: Final = 64 << 20
"""Limit on bytes sent to a frontend and not yet read. A large response is not counted if
everything sent before for its request has been read."""
_NONE = ResponseFlag.NONE
_FINAL: Final = int(ResponseFlag.FINAL)
_NO_LAYOUT: Final = -1
Send = Callable[[list[Frame]], bool]
"""Sends a message to the frontend from any thread. Returns False if the frontend is lost."""
RawItem = (
    tuple[int, int, int, tuple[Any, ...]]
    | tuple[int, int, int, tuple[Any, ...], bytes]
    | tuple[int, int, int, tuple[Any, ...], bytes, WireResponse]
)
"""The fields of an Item; trailing ones may be omitted."""


class HostedRequest:
    """A frontend's request: the response callback of its inference."""

    __slots__ = (
        "_frontend", "_handle", "_is_cancelled", "_is_over", "_layout", "_layout_number", "_like", "_sent_at", "number"
    )  # fmt: skip

    def __init__(self, number: int, frontend: AttachedFrontend) -> None:
        self.number = number
        self._frontend = frontend
        self._handle: InferenceHandle | None = None
        self._is_cancelled = False
        self._is_over = False
        self._like: InferenceResponse | None = None
        """The last response sent with all its fields."""
        self._layout: OutputLayout | None = None
        self._layout_number = _NO_LAYOUT
        self._sent_at = 0
        """Position of its last response in the byte stream to the frontend."""

    def accepted(self, handle: InferenceHandle) -> None:
        self._handle = handle
        if self._is_cancelled:
            handle.cancel()

    def cancel(self) -> None:
        """May precede `accepted`. Not in response callbacks, whose callers may hold a lock that cancelling takes."""
        self._is_cancelled = True
        if self._handle is not None:
            self._handle.cancel()

    def cancel_later(self) -> None:
        """Like `cancel`, for response callbacks."""
        self._is_cancelled = True
        if self._handle is not None:
            self._frontend.cancel_later(self._handle)

    def __call__(self, response: InferenceResponse | None, flags: ResponseFlag) -> None:
        frontend = self._frontend
        if flags is _NONE and response is not None and not frontend.is_behind and not self._is_over:
            outputs = response.outputs
            if type(outputs) is Outputs and outputs.layout is self._layout and self._has_only_new_outputs(response):
                # one token of a stream
                item = (self.number, 0, self._layout_number, outputs.values)
                frontend.put((*item, response.delta) if response.delta else item)
                self._sent_at = frontend.sent_bytes + 1
                return
        self._put(response, flags)

    def _has_only_new_outputs(self, response: InferenceResponse) -> bool:
        """Whether all other fields equal those of `_like`."""
        like = self._like
        return (
            like is not None
            and not response.parameters
            and response.error is None
            and response.request_id == like.request_id
            and response.model_version == like.model_version
            and response.model_name == like.model_name
        )

    def _put(self, response: InferenceResponse | None, flags: ResponseFlag) -> None:
        frontend = self._frontend
        if self._is_over:
            return
        code = 0 if flags is _NONE else int(flags)
        if frontend.is_behind and response is not None and frontend.has_not_read(self._sent_at):
            response, code = _too_slow(response, frontend.max_unread_bytes), _FINAL
            self.cancel_later()
        if code:
            self._is_over = is_final(ResponseFlag(code))
        item, frames = self._item(response, code)
        if frames:
            frontend.put(_Framed(item, frames, frontend.has_not_read(self._sent_at)))
        else:
            frontend.put(item)
        self._sent_at = frontend.sent_bytes + 1
        if self._is_over:
            frontend.requests.pop(self.number, None)
            self._handle = None  # it holds this object

    def _item(self, response: InferenceResponse | None, code: int) -> tuple[RawItem, list[Frame]]:
        if response is None:
            return (self.number, code, _NO_LAYOUT, ()), []
        outputs = response.outputs
        if type(outputs) is not Outputs:
            return self._whole(response, code, _NO_LAYOUT, ())
        if outputs.layout is not self._layout:
            self._layout, self._layout_number = outputs.layout, self._frontend.number_of(outputs.layout)
        if not self._has_only_new_outputs(response):
            return self._whole(response, code, self._layout_number, outputs.values)
        return (self.number, code, self._layout_number, outputs.values, response.delta), []

    def _whole(
        self, response: InferenceResponse, code: int, layout: int, values: tuple[Any, ...]
    ) -> tuple[RawItem, list[Frame]]:
        self._like = response
        frames: list[Frame] = []
        tensors = () if layout >= 0 else tuple([packed(tensor, frames) for tensor in response.outputs])
        whole = WireResponse(
            response.model_name,
            response.model_version,
            response.request_id,
            dict(response.parameters),
            None if response.error is None else WireError.of(response.error),
            tensors,
        )
        return (self.number, code, layout, values, response.delta, whole), frames


class _Framed(NamedTuple):
    """An item with large tensors. is_counted: whether they count towards the limit on unread bytes."""

    item: RawItem
    frames: list[Frame]
    is_counted: bool


class AttachedFrontend:
    """`requests` may be read by any thread. is_behind: whether more than `max_unread_bytes` are unread."""

    def __init__(
        self,
        name: str,
        families: tuple[str, ...],
        send: Send,
        cancel_later: Callable[[InferenceHandle], None],
        max_unread_bytes: int = MAX_UNREAD_BYTES,
    ) -> None:
        """cancel_later: cancels a request on a thread that holds no lock"""
        self.name = name
        self.families = families
        self.cancel_later = cancel_later
        self.max_unread_bytes = max_unread_bytes
        self.requests: dict[int, HostedRequest] = {}
        self.traces: dict[int, RequestTrace] = {}
        """By request number, until the frontend reports the request's end."""
        self.sent_bytes = 0
        self.read_bytes = 0
        self.read_state = 0
        """Number of the latest HostState read by the frontend."""
        self.is_behind = False
        self.is_lost = False
        self._send = send
        self._lock = threading.Lock()
        """Held while sending, so that messages preserve the order of `put`."""
        self._is_woken = False
        self._items: list[RawItem | _Framed] = []
        self._decisions: list[Decision | TraceName] = []
        self._layouts: dict[OutputLayout, int] = {}
        self._new_layouts: list[Layout] = []
        self._unread: deque[tuple[int, int]] = deque()
        """For each counted unread message: its end position in the byte stream, and its size."""
        self._unread_bytes = 0

    def has_not_read(self, position: int) -> bool:
        """Whether some of the first `position` bytes are unread."""
        return self.read_bytes < position

    # --- to the frontend, from any thread ---------------------------------------------------------------------------

    def put(self, item: RawItem | _Framed) -> None:
        self._items.append(item)
        if not self._is_woken:
            self._wake()

    def decided(self, decision: Decision | TraceName) -> None:
        self._decisions.append(decision)
        if not self._is_woken:
            self._wake()

    def number_of(self, layout: OutputLayout) -> int:
        with self._lock:
            number = self._layouts.get(layout)
            if number is None:
                number = self._layouts[layout] = len(self._layouts)
                self._new_layouts.append(Layout(number, layout.names, layout.datatypes))
            return number

    def send(self, message: list[Frame]) -> None:
        with self._lock:
            self._send_now(message)

    def _wake(self) -> None:
        self._is_woken = True
        wake_receiver(self._flush)

    def _flush(self) -> None:
        """Sends everything put so far. Whatever is put meanwhile is sent here or by the next flush."""
        failed: list[int] = []
        try:
            with self._lock:
                self._is_woken = False
                decisions = _taken(self._decisions)
                items = _taken(self._items)
                layouts = _taken(self._new_layouts)  # last: an item's layout is added before the item
                for group, frames, is_counted in _groups(items):
                    content = self._encoded(decisions, layouts, group, failed)
                    self._send_now([content, *frames], is_counted=is_counted)
                    decisions, layouts = [], []
                if decisions or layouts:
                    self._send_now([encode(Responses(decisions, layouts, ()))])
        except Exception:
            log.exception("responses to frontend '%s' are lost", self.name)
        for number in failed:
            if (request := self.requests.get(number)) is not None:
                request.cancel_later()

    def _encoded(
        self,
        decisions: list[Decision | TraceName],
        layouts: list[Layout],
        items: list[RawItem],
        failed: list[int],
    ) -> bytes:
        """An item that cannot be encoded is replaced by an error, which ends its request; its number is added to
        `failed`."""
        try:
            return encode(Responses(decisions, layouts, cast(list[Item], items)))
        except (UnicodeEncodeError, OverflowError, TypeError):
            pass
        for index, item in enumerate(items):
            try:
                encode(item)
            except (UnicodeEncodeError, OverflowError, TypeError) as error:
                log.error("a response to frontend '%s' cannot be encoded: %s", self.name, error)
                items[index] = _unencodable(item)
                failed.append(item[0])
        return encode(Responses(decisions, layouts, cast(list[Item], items)))

    def _send_now(self, message: list[Frame], is_counted: bool = True) -> None:
        if not self.is_lost:
            self.is_lost = not self._send(message)
        num_bytes = sum(map(len, message))
        self.sent_bytes += num_bytes
        if is_counted:
            self._unread.append((self.sent_bytes, num_bytes))
            self._unread_bytes += num_bytes
            self._update_is_behind()

    # --- from the frontend ------------------------------------------------------------------------------------------

    def has_read(self, num_bytes: int) -> None:
        with self._lock:
            self.read_bytes = num_bytes
            while self._unread and self._unread[0][0] <= num_bytes:
                self._unread_bytes -= self._unread.popleft()[1]
            self._update_is_behind()

    def _update_is_behind(self) -> None:
        is_behind = self._unread_bytes > self.max_unread_bytes
        if is_behind and not self.is_behind:
            text = "frontend '%s' is behind: more than %d bytes wait for it; requests with more responses are cancelled"
            log.warning(text, self.name, self.max_unread_bytes)
        self.is_behind = is_behind

    def lost(self) -> None:
        """Cancels the requests of a frontend that is lost."""
        self.is_lost = True
        for request in list(self.requests.values()):
            request.cancel()
        for trace in list(self.traces.values()):
            trace.close()
        self.traces.clear()


def _taken(waiting: list[Any]) -> list[Any]:
    """Empties and returns the list. Other threads may append concurrently without a lock."""
    taken = waiting[:]
    del waiting[: len(taken)]
    return taken


def _groups(items: list[RawItem | _Framed]) -> list[tuple[list[RawItem], list[Frame], bool]]:
    """The items in as few messages as possible: one for each item with frames, which are numbered per message."""
    if _Framed not in set(map(type, items)):  # the usual case
        return [(cast(list[RawItem], items), [], True)] if items else []
    groups: list[tuple[list[RawItem], list[Frame], bool]] = []
    for item in items:
        if isinstance(item, _Framed):
            groups.append(([item.item], item.frames, item.is_counted))
        elif not groups or groups[-1][1]:
            groups.append(([item], [], True))
        else:
            groups[-1][0].append(item)
    return groups


def _unencodable(item: RawItem) -> RawItem:
    whole = item[5] if len(item) == 6 else WireResponse("", 0, "", {})
    error = WireError.of(internal("internal error, see the server's log"))
    return item[0], _FINAL, _NO_LAYOUT, (), b"", msgspec.structs.replace(whole, parameters={}, error=error, tensors=())


def _too_slow(response: InferenceResponse, limit_bytes: int) -> InferenceResponse:
    error: TritonError = cancelled(
        f"the request was cancelled because its frontend reads too slowly: more than {limit_bytes} bytes were waiting"
    )
    return InferenceResponse(response.model_name, response.model_version, response.request_id, error=error)


INTERVAL_S: Final = 1.0
ANNOUNCED_WITHIN_S: Final = 2.0


class HostStates:
    """Sends the host's state to frontends when it changes, from its own thread."""

    def __init__(
        self, server: InferenceServer, host_id: str, frontends: Callable[[], Iterable[AttachedFrontend]]
    ) -> None:
        self._server = server
        self._host_id = host_id
        self._frontends = frontends
        self._peers: tuple[HostPeer, ...] = ()
        self._changed = threading.Condition()
        self._asked = 0
        """Number of calls to `ask`."""
        self._number = 0
        """Value of `_asked` when the latest state was created."""
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

    def set_peers(self, peers: Iterable[HostPeer]) -> None:
        """Sets the other hosts that frontends can use, in order of preference."""
        self._peers = tuple(peers)
        self.ask()

    def ask(self) -> int:
        """Schedules sending the current state to frontends. Its number will be at least the returned one."""
        with self._changed:
            self._asked += 1
            self._changed.notify_all()
            return self._asked

    def announce(self, timeout_s: float = ANNOUNCED_WITHIN_S) -> bool:
        """Blocks until every frontend has read the current state. Returns False if one has not within `timeout_s`."""
        number = self.ask()
        with self._changed:
            return self._changed.wait_for(
                lambda: self._is_closed or (self._number >= number and self._all_have_read(number)),
                timeout_s,
            )

    def leave(self, timeout_s: float) -> bool:
        """Announces that the host is about to end."""
        self._is_leaving = True
        return self.announce(timeout_s)

    def read(self) -> None:
        """Called when a frontend has read a state or is lost."""
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
                log.exception("frontends cannot be told the host's state")
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
