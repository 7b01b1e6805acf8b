"""The host functions behind Triton's C API. native/*.cpp calls them, and methods of the host's objects, by name while
holding the GIL.

Used by native/. Knows nothing of C objects: models, instances, requests and factories here are the host's own.
Invariant: a function fails by raising, and the C function returns the exception as a TRITONSERVER_Error. Source:
Triton's tritonbackend.h and tritonserver.h.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from ..backend_api import (
    InferenceHandle,
    InferenceRequest,
    InferenceResponse,
    MetricFamily,
    MetricKind,
    Model,
    ModelInstance,
    ParameterValue,
    ReleaseFlag,
    Request,
    RequestFlag,
    RequestTrace,
    ResponseFactory,
    ResponseFlag,
    Tensor,
)
from ..config.model_config import parse_json
from ..config_readers import config_to_json
from ..errors import ErrorCode, TritonError, as_triton_error, unavailable
from ..repoagent_api import AgentModel
from ..tensors import RawTensor, from_wire, wire_view

_log = logging.getLogger(__name__)
_CODES: Final = tuple(ErrorCode)
"""In the order of TRITONSERVER_Error_Code."""
_LEVELS: Final = (logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG)
"""In the order of TRITONSERVER_LogLevel."""
_METRIC_KINDS: Final = (MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM)
_RESPONSE_FLAGS: Final = (ResponseFlag.NONE, ResponseFlag.FINAL)
ErrorPair = tuple[int, str]
"""Number of a TRITONSERVER_Error_Code, message."""
WireTensor = tuple[str, str, tuple[int, ...], Any]
"""Name, datatype, shape, and an object with the buffer protocol that holds the raw bytes."""
_metric_lock = threading.Lock()
_metric_uses: Counter[tuple[MetricFamily, frozenset[tuple[str, str]]]] = Counter()
"""Number of TRITONSERVER_Metric objects per metric. Deleting the last one removes the metric."""
family_makers: list[Callable[..., MetricFamily]] = []
"""`Backend.metric_family` of what is loaded: families, which belong to the server, are made through any of them."""


def pair_of(error: TritonError) -> ErrorPair:
    return _CODES.index(error.code), error.message


def error_from(pair: ErrorPair) -> TritonError:
    code, message = pair
    return TritonError(message, _CODES[code] if 0 <= code < len(_CODES) else ErrorCode.UNKNOWN)


def error_of(error: BaseException) -> ErrorPair:
    if not isinstance(error, TritonError):
        _log.error("the host failed in a call of a compiled backend", exc_info=error)
    return pair_of(as_triton_error(error))


def log_error(code: int, message: str) -> None:
    _log.error("a call that a compiled backend made in Execute failed: %s", error_from((code, message)).status)


def log_message(level: int, file: str, line: int, message: str) -> None:
    _log.handle(_log.makeRecord(_log.name, _LEVELS[level], file, line, message, (), None))


def log_levels() -> int:
    """The enabled log levels: bit n stands for level n. INFO, WARNING and ERROR are filtered by the log itself."""
    return 0b1111 if _log.isEnabledFor(logging.DEBUG) else 0b0111


# --- requests and responses -------------------------------------------------------------------------------------------


def release_request(request: Request, flags: int, has_responses: bool) -> ResponseFactory | None:
    """has_responses: responses were created and not yet sent; the returned factory then creates them."""
    factory = request.response_factory() if has_responses else None
    try:
        request.release(ReleaseFlag(flags))
    except BaseException:
        if factory is not None:
            factory.close()
        raise
    return factory


def send_flags(factory: ResponseFactory, flags: int) -> None:
    factory.send_flags(_RESPONSE_FLAGS[flags & 1])


def send_response(
    maker: Request | ResponseFactory,
    outputs: Sequence[WireTensor],
    parameters: Mapping[str, ParameterValue],
    flags: int,
    failure: ErrorPair | None,
) -> None:
    """If an output's data does not match its shape, an error response is sent, so that the client gets an answer."""
    response = maker.new_response()
    error = None if failure is None else error_from(failure)
    if error is None:
        try:
            for name, datatype, shape, data in outputs:
                response.add_output(from_wire(name, datatype, shape, memoryview(data)))
        except TritonError as mismatch:
            error = mismatch.copy()
    for name, value in parameters.items():
        response.set_parameter(name, value)
    response.send(_RESPONSE_FLAGS[flags & 1], error)


