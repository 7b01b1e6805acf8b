"""The data flow of an ensemble: which step reads and writes which tensor, the steps' requests, and their limits.

Source: EnsembleInfo, the pruning and ReshapeTensorDims in Triton's ensemble_scheduler.cc.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tritonclient.grpc.model_config_pb2 import ModelConfig

from ...backend_api import ResponseFlag
from ...errors import TritonError, internal
from ...messages import InferenceHandle, InferenceResponse, RequestFlag
from ...metrics.model_metrics import PhaseTimes
from ...requests.response_channel import ActionThread, RequestObserver
from ...tensors import Tensor, reshaped

ModelKey = tuple[str, int]
"""Name and version of a composing model; version -1 = the highest READY one."""
Origin = tuple[int, ...]
"""The index of the response of each decoupled step that a value comes from, the first step first; () = the request
itself. The order of origins is that of responses if steps took no time."""
SequenceTag = tuple[int | str, RequestFlag]
"""Correlation id and flags of the tensors that a step wrote."""


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    """One step of the configuration.

    index: its position in the configuration
    inputs, outputs: the model's tensor names → the ensemble's
    """

    index: int
    model: ModelKey
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Flow:
    """The steps needed for the given outputs.

    readers: the steps that read each tensor
    uses: how often each value of a tensor is taken, by steps and by the response

    Deliberate difference from Triton: steps whose outputs were not requested are included if another step reads them.
    """

    readers: Mapping[str, tuple[EnsembleStep, ...]]
    uses: Mapping[str, int]


class EnsembleGraph:
    def __init__(self, config: ModelConfig) -> None:
        scheduling = config.ensemble_scheduling
        self.name = config.name
        self.is_decoupled = config.model_transaction_policy.decoupled
        self.max_inflight_requests = scheduling.max_inflight_requests
        self.optional_inputs = tuple(tensor.name for tensor in config.input if tensor.optional)
        self.output_dims = {
            tensor.name: tuple(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims)
            for tensor in config.output
        }
        self.steps = tuple(
            EnsembleStep(
                index,
                (step.model_name, step.model_version),
                dict(sorted(step.input_map.items())),
                dict(sorted(step.output_map.items())),
            )
            for index, step in enumerate(scheduling.step)
        )
        self.models = tuple(dict.fromkeys(step.model for step in self.steps))
        self._writer = {tensor: step for step in self.steps for tensor in step.outputs.values()}
        self._whole = self._flow(self.output_dims)

    def flow(self, requested: Iterable[str]) -> Flow:
        names = frozenset(requested)
        return self._whole if names == self.output_dims.keys() else self._flow(names)

    def _flow(self, requested: Iterable[str]) -> Flow:
        needed: dict[int, EnsembleStep] = {}
        wanted = list(requested)
        uses = Counter(wanted)
        while wanted:
            step = self._writer.get(wanted.pop())
            if step is not None and step.index not in needed:
                needed[step.index] = step
                wanted.extend(step.inputs.values())
        readers: dict[str, tuple[EnsembleStep, ...]] = {}
        for _, step in sorted(needed.items()):
            for tensor in set(step.inputs.values()):
                readers[tensor] = (*readers.get(tensor, ()), step)
                uses[tensor] += 1
        return Flow(readers, uses)


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """The shapes of a composing model. input_dims: without the batch dimension; -1 = any size."""

    is_batching: bool
    is_decoupled: bool
    input_dims: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, config: ModelConfig) -> ModelShapes:
        dims = {tensor.name: tuple(tensor.dims) for tensor in config.input}
        return cls(config.max_batch_size > 0, config.model_transaction_policy.decoupled, dims)


def dims_compatible(some: Sequence[int], others: Sequence[int]) -> bool:
    """Whether the two are compatible; -1 = any size. Source: CompareDimsWithWildcard."""
    return len(some) == len(others) and all(
        one == other or -1 in (one, other) for one, other in zip(some, others, strict=True)
    )


def as_step_input(tensor: Tensor, name: str, batch_size: int, dims: Sequence[int], is_batching: bool) -> Tensor:
    """`tensor` as input `name` of another model, with `dims`. batch_size: that of its request; 0 = not batched."""
    shape = tensor.shape
    if is_batching and not batch_size and dims_compatible(dims, shape):
        shape = (1, *shape)
    elif not is_batching and batch_size == 1 and not dims_compatible(dims, shape):
        shape = shape[1:]
    data = tensor.data if shape == tensor.shape else reshaped(name, tensor.data, shape)
    return Tensor(name, tensor.datatype, shape, data)


log = logging.getLogger(__name__)

MAX_WAIT_S = 300.0
"""A blocked backend continues after this time, in case it is waiting for itself (Triton's kMutexTimeoutSeconds)."""


class StepOwner(Protocol):
    """An EnsembleRun as seen by its step requests. Thread-safe."""

    def send(self, step_request: StepRequest) -> InferenceHandle:
        """Sends the request to its model. Raises TritonError if it is refused, or no longer wanted."""

    def refused(self, step_request: StepRequest, error: TritonError) -> None:
        """Called when `send` has raised `error`."""

    def responded(self, step_request: StepRequest, response: InferenceResponse | None, flags: ResponseFlag) -> None: ...
    def apply_backpressure(self, step_request: StepRequest) -> None:
        """Blocks the thread of the step's backend while later steps are at their limit."""

    def wants(self, step_request: StepRequest) -> bool:
        """Whether further responses of the request can contribute to the ensemble's response."""

    def add_times(self, times: PhaseTimes) -> None: ...
    def step_gone(self) -> None: ...


class StepRequest(RequestObserver):
    """One request of an ensemble to a composing model; also its response callback and observer. Mutable attributes are
    guarded by the run's lock.

    is_over: its last response has arrived
    batch_size: that of its inputs; 0 = not batched
    waiting_bytes: memory of its inputs while it waits for a slot
    """

    def __init__(
        self,
        run: StepOwner,
        step: EnsembleStep,
        is_decoupled: bool,
        origin: Origin,
        inputs: tuple[Tensor, ...],
        batch_size: int,
        sequence: SequenceTag,
    ) -> None:
        self.step = step
        self.is_decoupled = is_decoupled
        self.response_count = 0
        self.is_over = False
        self.inputs = inputs
        self.batch_size = batch_size
        self.sequence = sequence
        self.waiting_bytes = 0
        self._origin = origin
        self._run = run
        self._handle: InferenceHandle | None = None
        self._is_gone = False

    @property
    def is_of_stream(self) -> bool:
        """Whether it was caused by a response of a decoupled step; the number of such requests is unlimited."""
        return bool(self._origin)

    @property
    def next_origin(self) -> Origin:
        """The origin of its next response."""
        return (*self._origin, self.response_count) if self.is_decoupled else self._origin

    def start(self) -> None:
        """Sends the request to its model, or reports the error to the run. Never raises."""
        try:
            self._handle = self._run.send(self)
        except TritonError as error:
            self._run.refused(self, error)
        except Exception as error:
            log.exception("a step of an ensemble could not be sent to model '%s'", self.step.model[0])
            self._run.refused(self, internal(f"{type(error).__name__}: {error}"))
        else:
            self.inputs = ()
            if not self._run.wants(self):
                self.cancel()  # stopped before it had a handle
            if self._is_gone:
                self._handle = None

    def cancel(self) -> None:
        handle = self._handle
        if handle is not None:
            handle.cancel()

    def __call__(self, response: InferenceResponse | None, flags: ResponseFlag) -> None:
        self._run.responded(self, response, flags)

    def apply_backpressure(self) -> None:
        self._run.apply_backpressure(self)

    def computed(self, times: PhaseTimes) -> None:
        self._run.add_times(times)

    def done(self) -> None:
        self._is_gone = True
        self._handle = None  # breaks a reference cycle
        self._run.step_gone()


class StepLimit:
    """Limits the running requests of one step, over all requests of the ensemble (`max_inflight_requests`).

    A backend that may be blocked waits in `wait_for_slot` while a request of the step waits for a slot, so at most one
    response per thread of such a backend is queued; the run bounds the responses of other backends. Deliberate
    difference: Triton's limiter blocks all callers, including frontends, and preserves no order.
    """

    def __init__(self, max_running: int, subject: str) -> None:
        self._max_running = max_running
        self._subject = subject
        self._changed = threading.Condition(threading.Lock())
        self._num_running = 0
        self._waiting: OrderedDict[StepRequest, None] = OrderedDict()
        self._is_starting = False

    def __len__(self) -> int:
        return self._num_running + len(self._waiting)

    def add(self, step_request: StepRequest) -> None:
        """Adds a request to the waiting ones. `start_waiting` must follow, while no lock is held."""
        with self._changed:
            self._waiting[step_request] = None

    def finished(self) -> None:
        """Called when a started request is over. `start_waiting` must follow, while no lock is held."""
        with self._changed:
            self._num_running -= 1
            self._changed.notify_all()

    def discard(self, step_request: StepRequest) -> bool:
        """Returns whether the request was still waiting and will now not be started."""
        with self._changed:
            if step_request not in self._waiting:
                return False
            del self._waiting[step_request]
            self._changed.notify_all()
            return True

    def wait_for_slot(self, is_pointless: Callable[[], bool]) -> None:
        """Blocks until a request could start immediately, or until waiting is pointless (rechecked after `wake`)."""
        with self._changed:
            if not self._changed.wait_for(lambda: is_pointless() or len(self) < self._max_running, MAX_WAIT_S):
                log.error(
                    "%s unable to schedule (inflight: %d >= limit: %d) for %d seconds. Proceeding to avoid deadlock.",
                    self._subject,
                    len(self),
                    self._max_running,
                    MAX_WAIT_S,
                )

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def start_waiting(self) -> None:
        """Starts requests while there are free slots. Only one thread at a time does so; a request that ends within
        `start` frees its slot there."""
        with self._changed:
            if self._is_starting:
                return
            self._is_starting = True
        while True:
            with self._changed:
                if not self._waiting or self._num_running >= self._max_running:
                    self._is_starting = False
                    return
                step_request, _ = self._waiting.popitem(last=False)
                self._num_running += 1
            step_request.start()


class StepLauncher(ActionThread):
    """The thread on which an ensemble starts and stops steps in reaction to another step's response (a response
    callback must only enqueue). Started by the first action."""

    def __init__(self, name: str) -> None:
        super().__init__(f"ensemble-{name}", f"a step of ensemble '{name}' could not be started")
        self._lock = threading.Lock()
        self._is_stopped = False

    def submit(self, action: Callable[[], None]) -> None:
        """Never blocks. Thread-safe. After `stop` no step is left, and the action is dropped."""
        with self._lock:
            if not self._is_stopped:
                super().submit(action)
                self.start()

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True
        super().stop()
