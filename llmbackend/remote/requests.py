"""An InferenceRequest as a message, and back.

For: RemoteServer (`packed_request`) and HostEndpoint (`unpacked_request`). Does not know: links. Invariant: a request
arrives as it was sent, but for its trace, which the host makes where it samples the request.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmbackend.core.errors import invalid_argument
from llmbackend.core.messages import NO_FLAGS, InferenceRequest, RequestFlag, Resume
from llmbackend.core.requests.request_bounds import check_request
from llmbackend.core.tensors import RawTensor

from .tensors import Frame, elements, packed, unpacked
from .wire import Submit, TraceStart, encode


def packed_request(
    number: int, request: InferenceRequest, *, is_confirmed: bool, trace: TraceStart | None, resume: Resume | None
) -> list[Frame]:
    """Header and frames. resume: instead of the request's own.

    Raises TritonError INVALID_ARG for a request beyond the host's bounds, and for what no message can hold."""
    check_request(request)
    frames: list[Frame] = []
    raw = request.raw_input
    try:
        header = encode(
            Submit(
                number,
                is_confirmed,
                request.model_name,
                request.model_version,
                request.id,
                tuple([packed(tensor, frames) for tensor in request.inputs]),
                request.requested_outputs,
                dict(request.parameters),
                request.correlation_id,
                int(request.flags),
                request.priority,
                request.timeout_us,
                None if raw is None else packed(RawTensor("", "", (), raw), frames),
                request.shared_inputs,
                dict(request.shared_outputs),
                dict(request.classes),
                request.tenant,
                trace,
                resume,
            )
        )
    except (OverflowError, UnicodeEncodeError) as error:
        raise invalid_argument(f"the request has a number beyond 64 bits or text that is no UTF-8: {error}") from None
    return [header, *frames]


def unpacked_request(submit: Submit, frames: Sequence[Frame]) -> InferenceRequest:
    """Takes time in proportion to the number of strings. Raises TritonError INVALID_ARG for elements that do not fit
    their shape."""
    raw = submit.raw_input
    return InferenceRequest(
        model_name=submit.model_name,
        model_version=submit.model_version,
        id=submit.id,
        inputs=tuple([unpacked(tensor, frames) for tensor in submit.inputs]),
        requested_outputs=submit.requested_outputs,
        parameters=submit.parameters,
        correlation_id=submit.correlation_id,
        flags=RequestFlag(submit.flags) if submit.flags else NO_FLAGS,
        priority=submit.priority,
        timeout_us=submit.timeout_us,
        raw_input=None if raw is None else bytes(elements(raw, frames)),
        shared_inputs=submit.shared_inputs,
        shared_outputs=submit.shared_outputs,
        classes=submit.classes,
        tenant=submit.tenant,
        resume=submit.resume,
    )