def check_state(request: Request, name: str) -> None:
    request.new_state(Tensor(name, "UINT8", (0,), np.empty(0, np.uint8)))


def update_state(request: Request, name: str, datatype: str, shape: tuple[int, ...], data: Any) -> None:
    request.new_state(from_wire(name, datatype, shape, memoryview(data))).update()


# --- models and instances ---------------------------------------------------------------------------------------------


def model_config(model: Model | AgentModel) -> str:
    return orjson.dumps(config_to_json(model.config)).decode()


def set_model_config(model: Model, text: str) -> None:
    model.set_config(parse_json(text))


def report_memory_usage(subject: Model | ModelInstance, usage: Sequence[tuple[int, int, int]]) -> None:
    """usage: (TRITONSERVER_MemoryType number, device, bytes)"""
    subject.state.memory_usage = tuple(usage)


def report_response_statistics(
    instance: ModelInstance, factory: ResponseFactory, start: int, output_start: int, end: int, error: ErrorPair | None
) -> None:
    instance.report_response_statistics(factory, start, output_start, end, None if error is None else error_from(error))


# --- inferences on other models ---------------------------------------------------------------------------------------


def load_model(model: Model, name: str, parameters: Mapping[str, str | bytes]) -> None:
    model.load_model(name, parameters or None)


def infer_async(
    model: Model,
    delivery: object,
    name: str,
    version: int,
    request_id: str,
    inputs: Sequence[WireTensor],
    outputs: tuple[str, ...],
    parameters: Mapping[str, ParameterValue],
    correlation_id: int | str,
    flags: int,
    priority: int,
    timeout_us: int,
    trace: RequestTrace | None,
) -> InferenceHandle:
    request = InferenceRequest(
        model_name=name,
        model_version=version,
        id=request_id,
        inputs=tuple(RawTensor(*tensor) for tensor in inputs),
        requested_outputs=outputs,
        parameters=parameters,
        correlation_id=correlation_id,
        flags=RequestFlag(flags),
        priority=priority,
        timeout_us=timeout_us,
        trace=trace,
        tenant=model.state.tenant(),
    )
    deliveries = model.state.deliveries
    return model.infer_async(request, lambda response, final: deliveries.put(delivery, response, final))


def unpacked_response(response: InferenceResponse) -> tuple[Any, ...]:
    """The response in the form that `_triton_api.deliver` reads."""
    return (
        response.model_name,
        response.model_version,
        response.request_id,
        tuple((tensor.name, tensor.datatype, tensor.shape, wire_view(tensor)) for tensor in response.outputs),
        dict(response.parameters),
        None if response.error is None else pair_of(response.error),
    )


# --- models of repository agents --------------------------------------------------------------------------------------


def agent_location(model: AgentModel) -> str:
    return str(model.location)


def acquire_agent_location(model: AgentModel) -> str:
    return str(model.acquire_location())


def update_agent_location(model: AgentModel, location: str) -> None:
    model.update_location(Path(location))


# --- metrics ----------------------------------------------------------------------------------------------------------


def metric_family(kind: int, name: str, description: str) -> MetricFamily:
    if not family_makers:
        raise unavailable(f"metric family '{name}': no backend is loaded")
    return family_makers[-1](_METRIC_KINDS[kind], name, description, None)


def declare_metric(family: MetricFamily, labels: dict[str, str], buckets: Sequence[float]) -> None:
    with _metric_lock:
        family.declare(buckets or None, **labels)
        _metric_uses[family, frozenset(labels.items())] += 1


def remove_metric(family: MetricFamily, labels: dict[str, str]) -> None:
    key = family, frozenset(labels.items())
    with _metric_lock:
        _metric_uses[key] -= 1
        if not _metric_uses[key]:
            del _metric_uses[key]
            family.remove(**labels)


def metric_value(family: MetricFamily, labels: dict[str, str]) -> float:
    return family.value(**labels)


def change_metric(family: MetricFamily, labels: dict[str, str], action: str, value: float) -> None:
    getattr(family, action)(value, **labels)
