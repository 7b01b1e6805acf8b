"""The control inputs: how a model is told that a sequence starts, goes on, ends, is not there, and which one it is.

For: the sequence batcher, which adds them to a request's inputs right before an instance gets it. Does not know:
sequences, batches. Invariants: the shape is [1], [1, 1] for a model that batches; the configuration was validated
(sequence_rules).
Source: CreateBooleanControlTensors and SetControlTensors of Triton's sequence batcher. By design different: Triton
copies a string id into the bytes of an integer control, beyond its end if need be; here an id that does not fit
becomes a hash, so that two sequences do not look like one. A number for a string control becomes its decimal text.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig, ModelSequenceBatching

from llmbackend.core.backend_api import RequestFlag
from llmbackend.core.tensors import DATATYPE_OF_CONFIG_TYPE, NUMPY_DTYPE, Tensor

_Control = ModelSequenceBatching.Control
_FLAG_VALUES = 4  # START, END, both, neither
_LENGTH_BYTES = 4  # before the characters of a string, as on the wire


@dataclass(frozen=True, slots=True)
class _Boolean:
    kind: int
    false: Tensor
    true: Tensor


class SequenceControls:
    """The control inputs of one model. Those that depend on the flags alone are made once."""

    def __init__(self, config: ModelConfig) -> None:
        self._shape = (1, 1) if config.max_batch_size else (1,)
        self._correlation_id: tuple[str, str] | None = None
        booleans: list[_Boolean] = []
        for item in config.sequence_batching.control_input:
            for control in item.control:
                if control.kind == _Control.CONTROL_SEQUENCE_CORRID:
                    self._correlation_id = (item.name, DATATYPE_OF_CONFIG_TYPE[DataType.Name(control.data_type)])
                else:
                    booleans.append(self._boolean(item.name, control))
        self._by_flags = [_of_flags(booleans, flags) for flags in range(_FLAG_VALUES)]
        self._not_ready = {control.false.name: control.false for control in booleans}

    def inputs(self, flags: RequestFlag, correlation_id: int | str) -> dict[str, Tensor]:
        """For a request with these flags and that id."""
        return {**self._by_flags[int(flags) % _FLAG_VALUES], **self._id_input(correlation_id)}

    def not_ready(self) -> dict[str, Tensor]:
        """For a slot without a request: everything is false, the id 0 or empty."""
        return {**self._not_ready, **self._id_input("")}

    def _boolean(self, name: str, control: Any) -> _Boolean:
        for values, dtype in (
            (control.int32_false_true, np.int32),
            (control.fp32_false_true, np.float32),
            (control.bool_false_true, np.bool_),
        ):
            if values:
                false, true = (self._tensor(name, np.array([value], dtype)) for value in values)
                return _Boolean(control.kind, false, true)
        raise AssertionError("a control that was not validated")

    def _id_input(self, correlation_id: int | str) -> dict[str, Tensor]:
        if self._correlation_id is None:
            return {}
        name, datatype = self._correlation_id
        if datatype == "BYTES":
            data = np.empty(1, dtype=np.object_)
            data[0] = str(correlation_id).encode()
        else:
            dtype = NUMPY_DTYPE[datatype]
            data = np.frombuffer(_id_bytes(correlation_id, dtype.itemsize), dtype=dtype)
        return {name: Tensor(name, datatype, self._shape, data.reshape(self._shape))}

    def _tensor(self, name: str, data: npt.NDArray[Any]) -> Tensor:
        made = Tensor.of(name, data.reshape(self._shape))
        made.data.flags.writeable = False  # shared by all requests
        return made


def _of_flags(booleans: list[_Boolean], flags: int) -> dict[str, Tensor]:
    """READY is true for every request."""
    true_kinds = {_Control.CONTROL_SEQUENCE_READY}
    true_kinds |= {_Control.CONTROL_SEQUENCE_START} if flags & RequestFlag.SEQUENCE_START else set()
    true_kinds |= {_Control.CONTROL_SEQUENCE_END} if flags & RequestFlag.SEQUENCE_END else set()
    tensors = [control.true if control.kind in true_kinds else control.false for control in booleans]
    return {tensor.name: tensor for tensor in tensors}


def _id_bytes(correlation_id: int | str, size: int) -> bytes:
    if isinstance(correlation_id, int):
        return correlation_id.to_bytes(8, "little")[:size]
    text = correlation_id.encode()
    if not text:
        return bytes(size)
    if _LENGTH_BYTES + len(text) <= size:
        return (len(text).to_bytes(_LENGTH_BYTES, "little") + text).ljust(size, b"\0")
    return hashlib.blake2b(text, digest_size=size).digest()
