"""One instance of a PyTorch model: its own copy of the program, on its device.

For: backend.py. Does not know: how a batch is put together (array_instance.py does). Invariant: tensors share memory
with the request's arrays only where those may be written to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import torch

from llmbackend.core.backend_api import InstanceGroupKind, ModelInstance, internal

from ..array_instance import Array, ArrayInstance, Arrays
from .model_state import ModelState

_BF16 = np.dtype(ml_dtypes.bfloat16)


class InstanceState(ArrayInstance):
    def __init__(self, instance: ModelInstance, model_state: ModelState) -> None:
        super().__init__(instance)
        is_gpu = instance.kind is InstanceGroupKind.GPU
        self._device = f"cuda:{instance.device_id}" if is_gpu else "cpu"
        settings = model_state.settings
        if threads := settings.get("INTRA_OP_THREAD_COUNT"):
            torch.set_num_threads(threads)  # the whole process's, as in Triton
        self._program = model_state.new_program(self._device)
        self._inputs = model_state.arranged(self._program.arguments)
        self._output_names = model_state.outputs
        self._grad = torch.inference_mode if settings.get("INFERENCE_MODE", True) else torch.no_grad

    def compute(self, inputs: Arrays) -> Mapping[str, Array]:
        with self._grad():
            tensors = [to_torch(inputs[name], self._device) for name in self._inputs]
            outputs = self._program.run(tensors)
            if len(outputs) < len(self._output_names):
                raise internal(f"the program gave {len(outputs)} outputs, expected {len(self._output_names)}")
            return {name: to_numpy(output) for name, output in zip(self._output_names, outputs, strict=False)}


def to_torch(array: Array, device: str) -> Any:
    """A tensor; a list of str for an array of bytes, which TorchScript takes as List[str]."""
    if array.dtype == np.object_:
        return [bytes(item).decode() for item in array.ravel()]
    writable = array if array.flags.writeable else array.copy()
    if array.dtype == _BF16:
        return torch.from_numpy(writable.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(writable).to(device)


def to_numpy(output: Any) -> Array:
    if isinstance(output, list):
        texts = np.empty(len(output), np.object_)
        texts[:] = [str(item).encode() for item in output]
        return texts
    tensor = output.detach().cpu().contiguous()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(_BF16)  # type: ignore[no-any-return]
    return tensor.numpy()  # type: ignore[no-any-return]
