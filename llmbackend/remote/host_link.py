"""HostLink: a frontend's connection to one host.

Used by RemoteServer. Independent of other hosts and of the kinds of sockets. Invariants: it is used on one event loop;
nothing is sent or received on a connection after its end; it reconnects forever; a host with many messages does not
block the loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import msgspec

from llmbackend.core.backend_api import ResponseFlag, is_final
from llmbackend.core.errors import TritonError
from llmbackend.core.lifecycle.model_versions import ready_version
from llmbackend.core.messages import InferenceRequest, InferenceResponse, ModelMetadata, ResponseCallback, Resume
from llmbackend.core.models.served_config import Description
from llmbackend.core.outputs import OutputLayout, Outputs, layout_of
from llmbackend.core.repository.model_files import ModelIdentifier, ModelNames
from llmbackend.core.served_models import ModelRow
from llmbackend.core.tensors import from_wire
from llmbackend.links.secrets import ClusterSecrets

from .endpoints import check_endpoint, new_connection
from .sockets import Connection, ConnectionOwner
from .wire import (
    Frame,
    Hello,
    HostState,
    Item,
    Leave,
    Received,
    Refused,
    Responses,
    StateRead,
    WireTensor,
    decode_models,
    decode_to_frontend,
    elements,
    encode,
)


@dataclass(frozen=True, slots=True)
class KnownModel:
    """One READY version."""

    description: Description
    is_decoupled: bool
    resumes: bool


class KnownHost:
    """A host as a frontend knows it."""

    def __init__(self, state: HostState, before: KnownHost | None = None) -> None:
        """before: the previous knowledge about the same host."""
        self.state = state
        self._rows: dict[str, ModelRow]
        self._names: ModelNames
        if before is not None and bytes(before.state.models) == bytes(state.models):
            self._rows, self._names = before._rows, before._names
            return
        table = decode_models(state.models)
        self._rows = {row.key: row for row in table.rows}
        self._names = ModelNames(table.is_namespacing)
        for row in table.rows:
            key = ModelIdentifier(row.key)
            self._names.add(row.name, key)
            self._names.serve_as(key, row.served_names)

    def find(self, name: str, version: int = -1) -> KnownModel | None:
        """None if the host does not serve it."""
        try:
            return self.get(name, version)
        except TritonError:
            return None

    def get(self, name: str, version: int = -1) -> KnownModel:
        """Raises TritonError like ServedModels.get."""
        row, number = self._find(name, version)
        return KnownModel(row.descriptions[number], number in row.decoupled, row.resumes)

    def metadata(self, name: str, version: int = -1) -> ModelMetadata:
        """Raises TritonError like ServedModels.metadata."""
        row, number = self._find(name, version)
        return row.descriptions[number].metadata([number] if version >= 0 else sorted(row.descriptions))

    def _find(self, name: str, version: int) -> tuple[ModelRow, int]:
        key = self._names.key(name)
        row = self._rows.get(key)
        number = ready_version(key, version, None if row is None else row.states)
        assert row is not None, "an unknown model has no version"
        return row, number


log = logging.getLogger(__name__)

_MESSAGES_AT_ONCE: Final = 64
_READ_PER_REPORT_BYTES: Final = 256 << 10
_AGAIN_S: Final = 0.05
GOODBYE_S: Final = 0.2
_LEAVE: Final = encode(Leave())
_AGAIN_AFTER_REFUSAL_S: Final = 2.0


class LinkOwner(Protocol):
    """The user of a link. Called on the event loop."""

    def link_changed(self, link: HostLink) -> None:
        """Called when the host has sent its state."""

    def link_lost(self, link: HostLink) -> None:
        """Called when the connection has ended; open requests get no further answers."""

    def receive(self, link: HostLink, message: Responses, frames: list[memoryview]) -> None: ...


class HostLink:
    """Operates between `open` and `close`. host: None unless attached; fault: why it is not attached, if known."""

    def __init__(
        self,
        endpoint: str,
        owner: LinkOwner,
        hello: Hello,
        keys: ClusterSecrets | None = None,
        heartbeat_timeout_s: float | None = None,
    ) -> None:
        """heartbeat_timeout_s: None = the endpoint kind's default. Raises ValueError for an unusable endpoint."""
        check_endpoint(endpoint, keys)
        self.endpoint = endpoint
        self.host: KnownHost | None = None
        self.fault = f"no host answers at {endpoint}"
        self.layouts: list[OutputLayout] = []
        """Indexed by the host's numbers."""
        self._owner = owner
        self._hello = encode(hello)
        self._keys = keys
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._loop = asyncio.get_running_loop()
        self._connection: Connection | None = None
        self._again: asyncio.TimerHandle | None = None
        self._num_read_bytes = 0
        self._num_reported_bytes = 0

    def open(self) -> None:
        """Begins to connect."""
        self._again = None
        self._num_read_bytes = self._num_reported_bytes = 0
        self.layouts = []
        owner = ConnectionOwner(self._read, self._failed, self._ended)
        self._connection = new_connection(self.endpoint, self._keys, self._heartbeat_timeout_s, owner)
        self._connection.open()
        self._connection.send([self._hello])

    def close(self) -> None:
        """Waits up to GOODBYE_S for a host that is not reading."""
        if self._again is not None:
            self._again.cancel()
        if self.host is None:
            self._disconnect()
        else:
            self.send([_LEAVE])
            self._disconnect(GOODBYE_S)

    def send(self, message: list[Frame]) -> None:
        """Does nothing without a connection; `link_lost` has been or will then be called."""
        if self._connection is not None:
            self._connection.send(message)

    def _read(self) -> None:
        for _ in range(_MESSAGES_AT_ONCE):
            if self._connection is None or (message := self._connection.receive()) is None:
                return
            header, *frames = message
            try:
                self._handle(header, frames)
            except msgspec.DecodeError as error:
                log.error("the host at %s sent a message that cannot be read: %s", self.endpoint, error)
                self._lose(f"the host at {self.endpoint} sent a message that cannot be read")
                return
            self._count(len(header) + sum(map(len, frames)))
        self._loop.call_soon(self._read)

    def _handle(self, header: memoryview, frames: list[memoryview]) -> None:
        message = decode_to_frontend(header)
        if isinstance(message, Responses):
            self.layouts += [layout_of(layout.names, layout.datatypes) for layout in message.layouts]
            self._owner.receive(self, message, frames)
        elif isinstance(message, HostState):
            self.host, self.fault = KnownHost(message, self.host), ""
            self._owner.link_changed(self)
            self.send([encode(StateRead(message.number))])
        elif isinstance(message, Refused):
            log.error("the host at %s refuses this frontend: %s", self.endpoint, message.reason)
            self._lose(message.reason, _AGAIN_AFTER_REFUSAL_S)

    def _count(self, num_bytes: int) -> None:
        self._num_read_bytes += num_bytes
        if self._num_read_bytes - self._num_reported_bytes >= _READ_PER_REPORT_BYTES:
            self._num_reported_bytes = self._num_read_bytes
            self.send([encode(Received(self._num_read_bytes))])

    def _failed(self, fault: str) -> None:
        self.fault = fault

    def _ended(self) -> None:
        self._lose("" if self.host is not None else self.fault)

    def _lose(self, fault: str, again_s: float = _AGAIN_S) -> None:
        """Ends the connection and reconnects after `again_s`."""
        was_attached = self.host is not None
        self.fault = fault or f"the host at {self.endpoint} is gone"
        self._disconnect()
        self._again = self._loop.call_later(again_s, self.open)
        if was_attached:
            log.warning("%s", self.fault)
            self._owner.link_lost(self)

    def _disconnect(self, linger_s: float = 0.0) -> None:
        self.host = None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close(linger_s)


