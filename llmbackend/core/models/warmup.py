"""Model warmup: requests that an instance executes on its own thread before its model becomes READY.

All warmup requests have ended when the model becomes READY; any error fails the load. Source: GenerateWarmupData and
WarmUp in Triton's backend_model_instance.cc.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig, ModelWarmup

from ..backend_api import ResponseFlag
from ..errors import internal, invalid_argument, request_tag, unsupported
from ..files import path_inside
from ..messages import InferenceRequest, InferenceResponse
from ..requests.queued_request import QueuedRequest
from ..requests.request_validation import RequestValidator, ValidRequest
from ..requests.response_channel import RequestObserver, ResponseChannel
from ..tensors import DATATYPE_OF_CONFIG_TYPE, NUMPY_DTYPE, RawTensor, element_count, from_wire
from .model_instance import InstanceOwner, LoadedInstance

log = logging.getLogger(__name__)

FOLDER = "warmup"
HANDLES_GRACE_S = 5.0
"""How long a backend may keep a request after its last response before the load continues."""
LENGTH_BYTES = 4
"""The length before a string's bytes; in Triton also the size of an element without a datatype."""
_NO_ID = request_tag("")
_SEED = 0
"""Random data is the same each time, as in Triton."""


@dataclass(frozen=True, slots=True)
class WarmupSample:
    """batch_size: single-row requests per Execute. count: number of executions."""

    name: str
    batch_size: int
    count: int
    request: ValidRequest


def warmup_samples(config: ModelConfig, directory: Path, validator: RequestValidator) -> list[WarmupSample]:
    """The samples in the configuration. Raises TritonError for invalid data."""
    samples = []
    for setting in config.model_warmup:
        if setting.batch_size == 0:
            log.debug("Skipping batch 0 warmup sample '%s'", setting.name)
            continue
        tensors = [_tensor(config, directory, name, data) for name, data in sorted(setting.inputs.items())]
        request = _valid(config, validator, tensors)
        samples.append(WarmupSample(setting.name, setting.batch_size, max(setting.count, 1), request))
    return samples


def _valid(config: ModelConfig, validator: RequestValidator, tensors: Sequence[RawTensor]) -> ValidRequest:
    """As in Triton, inputs that the configuration does not declare, such as sequence controls, are not checked."""
    known = {item.name for item in config.input}
    inputs = tuple(tensor for tensor in tensors if tensor.name in known)
    valid = validator.validate(InferenceRequest(config.name, inputs=inputs))
    others = {
        tensor.name: from_wire(tensor.name, tensor.datatype, tensor.shape, tensor.raw)
        for tensor in tensors
        if tensor.name not in known
    }
    return ValidRequest({**valid.inputs, **others}, valid.requested_outputs, valid.batch_size)


def _tensor(config: ModelConfig, directory: Path, name: str, data: ModelWarmup.Input) -> RawTensor:
    shape = tuple(data.dims)
    if min(shape, default=1) < 0:
        raise invalid_argument(f"warmup setting expects all variable-size dimensions are specified for input '{name}'")
    datatype = DATATYPE_OF_CONFIG_TYPE.get(DataType.Name(data.data_type), "")
    batch = (1,) if config.max_batch_size > 0 else ()
    return RawTensor(name, datatype, (*batch, *shape), _raw(directory, name, datatype, shape, data))


def _raw(directory: Path, name: str, datatype: str, shape: tuple[int, ...], data: ModelWarmup.Input) -> bytes:
    """The tensor's bytes. Strings are empty for both zero and random data."""
    item_bytes = NUMPY_DTYPE[datatype].itemsize if datatype in NUMPY_DTYPE and datatype != "BYTES" else LENGTH_BYTES
    byte_size = element_count(shape) * item_bytes
    source = data.WhichOneof("input_data_type")
    if source == "zero_data" or (source == "random_data" and datatype == "BYTES"):
        return bytes(byte_size)
    if source == "random_data":
        raw = np.random.default_rng(_SEED).bytes(byte_size)
        return np.bitwise_and(np.frombuffer(raw, np.uint8), 1).tobytes() if datatype == "BOOL" else raw
    if source == "input_data_file":
        return _file_data(directory, datatype, byte_size, data.input_data_file)
    raise invalid_argument(f"{_NO_ID}warmup setting expects input '{name}' to have input_data_type set")


def _file_data(directory: Path, datatype: str, byte_size: int, filename: str) -> bytes:
    """A file may be longer than the tensor, but not shorter. A string tensor takes the whole file."""
    raw = _read(directory / FOLDER, filename)
    if datatype == "BYTES":
        return raw
    if len(raw) < byte_size:
        raise invalid_argument(
            f"{_NO_ID}warmup setting expects {byte_size} bytes, but the data provided from {filename}only has "
            f"{len(raw)} bytes"  # without a space, as Triton prints it
        )
    return raw[:byte_size]


def _read(folder: Path, filename: str) -> bytes:
    path = path_inside(folder, filename)
    if path is None:
        raise unsupported(f"warmup data file {filename!r} is outside of the model's '{FOLDER}' directory")
    try:
        return path.read_bytes()
    except OSError as error:
        raise internal(f"failed to open text file for read {FOLDER}/{filename}: {error.strerror}") from None


def warm_up(samples: Sequence[WarmupSample], instance: LoadedInstance) -> None:
    """Executes all samples on the instance's thread and waits until their requests have ended. As in Triton, these
    requests count in the model's statistics. Raises TritonError INVALID_ARG for the first sample that fails."""
    for sample in samples:
        for iteration in range(sample.count):
            log.debug(
                "model '%s' instance %s is running warmup sample '%s' for iteration %d",
                instance.model.name,
                instance.name,
                sample.name,
                iteration + 1,
            )
            errors = _run(instance, sample)
            if errors:
                texts = "".join(f"{error}; " for error in errors)
                raise invalid_argument(f"failed to run warmup sample '{sample.name}': {texts}")


def _run(instance: LoadedInstance, sample: WarmupSample) -> list[str]:
    """Executes a sample once. Returns the errors in its responses."""
    pending = [_Pending() for _ in range(sample.batch_size)]
    instance.execute([_queued(instance.model, sample.request, each) for each in pending])
    for each in pending:
        each.answered.wait()
    deadline_s = time.monotonic() + HANDLES_GRACE_S
    if not all(each.released.wait(max(deadline_s - time.monotonic(), 0)) for each in pending):
        model = instance.model.name
        log.warning("model '%s' still holds handles of warmup sample '%s' after its response", model, sample.name)
    return [error for each in pending for error in each.errors]


class _Pending(RequestObserver):
    """The response callback and the observer of one warmup request."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.answered = threading.Event()
        self.released = threading.Event()

    def __call__(self, response: InferenceResponse | None, flags: ResponseFlag) -> None:
        if response is not None and response.error is not None:
            self.errors.append(response.error.message)
        if flags & ResponseFlag.FINAL:
            self.answered.set()

    def done(self) -> None:
        self.released.set()


def _queued(model: InstanceOwner, valid: ValidRequest, pending: _Pending) -> QueuedRequest:
    """A request in the form in which a scheduler passes it to an instance."""
    message = InferenceRequest(model.name, model.version)
    model.enter()
    channel = ResponseChannel(message, pending, model, pending)
    model.live_requests.add(channel)
    request = QueuedRequest(message, valid, channel)
    request.queue_start_ns = time.monotonic_ns()
    return request
