"""Model warmup: requests that an instance executes before its model is READY.

For: LoadedModel and InstanceThread. Does not know: schedulers, protocols, who waits for the load. Invariants: a sample
goes straight to Execute, on the instance's own thread; nothing of it is left when the model becomes READY; any error
fails the load. As in Triton, the requests count in the model's statistics, and random data is the same every time.
Source: ModelWarmup in Triton's model configuration, GenerateWarmupData and WarmUp in backend_model_instance.cc.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig, ModelWarmup

from llmbackend.core.backend_api import ResponseFlag
from llmbackend.core.errors import internal, invalid_argument, request_tag, unsupported
from llmbackend.core.messages import InferenceRequest, InferenceResponse
from llmbackend.core.requests.infer_request import InferRequest
from llmbackend.core.requests.reaper import Reaper
from llmbackend.core.requests.request_validation import RequestValidator, ValidRequest
from llmbackend.core.requests.response_channel import ResponseChannel
from llmbackend.core.statistics import Statistics
from llmbackend.core.tensors import DATATYPE_OF_CONFIG_TYPE, NUMPY_DTYPE, RawTensor, element_count, from_wire

if TYPE_CHECKING:
    from .model import LoadedModel
    from .model_instance import LoadedInstance

log = logging.getLogger(__name__)

FOLDER = "warmup"
HANDLES_GRACE_S = 5.0
"""How long a backend may hold on to a request after its last response before the load goes on."""
LENGTH_BYTES = 4
"""A string's length before its bytes; also what Triton takes for an element of no datatype."""
_NO_ID = request_tag("")
_SEED = 0


@dataclass(frozen=True, slots=True)
class WarmupSample:
    """`batch_size` requests of one element, together in one Execute, `count` times."""

    name: str
    batch_size: int
    count: int
    request: ValidRequest


def warmup_samples(config: ModelConfig, directory: Path, validator: RequestValidator) -> list[WarmupSample]:
    """The samples that the configuration asks for. Raises TritonError for one whose data can not be made."""
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
    """Inputs that the configuration does not name (a sequence's controls) are not checked, as in Triton."""
    known = {item.name for item in config.input}
    inputs = tuple(tensor for tensor in tensors if tensor.name in known)
    valid = validator.validate(InferenceRequest(config.name, _ignore, inputs=inputs))
    others = {
        tensor.name: from_wire(tensor.name, tensor.datatype, tensor.shape, tensor.raw)
        for tensor in tensors
        if tensor.name not in known
    }
    return ValidRequest({**valid.inputs, **others}, valid.requested_outputs, valid.batch_size)


def _ignore(response: InferenceResponse | None, flags: ResponseFlag) -> None:
    """The callback of a request that is only checked."""


def _tensor(config: ModelConfig, directory: Path, name: str, data: ModelWarmup.Input) -> RawTensor:
    shape = tuple(data.dims)
    if min(shape, default=1) < 0:
        raise invalid_argument(f"warmup setting expects all variable-size dimensions are specified for input '{name}'")
    datatype = DATATYPE_OF_CONFIG_TYPE.get(DataType.Name(data.data_type), "")
    batch = (1,) if config.max_batch_size > 0 else ()
    return RawTensor(name, datatype, (*batch, *shape), _raw(directory, name, datatype, shape, data))


def _raw(directory: Path, name: str, datatype: str, shape: tuple[int, ...], data: ModelWarmup.Input) -> bytes:
    """The tensor's bytes. Strings are empty whether zero or random data is asked for."""
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
    """A file may hold more than is needed, but not less; strings take all of it."""
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
    """A configuration may come from a client: the file that it names must lie in the folder."""
    try:
        path = (folder / filename).resolve()
        is_inside = path.is_relative_to(folder.resolve())
    except (OSError, ValueError):  # a loop of links; a NUL
        is_inside = False
    if not is_inside:
        raise unsupported(f"warmup data file {filename!r} is outside of the model's '{FOLDER}' directory")
    try:
        return path.read_bytes()
    except OSError as error:
        raise internal(f"failed to open text file for read {FOLDER}/{filename}: {error.strerror}") from None


def warm_up(samples: Sequence[WarmupSample], instance: LoadedInstance) -> None:
    """Executes every sample, to the end of all its requests. Raises TritonError INVALID_ARG for the first that fails.
    Call it on the instance's thread."""
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
    """The errors in the responses of one Execute."""
    pending = [_Pending(instance.model) for _ in range(sample.batch_size)]
    instance.execute([each.request(sample.request) for each in pending])
    for each in pending:
        each.answered.wait()
    deadline_s = time.monotonic() + HANDLES_GRACE_S
    if not all(each.released.wait(max(deadline_s - time.monotonic(), 0)) for each in pending):
        log.warning("model '%s' keeps handles of warmup sample '%s' after its response", each.name, sample.name)
    return [error for each in pending for error in each.errors]


class _Pending:
    """One warmup request: the callback, and the model as the owner of its channel, which hears of its end. (The model
    may serve requests meanwhile: an instance that is added is warmed up, too.)"""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self.errors: list[str] = []
        self.answered = threading.Event()
        self.released = threading.Event()

    def __call__(self, response: InferenceResponse | None, flags: ResponseFlag) -> None:
        if response is not None and response.error is not None:
            self.errors.append(response.error.message)
        if flags & ResponseFlag.FINAL:
            self.answered.set()

    def request(self, valid: ValidRequest) -> InferRequest:
        """As a scheduler would hand it out."""
        message = InferenceRequest(self.name, self, self.version)
        self._model.in_flight.enter()
        channel = ResponseChannel(message, self)
        self._model.live.add(channel)
        request = InferRequest(message, channel, valid.inputs, valid.requested_outputs, valid.batch_size)
        request.queue_start_ns = time.monotonic_ns()
        return request

    @property
    def name(self) -> str:
        return self._model.name

    @property
    def version(self) -> int:
        return self._model.version

    @property
    def reaper(self) -> Reaper:
        return self._model.reaper

    @property
    def statistics(self) -> Statistics:
        return self._model.statistics

    @property
    def may_block_in_send(self) -> bool:
        return False  # it has no observer

    def request_done(self, channel: ResponseChannel) -> None:
        self._model.request_done(channel)
        self.released.set()