_NONE = ResponseFlag.NONE
_FLAGS: Final = (_NONE, ResponseFlag.FINAL)
LARGE_STRINGS_BYTES: Final = 256 << 10
"""A response with more bytes than this in BYTES tensors is decoded on a thread."""


class OpenRequest:
    """A frontend's open request; also its InferenceHandle.

    number         of the latest submission
    link           to the host that has it; None = it is waiting for a host
    acceptance     awaited by callers that need to know about a refusal
    fingerprint    of the answering model; a different model would continue differently
    model_resumes  whether the model can continue requests of other hosts
    is_resumable   whether responses carry deltas, if the model gives any
    """

    __slots__ = (
        "_cancel", "_deltas", "_has_no_delta", "_held", "_whole", "acceptance", "callback", "deadline",
        "fingerprint", "has_response", "is_cancelled", "is_over", "is_plain",
        "is_resumable", "link", "model_resumes",
        "number", "request", "shows_deltas",
    )  # fmt: skip

    def __init__(
        self, request: InferenceRequest, callback: ResponseCallback, cancel: Callable[[OpenRequest], None]
    ) -> None:
        self.request = request
        self.callback = callback
        self.number = 0
        self.link: HostLink | None = None
        self.acceptance: asyncio.Future[None] | None = None
        self.deadline: asyncio.TimerHandle | None = None
        """Set while it is waiting for a host."""
        self.fingerprint = ""
        self.model_resumes = False
        self.has_response = False
        self.shows_deltas = request.resume is not None
        self.is_resumable = self.shows_deltas
        self.is_cancelled = False
        self.is_over = False
        self.is_plain = False
        """Whether further responses only need to be passed to the callback."""
        self._cancel = cancel
        self._whole: InferenceResponse | None = None
        """The latest response that arrived with all its fields."""
        self._held: list[Callable[[], None]] | None = None
        """Deliveries that wait until a response is decoded."""
        self._deltas: list[bytes] = list(request.resume.deltas) if request.resume is not None else []
        self._has_no_delta = request.resume is not None and request.resume.replays
        """Whether a response came without a delta, or it is unknown how many responses the host will repeat."""

    def cancel(self) -> None:
        """Thread-safe and idempotent."""
        if not self.is_cancelled:
            self.is_cancelled = True
            self._cancel(self)

    def stop_waiting(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    # --- another host -----------------------------------------------------------------------------------------------

    @property
    def resume(self) -> Resume | None:
        """What another host needs in order to continue after the responses delivered so far."""
        if not self.is_resumable:
            return None
        return self.request.resume if self._has_no_delta else Resume(tuple(self._deltas))

    @property
    def version(self) -> int:
        """The model's version: the requested one until a response names it."""
        return self.request.model_version if self._whole is None else self._whole.model_version

    def can_move(self) -> bool:
        """Whether another host can continue it."""
        if self.is_cancelled or self.request.correlation_id:
            return False  # only its host has the sequence's state
        if not self.has_response:
            return self.model_resumes
        return self.is_resumable and not self._has_no_delta and self._held is None

    # --- from the host ----------------------------------------------------------------------------------------------

    def accepted(self) -> None:
        if self.acceptance is not None and not self.acceptance.done():
            self.acceptance.set_result(None)

    def refused(self, error: TritonError) -> None:
        """Ends the request."""
        if self.acceptance is not None and not self.acceptance.done():
            self.is_over = True
            self.acceptance.set_exception(error)
        else:
            self.fail(error)

    def fail(self, error: TritonError) -> None:
        """Ends the request with `error` as its last response."""
        request = self.request
        self.deliver(
            InferenceResponse(request.model_name, max(request.model_version, 0), request.id, error=error),
            ResponseFlag.FINAL,
        )

    def take(self, item: Item, layouts: Sequence[OutputLayout], frames: Sequence[Frame]) -> None:
        whole = self._whole
        if self.is_plain and whole is not None and not item.flags and item.response is None and item.layout >= 0:
            # one token of a stream
            outputs = Outputs(layouts[item.layout], item.values)
            self.callback(InferenceResponse(whole.model_name, whole.model_version, whole.request_id, outputs), _NONE)
            return
        if self._held is not None:
            self._held.append(partial(self.take, item, layouts, frames))
            return
        flags = _FLAGS[item.flags] if item.flags < len(_FLAGS) else ResponseFlag(item.flags)
        if self.is_resumable and (item.layout >= 0 or item.response is not None):
            self._deltas.append(item.delta)
            self._has_no_delta = self._has_no_delta or not item.delta
        said = item.response
        if said is None:
            if item.layout < 0 or whole is None:
                self.deliver(None, flags)
            else:
                outputs = Outputs(layouts[item.layout], item.values)
                response = InferenceResponse(whole.model_name, whole.model_version, whole.request_id, outputs)
                if self.shows_deltas:
                    response = msgspec.structs.replace(response, delta=item.delta)
                self.deliver(response, flags)
            return
        if _string_bytes(said.tensors, frames) > LARGE_STRINGS_BYTES:
            self._decode_apart(item, layouts, frames)
        else:
            self._take_whole(item, layouts, frames)

    def _take_whole(self, item: Item, layouts: Sequence[OutputLayout], frames: Sequence[Frame]) -> None:
        self._deliver_whole(_response(item, layouts, frames, self.shows_deltas), ResponseFlag(item.flags))

    def _decode_apart(self, item: Item, layouts: Sequence[OutputLayout], frames: Sequence[Frame]) -> None:
        """Decodes on a thread; further responses wait."""
        self._held = []
        self.is_plain = False
        decoding = asyncio.get_running_loop().run_in_executor(None, _response, item, layouts, frames, self.shows_deltas)
        decoding.add_done_callback(partial(self._decoded, ResponseFlag(item.flags)))

    def _decoded(self, flags: ResponseFlag, decoding: asyncio.Future[InferenceResponse]) -> None:
        held, self._held = self._held or [], None
        self._deliver_whole(decoding.result(), flags)
        for take in held:
            take()

    def _deliver_whole(self, response: InferenceResponse, flags: ResponseFlag) -> None:
        self._whole = InferenceResponse(response.model_name, response.model_version, response.request_id)
        self.deliver(response, flags)

    def deliver(self, response: InferenceResponse | None, flags: ResponseFlag) -> None:
        if self.is_over:
            return
        self.has_response = True
        if self.acceptance is not None:
            self.accepted()
        if flags is not _NONE:
            self.is_over = is_final(flags)
        self.is_plain = self._held is None and not self.is_resumable and not self.is_over
        self.callback(response, flags)


def _response(
    item: Item, layouts: Sequence[OutputLayout], frames: Sequence[Frame], shows_delta: bool
) -> InferenceResponse:
    said = item.response
    assert said is not None
    return InferenceResponse(
        said.model_name,
        said.model_version,
        said.request_id,
        Outputs(layouts[item.layout], item.values)
        if item.layout >= 0
        else tuple([from_wire(one.name, one.datatype, one.shape, elements(one, frames)) for one in said.tensors]),
        said.parameters,
        None if said.error is None else said.error.error(),
        item.delta if shows_delta else b"",
    )


def _string_bytes(tensors: Sequence[WireTensor], frames: Sequence[Frame]) -> int:
    return sum(len(elements(tensor, frames)) for tensor in tensors if tensor.datatype == "BYTES")
