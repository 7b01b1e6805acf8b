"""Shared by the tests of the pytorch and onnxruntime backends: a host, requests, and answers as arrays."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmbackend.core.backend_api import ResponseFlag
from llmbackend.core.errors import TritonError
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import InferenceRequest, InferenceResponse
from llmbackend.core.server_options import ServerOptions
from llmbackend.core.tensors import Tensor

WAIT_S = 30.0
Array = npt.NDArray[Any]


@contextmanager
def serving(repository: Path, **options: Any) -> Iterator[InferenceServer]:
    server = InferenceServer(ServerOptions(model_repositories=[repository], model_control_mode="explicit", **options))
    server.start()
    try:
        yield server
    finally:
        assert server.stop(WAIT_S)


class Pending:
    """One request on its way."""

    def __init__(
        self,
        server: InferenceServer,
        model: str,
        inputs: Mapping[str, Array],
        outputs: tuple[str, ...] = (),
        **fields: Any,
    ) -> None:
        self._answers: queue.Queue[InferenceResponse | None] = queue.Queue()
        tensors = tuple(Tensor.of(name, array) for name, array in inputs.items())
        request = InferenceRequest(model, inputs=tensors, requested_outputs=outputs, **fields)
        server.infer_async(request, self._take)

    def _take(self, response: InferenceResponse | None, flags: ResponseFlag) -> None:
        assert flags & ResponseFlag.FINAL
        self._answers.put(response)

    def outputs(self) -> dict[str, Array]:
        """Raises the response's TritonError."""
        response = self._answers.get(timeout=WAIT_S)
        assert response is not None
        if response.error is not None:
            raise TritonError(response.error.message, response.error.code)
        return {tensor.name: tensor.data for tensor in response.outputs}


def begin(server: InferenceServer, model: str, *outputs: str, **inputs: Array) -> Pending:
    return Pending(server, model, inputs, outputs)


def infer(server: InferenceServer, model: str, *outputs: str, **inputs: Array) -> dict[str, Array]:
    return begin(server, model, *outputs, **inputs).outputs()


def texts(*values: str) -> Array:
    array = np.empty(len(values), np.object_)
    array[:] = [value.encode() for value in values]
    return array


def version_directory(repository: Path, model: str, config: str = "") -> Path:
    directory = repository / model / "1"
    directory.mkdir(parents=True)
    if config:
        (directory.parent / "config.pbtxt").write_text(config)
    return directory
