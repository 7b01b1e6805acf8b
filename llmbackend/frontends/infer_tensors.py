"""The inputs and requested outputs of an /infer request, read from its JSON.

For: infer_codec. Does not know: HTTP, regions of shared memory. Invariant: every raw byte of a request belongs to
exactly one input; each input has exactly one source of data, each requested output one place to go.
Source: KServe v2 inference protocol, Triton's extensions for binary data, shared memory, classification; texts as
recorded from Triton 2.51.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmbackend.core.errors import invalid_argument
from llmbackend.core.messages import RawTensor, SharedInput
from llmbackend.core.requests.request_bounds import MOST_TENSORS, check_count, check_dimensions
from llmbackend.core.tensors import NUMPY_DTYPE, Place, Tensor, check_size

from .json_reader import array_member, as_array, as_bool, as_object, as_unsigned, parsing, string_member
from .json_tensors import tensor_from_json
from .shared_memory_params import CLASSIFICATION, REGION, check_output_parameters, classes_from_json, place_from_json

_NONE: dict[str, Any] = {}
_ONE_SOURCE = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'. But "
)


class Inputs:
    """Reads the inputs in order, each taking its raw bytes off the front of what is left."""

    def __init__(self, model_name: str, raw: memoryview) -> None:
        self.sent: list[Tensor | RawTensor] = []
        self.shared: list[SharedInput] = []
        self._model_name = model_name
        self._raw = raw

    def read(self, items: list[Any]) -> None:
        """Into `sent` and `shared`. Raises TritonError naming the field that is wrong."""
        for item in items:
            self._add(item)
        if self._raw.nbytes:
            raise invalid_argument(f"unexpected additional input data for model '{self._model_name}'")

    def _add(self, item: Any) -> None:
        name = string_member(item, "name")
        datatype = string_member(item, "datatype")
        if datatype not in NUMPY_DTYPE:
            raise invalid_argument(f"invalid datatype for input {name}")
        dims = array_member(item, "shape")
        check_dimensions(name, dims)
        with parsing("shape"):
            shape = tuple(map(as_unsigned, dims))
        check_size(name, datatype, shape)
        parameters = _parameters_of(item)
        _check_one_source(item, parameters)
        if REGION in parameters:
            self.shared.append(SharedInput(name, datatype, shape, place_from_json(parameters)))
        elif "data" in item:
            with parsing("data"):
                as_array(item["data"])
            self.sent.append(tensor_from_json(name, datatype, shape, item["data"]))
        else:
            with parsing("binary_data_size"):
                size = as_unsigned(parameters["binary_data_size"])
            self.sent.append(RawTensor(name, datatype, shape, self._take(name, size)))

    def _take(self, name: str, size: int) -> memoryview:
        missing = size - self._raw.nbytes
        if missing > 0:
            raise invalid_argument(
                f"unexpected size for input '{name}', expecting {missing} additional bytes "
                f"for model '{self._model_name}'"
            )
        taken, self._raw = self._raw[:size], self._raw[size:]
        return taken


def _parameters_of(item: Any) -> Mapping[str, Any]:
    parameters = item.get("parameters", _NONE) if type(item) is dict else _NONE
    if type(parameters) is dict:
        return parameters
    with parsing("parameters"):
        return as_object(parameters)


def _check_one_source(item: Any, parameters: Mapping[str, Any]) -> None:
    if ("data" in item) + ("binary_data_size" in parameters) + (REGION in parameters) == 1:
        return
    sources = ["data"] if "data" in item else []
    sources += [key for key in ("binary_data_size", REGION) if key in parameters]
    if not sources:
        raise invalid_argument(_ONE_SOURCE + "no field is set")
    raise invalid_argument(_ONE_SOURCE + "set " + " ".join(f"'{source}'" for source in sources))


class RequestedOutputs:
    """What the client asks for, in its order: `binary` holds those asked for as binary (True) or as JSON (False)."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.binary: dict[str, bool] = {}
        self.places: dict[str, Place] = {}
        self.classes: dict[str, int] = {}

    @classmethod
    def read(cls, document: Any) -> RequestedOutputs:
        """Raises TritonError naming the field that is wrong."""
        with parsing("outputs"):
            items = as_array(document.get("outputs", []))
        check_count("requested outputs", items, MOST_TENSORS)
        outputs = cls()
        for item in items:
            outputs._add(item)
        return outputs

    def _add(self, item: Any) -> None:
        parameters = _parameters_of(item)
        check_output_parameters(parameters)
        name = string_member(item, "name")
        self.names.append(name)
        if CLASSIFICATION in parameters and (count := classes_from_json(parameters)):
            self.classes[name] = count
        if REGION in parameters:
            self.places[name] = place_from_json(parameters)
        elif "binary_data" in parameters:
            with parsing("binary_data"):
                self.binary[name] = as_bool(parameters["binary_data"])
