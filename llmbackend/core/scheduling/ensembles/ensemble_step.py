"""One request of an ensemble to one of its composing models.

For: EnsembleRun. Does not know: the flow. Invariant: whatever happens to it, the run is told once that it had its last
response (or was refused), and then that it is gone.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from llmbackend.core.backend_api import ResponseFlag
from llmbackend.core.errors import TritonError, internal
from llmbackend.core.messages import InferenceHandle, InferenceRequest, InferenceResponse
from llmbackend.core.statistics import PhaseTimes
from llmbackend.core.tensors import Tensor

from .ensemble_graph import EnsembleStep
from .ensemble_shapes import ModelShapes
from .ensemble_values import Origin, SequenceTag

if TYPE_CHECKING:
    from llmbackend.core.models.model import LoadedModel

    from .ensemble_run import EnsembleRun

log = logging.getLogger(__name__)


class ComposingModel:
    """A model version that an ensemble's request keeps from being finalised until `leave`."""

    def __init__(self, model: LoadedModel, shapes: ModelShapes) -> None:
        self._model = model
        self.shapes = shapes

    def infer(self, message: InferenceRequest) -> InferenceHandle:
        """Raises TritonError when refused."""
        self._model.in_flight.enter()  # also while it is being unloaded: it drains until `leave`
        return self._model.infer(message)

    def leave(self) -> None:
        self._model.leave()


class StepRequest:
    """The request's response callback, its observer, and its handle. `batch_size` 0 = not batched. What the run notes
    here is guarded by the run's lock."""

    def __init__(
        self,
        run: EnsembleRun,
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
        self.is_over = False  # its last response came
        self.inputs = inputs
        self.batch_size = batch_size
        self.sequence = sequence
        self.waiting_bytes = 0  # what it holds while it waits for a slot
        self._origin = origin
        self._run = run
        self._handle: InferenceHandle | None = None
        self._is_gone = False

    @property
    def is_of_stream(self) -> bool:
        """Whether a decoupled step brought it about, which may bring about any number of them."""
        return bool(self._origin)

    @property
    def next_origin(self) -> Origin:
        """That of the next response, and the earliest that what is still to come can have."""
        return (*self._origin, self.response_count) if self.is_decoupled else self._origin

    def start(self) -> None:
        """Sends it to its model, or tells the run why not. Never raises."""
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
                self.cancel()  # it was stopped before it had a handle
            if self._is_gone:
                self._handle = None

    def cancel(self) -> None:
        handle = self._handle
        if handle is not None:
            handle.cancel()

    def __call__(self, response: InferenceResponse | None, flags: ResponseFlag) -> None:
        self._run.responded(self, response, flags)

    def make_room(self) -> None:
        self._run.make_room(self)

    def computed(self, times: PhaseTimes) -> None:
        self._run.add_times(times)

    def done(self) -> None:
        self._is_gone = True
        self._handle = None  # it holds this object
        self._run.step_gone()
