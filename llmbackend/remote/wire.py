"""Messages between frontends and hosts in different processes, and their encoding.

Used by both ends of a link. Independent of sockets and of what requests mean. Invariants: a message is a msgpack header
plus frames with the elements of large tensors; both ends compare their releases first and continue only if they are
equal, so each release may change messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.core.messages import ModelIndex, ParameterValue, Resume, ServerMetadata, Tenant
from llmbackend.core.served_models import ModelTable
from llmbackend.core.tensors import RawTensor, SharedInput, SharedRange, Tensor, from_wire, wire_view

INLINE_BYTES: Final = 16 << 10
Frame = bytes | memoryview


def packed(tensor: Tensor | RawTensor, frames: list[Frame]) -> WireTensor:
    """Appends large elements to `frames`."""
    is_raw = isinstance(tensor, RawTensor)
    data: Frame = tensor.raw if isinstance(tensor, RawTensor) else wire_view(tensor)
    shape = tuple(map(int, tensor.shape))
    if len(data) <= INLINE_BYTES:
        return WireTensor(tensor.name, tensor.datatype, shape, bytes(data), is_raw=is_raw)
    frames.append(data)
    return WireTensor(tensor.name, tensor.datatype, shape, frame=len(frames) - 1, is_raw=is_raw)


def elements(wire: WireTensor, frames: Sequence[Frame]) -> Frame:
    return frames[wire.frame] if wire.frame >= 0 else wire.data


def unpacked(wire: WireTensor, frames: Sequence[Frame]) -> Tensor | RawTensor:
    """The inverse of `packed`. Takes time proportional to the number of strings."""
    if wire.is_raw:
        return RawTensor(wire.name, wire.datatype, wire.shape, elements(wire, frames))
    return from_wire(wire.name, wire.datatype, wire.shape, elements(wire, frames))


PROTOCOL: Final = 1
"""Changes only when Hello or Refused changes, since these two are also exchanged between different releases."""


class WireTensor(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """data    the elements as KServe's raw bytes; b"" = they are in a frame
    frame   the index of the frame; -1 = no frame
    is_raw  whether the tensor has not been validated yet (RawTensor)
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes = b""
    frame: int = -1
    is_raw: bool = False


class WireError(msgspec.Struct, frozen=True, array_like=True, gc=False):
    code: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: TritonError) -> WireError:
        return cls(error.code.name, error.message, error.param)

    def error(self) -> TritonError:
        return TritonError(self.message, ErrorCode[self.code], self.param)


# --- frontend → host ----------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The first message. name: the frontend's name for logs. families: metrics whose samples it needs."""

    protocol: int
    release: str
    name: str
    families: tuple[str, ...] = ()


class TraceStart(msgspec.Struct, frozen=True, array_like=True):
    """The host may sample the client's request.

    headers  of the client's own trace
    items    (monotonic ns, activity)
    parent   number of the request to whose trace this one belongs, 0 = none
    """

    headers: dict[str, str]
    items: list[tuple[int, str]]
    parent: int = 0


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """An InferenceRequest. number: unique in the link; is_confirmed: whether acceptance (and not only refusal) is
    answered with a Decision."""

    number: int
    is_confirmed: bool
    model_name: str
    model_version: int
    id: str
    inputs: tuple[WireTensor, ...]
    requested_outputs: tuple[str, ...]
    parameters: dict[str, ParameterValue]
    correlation_id: int | str
    flags: int
    priority: int
    timeout_us: int
    raw_input: WireTensor | None
    shared_inputs: tuple[SharedInput, ...]
    shared_outputs: dict[str, SharedRange]
    classes: dict[str, int]
    tenant: Tenant
    trace: TraceStart | None
    resume: Resume | None
    command: str


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=2):
    number: int


class Traced(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The frontend has finished a request that had a TraceStart. items: its activities since then."""

    number: int
    items: list[tuple[int, str]]


class Received(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """num_bytes: total size of the messages that the frontend has read from this link."""

    num_bytes: int


class StateRead(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The frontend has read the HostState with this number."""

    number: int


class Call(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """A call from another host, which need not be attached. number: unique in the link. host_id: the caller. topic:
    selects the handler."""

    number: int
    release: str
    host_id: str
    topic: str
    payload: bytes


class Leave(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """The frontend's last message; its open requests are cancelled."""


ToHost = Hello | Submit | Cancel | Traced | Received | StateRead | Call | Leave


# --- host → frontend ----------------------------------------------------------------------------------------------


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The host does not serve this frontend. release: the host's."""

    reason: str
    release: str


class HostPeer(msgspec.Struct, frozen=True, array_like=True):
    """A host that frontends can use. id: unique in the cluster. endpoint: that of its HostEndpoint."""

    id: str
    endpoint: str


class WireSample(NamedTuple):
    """The first fields of prometheus_client's Sample."""

    name: str
    labels: dict[str, str]
    value: float


class HostState(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The host's state; the first one means that the frontend is attached.

    number   increases with each state
    models   a ModelTable
    samples  by metric family
    peers    the other hosts
    """

    number: int
    host_id: str
    is_live: bool
    is_ready: bool
    is_exiting: bool
    is_tracing: bool
    server: ServerMetadata
    models: msgspec.Raw
    index: tuple[ModelIndex, ...]
    samples: dict[str, list[WireSample]]
    peers: tuple[HostPeer, ...]


class Decision(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Reports that a request was accepted or, with `error`, refused."""

    number: int
    error: WireError | None = None


class TraceName(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The traceparent of a sampled request. Precedes everything else about the request."""

    number: int
    traceparent: str


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """Defines the OutputLayout to which later Items refer by number."""

    number: int
    names: tuple[str, ...]
    datatypes: tuple[str, ...]


class WireResponse(msgspec.Struct, frozen=True, array_like=True):
    """The fields of an InferenceResponse that differs from its predecessor in more than its outputs. The outputs are
    `tensors`, or the values of its Item."""

    model_name: str
    model_version: int
    request_id: str
    parameters: Mapping[str, ParameterValue]
    error: WireError | None = None
    tensors: tuple[WireTensor, ...] = ()


class Item(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One call of a request's callback.

    flags     ResponseFlag
    layout    number of the layout of `values`; -1 = none
    values    of Outputs
    delta     of the response
    response  the other fields; None = those of the request's last response, without parameters
    """

    number: int
    flags: int
    layout: int
    values: tuple[Any, ...] = ()
    delta: bytes = b""
    response: WireResponse | None = None


class Responses(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Everything that the host currently has for a frontend, such as the responses of a step."""

    decisions: Sequence[Decision | TraceName]
    layouts: Sequence[Layout]
    items: Sequence[Item]


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Empty. Sending it shows the host whether the frontend is connected."""


class CallResult(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The answer to a Call."""

    number: int
    payload: bytes = b""
    error: WireError | None = None


ToFrontend = Refused | HostState | Responses | Beat | CallResult

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_to_host = msgspec.msgpack.Decoder(ToHost).decode
decode_to_frontend = msgspec.msgpack.Decoder(ToFrontend).decode
decode_models = msgspec.msgpack.Decoder(ModelTable).decode
