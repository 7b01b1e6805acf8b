"""A real host with one `llm` model: the mock engine and byte text, so that every test takes milliseconds."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from llmbackend.core.backend_api import NO_TENANT, ResponseFlag, Tenant, Tensor, TritonError
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import InferenceHandle, InferenceRequest, InferenceResponse, Resume
from llmbackend.core.server_options import ServerOptions

MODEL = "mock_llm"
ENGINE: dict[str, Any] = {
    "model": "mock",
    "transport": "inline",
    "max_model_len": 256,
    "block_size": 8,
    "num_kv_blocks": 256,
}


class Call:
    """One inference: its responses, until FINAL."""

    def __init__(self) -> None:
        self.responses: list[InferenceResponse] = []
        self.num_finals = 0
        self.first = threading.Event()
        self.on_final: Callable[[], None] | None = None
        self._done = threading.Event()
        self.handle: InferenceHandle

    def on_response(self, response: InferenceResponse | None, flags: ResponseFlag) -> None:
        if response is not None:
            self.responses.append(response)
        if flags & ResponseFlag.FINAL:
            self.num_finals += 1
            if self.on_final is not None:
                self.on_final()
            self._done.set()
        self.first.set()

    def wait(self) -> Call:
        assert self._done.wait(60), "no FINAL response"
        return self

    @property
    def error(self) -> TritonError | None:
        return self.responses[-1].error

    @property
    def text(self) -> str:
        return "".join(one.decode() for one in self.all("text_output"))

    def all(self, name: str) -> list[Any]:
        """Every element of an output, over all responses."""
        found: list[Any] = []
        for response in self.responses:
            assert response.error is None, response.error.message
            found += [item for tensor in response.outputs if tensor.name == name for item in tensor.data.tolist()]
        return found

    @property
    def output_names(self) -> list[set[str]]:
        return [{tensor.name for tensor in response.outputs} for response in self.responses]


class LlmHost:
    def __init__(self, server: InferenceServer) -> None:
        self.server = server

    def start(
        self,
        parameters: dict[str, Any] | None = None,
        outputs: tuple[str, ...] = (),
        sampling: dict[str, Any] | None = None,
        on_final: Callable[[], None] | None = None,
        timeout_us: int = 0,
        priority: int = 0,
        tenant: Tenant = NO_TENANT,
        resume: Resume | None = None,
        **inputs: Any,
    ) -> Call:
        """Sends a request; `sampling` goes into the sampling_parameters tensor."""
        if sampling is not None:
            inputs["sampling_parameters"] = json.dumps(sampling)
        tensors = tuple(tensor(name, value) for name, value in inputs.items())
        call = Call()
        call.on_final = on_final
        call.handle = self.server.infer_async(
            InferenceRequest(
                MODEL,
                id="7",
                inputs=tensors,
                requested_outputs=outputs,
                parameters=parameters or {},
                timeout_us=timeout_us,
                priority=priority,
                tenant=tenant,
                resume=resume,
            ),
            call.on_response,
        )
        return call

    def start_tensors(
        self,
        inputs: tuple[Tensor, ...],
        request_id: str = "",
        outputs: tuple[str, ...] = (),
        tenant: Tenant = NO_TENANT,
        resume: Resume | None = None,
    ) -> Call:
        """Sends a request with these very tensors."""
        call = Call()
        request = InferenceRequest(
            MODEL, id=request_id, inputs=inputs, requested_outputs=outputs, tenant=tenant, resume=resume
        )
        call.handle = self.server.infer_async(request, call.on_response)
        return call

    def infer(self, *args: Any, **inputs: Any) -> Call:
        return self.start(*args, **inputs).wait()

    def metric(self, name: str, **labels: str) -> float | None:
        labels = {"model": MODEL, "version": "1", **labels}
        if name.startswith("vllm:"):
            labels = {"model_name": MODEL, "engine": "0", **labels}
        return self.server.metrics_registry.get_sample_value(name, labels)


def tensor(name: str, value: Any) -> Tensor:
    """Text, one flag, or integers."""
    if isinstance(value, str | bytes):
        return Tensor.text(name, value)
    if isinstance(value, bool):
        return Tensor.of(name, np.array([value], np.bool_))
    return Tensor.of(name, np.array(value, np.int32))


def write_model(repository: Path, pbtxt: str = "", backend: str = "llm", **engine: Any) -> None:
    version = repository / MODEL / "1"
    version.mkdir(parents=True)
    (version / "model.json").write_text(json.dumps({**ENGINE, **engine}))
    (version.parent / "config.pbtxt").write_text(f'backend: "{backend}"\n{pbtxt}')


@contextmanager
def llm_host(repository: Path, pbtxt: str = "", backend: str = "llm", **engine: Any) -> Iterator[LlmHost]:
    """A started server with one mock model; stopped, and found clean, at the end."""
    write_model(repository, pbtxt, backend, **engine)
    server = InferenceServer(ServerOptions(model_repositories=(repository,), model_control_mode="none"))
    server.start()
    try:
        yield LlmHost(server)
    finally:
        assert server.stop(20)
