"""`reshape` of inputs and outputs: clients and models see different shapes of the same data."""

from __future__ import annotations

import numpy as np
import pytest

from llmbackend.core.errors import TritonError
from llmbackend.core.tensors import RawTensor, Tensor
from tests.helpers.core_host import Repository, send, serving

# Answers with the shape that it saw and, in that shape, its input; `RESHAPE_OUT` is another shape for the answer.
SHAPE_BACKEND = """
import numpy as np
from llmbackend.core.backend_api import ResponseFlag, Tensor

def TRITONBACKEND_ModelInstanceExecute(instance, requests):
    for request in requests:
        data = request.inputs["X"].data
        response = request.new_response()
        response.set_parameter("saw", str(data.shape))
        flat = request.parameters.get("flat", False)
        response.add_output(Tensor.of("Y", data.reshape(-1) if flat else data))
        response.send(ResponseFlag.FINAL)
        request.release()
"""


def io(dims: str, reshape: str, max_batch_size: int = 0) -> str:
    return f"""max_batch_size: {max_batch_size}
    input {{ name: "X" data_type: TYPE_FP32 dims: [{dims}] reshape {{ shape: [{reshape}] }} }}
    output {{ name: "Y" data_type: TYPE_FP32 dims: [{dims}] reshape {{ shape: [{reshape}] }} }}"""


@pytest.mark.parametrize(
    ("dims", "reshape", "batch", "shape", "seen"),
    [
        ("4", "2, 2", 0, (4,), (2, 2)),
        ("4", "2, 2", 8, (3, 4), (3, 2, 2)),
        ("1", "", 8, (3, 1), (3,)),
        ("2, 4, -1, 6", "8, -1, 1, 6", 0, (2, 4, 5, 6), (8, 5, 1, 6)),
        ("-1, 2, -1", "-1, 1, 2, -1", 8, (2, 3, 2, 0), (2, 3, 1, 2, 0)),
    ],
)
def test_the_model_sees_the_reshape_and_the_client_its_own_shape(
    repository: Repository, dims: str, reshape: str, batch: int, shape: tuple[int, ...], seen: tuple[int, ...]
) -> None:
    repository.backend("shapes", SHAPE_BACKEND)
    repository.model("m", "shapes", io=io(dims, reshape, batch))
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    with serving(repository, "m") as server:
        assert [*server.model_metadata("m").inputs[0].shape][-len(dims.split(",")) :] == list(map(int, dims.split(",")))
        for given in (Tensor.of("X", values), RawTensor("X", "FP32", shape, values.tobytes())):
            (response,) = send(server, "m", given).responses()
            assert response.parameters["saw"] == str(seen)
            (output,) = response.outputs
            assert output.shape == shape and np.array_equal(output.data, values)


def test_an_output_of_another_shape_than_configured_is_an_error(repository: Repository) -> None:
    repository.backend("shapes", SHAPE_BACKEND)
    repository.model("m", "shapes", io=io("4", "2, 2"))
    with serving(repository, "m") as server:
        error = send(server, "m", Tensor.of("X", np.zeros(4, np.float32)), parameters={"flat": True}).error()
        assert error.message == "an output of model 'm' cannot be reshaped: expected 2 dimensions, got 1"
        assert send(server, "m", Tensor.of("X", np.zeros(4, np.float32))).responses()[0].error is None


@pytest.mark.parametrize(
    ("dims", "reshape", "batch", "text"),
    [
        ("4", "3", 0, "has different size for dims and reshape"),
        ("-1", "2, 2", 0, "has different size for dims and reshape"),
        ("2, -1, 3", "3, -1, 2", 0, "has different size for dims and reshape"),
        ("-1, -1", "-1", 0, "has different number of variable-size dimensions for dims and reshape"),
        ("4", "0, 4", 0, "reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension"),
        ("1", "", 0, "cannot have empty reshape for non-batching model as scalar tensors are not supported"),
    ],
)
def test_a_reshape_that_changes_the_data_is_refused_at_load(
    repository: Repository, dims: str, reshape: str, batch: int, text: str
) -> None:
    repository.backend("shapes", SHAPE_BACKEND)
    repository.model("m", "shapes", io=io(dims, reshape, batch))
    with serving(repository) as server, pytest.raises(TritonError, match=f"model input 'X' {text} for m;"):
        server.load_model("m")
