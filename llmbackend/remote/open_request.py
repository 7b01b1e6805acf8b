"""OpenRequest: a request that a frontend has sent, or will send, to a host in another process.

For: RemoteServer. Does not know: links' sockets. Invariants: used on the frontend's event loop, except `cancel`; its
callback is called with FINAL exactly once, by whichever host has it then; nothing comes from a host that it was taken
from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from llmbackend.core.backend_api import ResponseFlag, is_final
from llmbackend.core.errors import TritonError
from llmbackend.core.messages import InferenceRequest, InferenceResponse, ResponseCallback, Resume
from llmbackend.core.outputs import OutputLayout, Outputs
from llmbackend.core.tensors import from_wire

from .tensors import Frame, elements
from .wire import Item, WireTensor

if TYPE_CHECKING:
    from .host_link import HostLink

_NONE = ResponseFlag.NONE
_FLAGS: Final = (_NONE, ResponseFlag.FINAL)
LARGE_STRINGS_BYTES: Final = 256 << 10
"""Of BYTES tensors in one response: with more, it is decoded on a thread."""


class OpenRequest:
    """Also the InferenceHandle.

    number: of the latest submission
    link: of the host that has it; None = it waits for one
    acceptance: awaited by whoever wants to know of a refusal
    fingerprint: of the model that answers it; another one would go on in another way
    model_resumes: whether it can go on with requests of other hosts
    is_resumable: whether its responses bring deltas, if the model gives any
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
        """While it waits for a host."""
        self.fingerprint = ""
        self.model_resumes = False
        self.has_response = False
        self.shows_deltas = request.resume is not None
        self.is_resumable = self.shows_deltas
        self.is_cancelled = False
        self.is_over = False
        self.is_plain = False
        """Whether nothing but its callback needs to know of further responses."""
        self._cancel = cancel
        self._whole: InferenceResponse | None = None
        """The latest response that said all of itself."""
        self._held: list[Callable[[], None]] | None = None
        """What comes behind a response that is being decoded."""
        self._deltas: list[bytes] = list(request.resume.deltas) if request.resume is not None else []
        self._has_no_delta = request.resume is not None and request.resume.replays
        """A response came without a delta; or the host sends responses again, of which it is unknown how many came."""

    def cancel(self) -> None:
        """Any thread; idempotent."""
        if not self.is_cancelled:
            self.is_cancelled = True
            self._cancel(self)

    # --- another host -----------------------------------------------------------------------------------------------

    @property
    def resume(self) -> Resume | None:
        """With which another host goes on behind what was delivered."""
        if not self.is_resumable:
            return None
        return self.request.resume if self._has_no_delta else Resume(tuple(self._deltas))

    @property
    def version(self) -> int:
        """Of the model, once a response said it."""
        return self.request.model_version if self._whole is None else self._whole.model_version

    def can_move(self) -> bool:
        """Whether another host can go on with it."""
        if self.is_cancelled or self.request.correlation_id:
            return False  # a sequence's state is in its host
        if not self.has_response:
            return self.model_resumes
        return self.is_resumable and not self._has_no_delta and self._held is None

    # --- what the host says -----------------------------------------------------------------------------------------

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
        """Delivers what `item` says."""
        whole = self._whole
        if self.is_plain and whole is not None and not item.flags and item.response is None and item.layout >= 0:
            # a token of a stream
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
        """On a thread, since it takes long; what comes meanwhile waits."""
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
