"""One instance of an ONNX model: a session of its own.

For: backend.py. Does not know: how a batch is put together (array_instance.py does). Invariant: only the outputs that
the configuration names are computed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llmbackend.core.backend_api import ModelInstance

from ..array_instance import Array, ArrayInstance, Arrays
from ..sequence_tensors import output_names
from .model_state import ModelState


class InstanceState(ArrayInstance):
    def __init__(self, instance: ModelInstance, model_state: ModelState) -> None:
        super().__init__(instance)
        self._session = model_state.new_session(instance)
        self._names = output_names(instance.model.config)

    def compute(self, inputs: Arrays) -> Mapping[str, Array]:
        feed = {name: _texts(array) if array.dtype == np.object_ else array for name, array in inputs.items()}
        outputs = self._session.run(self._names, feed)
        return dict(zip(self._names, map(_bytes, outputs), strict=True))


def _texts(array: Array) -> Array:
    texts = np.empty(array.size, np.object_)
    texts[:] = [bytes(item).decode() for item in array.ravel()]
    return texts.reshape(array.shape)


def _bytes(array: Array) -> Array:
    if array.dtype != np.object_:
        return array
    items = np.empty(array.size, np.object_)
    items[:] = [str(item).encode() for item in array.ravel()]
    return items.reshape(array.shape)
