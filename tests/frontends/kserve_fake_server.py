"""An InferenceServer in memory, for protocol tests: models are functions, checks are those the protocols depend on.

Its four models are those of the recorded transcripts: `identity` (FP32 [-1,4]), `multi` (BYTES, INT32, optional BOOL; echoes what
it was sent), `llm` (decoupled; the words of text_input are commands) and `textid` (BYTES and its length).
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf import text_format
from prometheus_client import CollectorRegistry, Counter
from tritonclient.grpc.model_config_pb2 import ModelConfig
from tritonclient.grpc.service_pb2 import ModelStatistics

from llmbackend.core.backend_api import ResponseFlag
from llmbackend.core.errors import ErrorCode, TritonError, cancelled, internal, invalid_argument, not_found, request_tag
from llmbackend.core.messages import (
    InferenceRequest,
    InferenceResponse,
    ModelIndex,
    ModelMetadata,
    RawTensor,
    ServerMetadata,
    TensorMetadata,
)
from llmbackend.core.tensors import DATATYPE_OF_CONFIG_TYPE, NUMPY_DTYPE, Tensor, element_count

CONFIGS = {
    "identity": """max_batch_size: 8 backend: "python"
        input { name: "INPUT0" data_type: TYPE_FP32 dims: 4 } output { name: "OUTPUT0" data_type: TYPE_FP32 dims: 4 }""",
    "multi": """backend: "python" input { name: "S" data_type: TYPE_STRING dims: -1 }
        input { name: "I" data_type: TYPE_INT32 dims: [2, -1] }
        input { name: "B" data_type: TYPE_BOOL dims: 1 optional: true }
        output { name: "S" data_type: TYPE_STRING dims: -1 } output { name: "I" data_type: TYPE_INT32 dims: [2, -1] }
        output { name: "PARAMS" data_type: TYPE_STRING dims: 1 }""",
    "llm": """backend: "python" input { name: "text_input" data_type: TYPE_STRING dims: 1 }
        input { name: "stream" data_type: TYPE_BOOL dims: 1 optional: true }
        input { name: "max_tokens" data_type: TYPE_INT32 dims: 1 optional: true }
        output { name: "text_output" data_type: TYPE_STRING dims: -1 }
        model_transaction_policy { decoupled: true }""",
    "textid": """max_batch_size: 4 backend: "python" input { name: "text_input" data_type: TYPE_STRING dims: 1 }
        output { name: "text_output" data_type: TYPE_STRING dims: 1 } output { name: "n" data_type: TYPE_INT32 dims: 1 }""",
}


@dataclass
class FakeHandle:
    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        self.cancelled.set()


class FakeServer:
    """Loaded from the start: all models. `handles` holds every accepted request's handle, by id."""

    def __init__(self) -> None:
        self.metrics_registry = CollectorRegistry()
        self.requests_total = Counter("fake_requests", "Requests", registry=self.metrics_registry)
        self.handles: dict[str, FakeHandle] = {}
        self.loads: list[tuple[str, Mapping[str, str | bytes]]] = []
        self.unloads: list[tuple[str, bool]] = []
        self.is_exiting = False
        self.ready = True
        self._configs = {
            name: text_format.Parse(f'name: "{name}" {text}', ModelConfig()) for name, text in CONFIGS.items()
        }

    def is_live(self) -> bool:
        return True

    def is_ready(self) -> bool:
        return self.ready

    def model_is_ready(self, name: str, version: int = -1) -> bool:
        return name in self._configs and version in (-1, 1)

    def server_metadata(self) -> ServerMetadata:
        return ServerMetadata("triton", "2.51.0", ("parameters", "statistics"))

    def _config(self, name: str, version: int) -> ModelConfig:
        if name not in self._configs:
            raise not_found(f"Request for unknown model: '{name}' is not found")
        if version not in (-1, 1):
            raise not_found(f"Request for unknown model: '{name}' version {version} is not found")
        return self._configs[name]

    model_config = _config

    def model_metadata(self, name: str, version: int = -1) -> ModelMetadata:
        config = self._config(name, version)
        batch = (-1,) if config.max_batch_size else ()

        def tensors(items: Any) -> tuple[TensorMetadata, ...]:
            return tuple(TensorMetadata(item.name, _datatype(item), (*batch, *item.dims)) for item in items)

        return ModelMetadata(name, ("1",), config.backend, tensors(config.input), tensors(config.output))

    def model_statistics(self, name: str = "", version: int = -1) -> list[ModelStatistics]:
        if name and name not in self._configs:
            raise invalid_argument(f"requested model '{name}' is not available")
        row = ModelStatistics(name=name or "identity", version="1", inference_count=2, execution_count=1)
        row.inference_stats.success.count = 2
        row.batch_stats.add(batch_size=2).compute_infer.ns = 7
        row.response_stats["0"].success.ns = 5
        return [row]

    def repository_index(self, ready_only: bool = False) -> list[ModelIndex]:
        ready = [ModelIndex(name, "1", "READY") for name in self._configs]
        return ready if ready_only else [ModelIndex("bad"), *ready]

    def load_model(self, name: str, parameters: Mapping[str, str | bytes] | None = None) -> None:
        if name == "nosuch":
            raise internal(f"failed to load '{name}', failed to poll from model repository")
        self.loads.append((name, dict(parameters or {})))

    def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        self.unloads.append((name, unload_dependents))

    def infer_async(self, request: InferenceRequest) -> FakeHandle:
        config = self._config(request.model_name, request.model_version)
        inputs = _inputs(config, request)
        handle = FakeHandle()
        self.handles[request.id] = handle
        self.requests_total.inc()
        run = {"identity": _identity, "multi": _multi, "textid": _textid, "llm": _llm}[request.model_name]
        sender = Sender(request)
        threading.Thread(target=run, args=(request, inputs, sender, handle), daemon=True).start()
        return handle


def _datatype(item: Any) -> str:
    from tritonclient.grpc.model_config_pb2 import DataType

    return DATATYPE_OF_CONFIG_TYPE[DataType.Name(item.data_type)]


def _inputs(config: ModelConfig, request: InferenceRequest) -> dict[str, Tensor]:
    tag = request_tag(request.id)
    known = {item.name: item for item in config.input}
    given = list(request.inputs)
    if request.raw_input is not None:
        if len(request.raw_input) != 16:
            raise invalid_argument(
                f"{tag}input byte size mismatch for input 'raw_input' for model '{config.name}'. "
                f"Expected 16, got {len(request.raw_input)}"
            )
        given = [RawTensor("INPUT0", "FP32", (1, 4), request.raw_input)]
    missing = [item.name for item in config.input if not item.optional and item.name not in {t.name for t in given}]
    for tensor in given:
        if tensor.name not in known:
            raise invalid_argument(f"unexpected inference input '{tensor.name}' for model '{config.name}'")
        expected = _datatype(known[tensor.name])
        if tensor.datatype != expected:
            raise invalid_argument(
                f"{tag}inference input '{tensor.name}' data-type is '{tensor.datatype}', "
                f"but model '{config.name}' expects '{expected}'"
            )
    if missing:
        raise invalid_argument(f"{tag}missing required input(s) {missing}")
    return {tensor.name: _decoded(config, tag, tensor) for tensor in given}


def _decoded(config: ModelConfig, tag: str, tensor: Tensor | RawTensor) -> Tensor:
    if isinstance(tensor, Tensor):
        return tensor
    if tensor.datatype == "BYTES":
        items, rest = [], tensor.raw
        while rest:
            (length,) = struct.unpack("<I", rest[:4])
            items.append(rest[4 : 4 + length])
            rest = rest[4 + length :]
        data = np.empty(len(items), dtype=np.object_)
        data[:] = items
        return Tensor(tensor.name, "BYTES", tensor.shape, data.reshape(tensor.shape))
    dtype = NUMPY_DTYPE[tensor.datatype]
    expected = element_count(tensor.shape) * dtype.itemsize
    if len(tensor.raw) != expected:
        raise invalid_argument(
            f"{tag}input byte size mismatch for input '{tensor.name}' for model '{config.name}'. "
            f"Expected {expected}, got {len(tensor.raw)}"
        )
    array = np.frombuffer(tensor.raw, dtype=dtype).reshape(tensor.shape)
    return Tensor(tensor.name, tensor.datatype, tensor.shape, array)


class Sender:
    """Sends the responses of one request, only those outputs that were requested."""

    def __init__(self, request: InferenceRequest) -> None:
        self._request = request

    def send(self, *outputs: Tensor, error: TritonError | None = None, final: bool = False) -> None:
        wanted = self._request.requested_outputs
        kept = tuple(tensor for tensor in outputs if not wanted or tensor.name in wanted)
        response = InferenceResponse(self._request.model_name, 1, self._request.id, kept, error=error)
        self._request.response_callback(response, ResponseFlag.FINAL if final else ResponseFlag.NONE)

    def finish(self) -> None:
        self._request.response_callback(None, ResponseFlag.FINAL)


Inputs = dict[str, Tensor]
Run = Callable[[InferenceRequest, Inputs, Sender, FakeHandle], None]


def _identity(request: InferenceRequest, inputs: Inputs, sender: Sender, handle: FakeHandle) -> None:
    sender.send(Tensor.of("OUTPUT0", inputs["INPUT0"].data), final=True)


def _textid(request: InferenceRequest, inputs: Inputs, sender: Sender, handle: FakeHandle) -> None:
    text = inputs["text_input"].data
    word = text.ravel()[0]
    if b"slow" in word:
        handle.cancelled.wait(20)
        sender.send(error=cancelled("slow request ended"), final=True)
    elif b"fail" in word:
        sender.send(error=internal("model says no"), final=True)
    else:
        length = np.array([[len(word)]], dtype=np.int32).repeat(text.shape[0], 0)
        sender.send(Tensor.of("text_output", text), Tensor.of("n", length), final=True)


def _multi(request: InferenceRequest, inputs: Inputs, sender: Sender, handle: FakeHandle) -> None:
    info = {
        "params": dict(request.parameters),
        "id": request.id,
        "B": inputs["B"].data.tolist() if "B" in inputs else None,
        "corr": str(request.correlation_id),
        "priority": request.priority,
        "timeout": request.timeout_us,
        "flags": int(request.flags),
    }
    sender.send(inputs["S"], inputs["I"], Tensor.text("PARAMS", json.dumps(info)), final=True)


def _llm(request: InferenceRequest, inputs: Inputs, sender: Sender, handle: FakeHandle) -> None:
    words = inputs["text_input"].data.ravel()[0].decode().split()
    option = dict((word.split("=") + ["1"])[:2] for word in words)
    if "preerr" in option:
        sender.send(error=invalid_argument("early failure"), final=True)
        return
    if "params" in option:
        stream = inputs["stream"].data.tolist() if "stream" in inputs else None
        tokens = inputs["max_tokens"].data.tolist() if "max_tokens" in inputs else None
        info = {"params": dict(request.parameters), "id": request.id, "stream": stream, "max_tokens": tokens}
        sender.send(Tensor.text("text_output", json.dumps(info)), final=True)
        return
    count, pause_s = int(option.get("n", 3)), float(option.get("sleep", 0)) / 1000
    for index in range(count):
        if handle.cancelled.wait(pause_s):
            sender.send(error=cancelled("Client requested to stop"), final=True)
            return
        last = "lastfinal" in option and index == count - 1
        if index == int(option.get("err", -1)):
            ends = "cont" not in option
            sender.send(error=TritonError(f"boom at {index}", ErrorCode[option.get("code", "INTERNAL")]), final=ends)
            if ends:
                return
            continue
        sender.send(Tensor.text("text_output", f" tok{index}"), final=last)
        if last:
            return
    sender.finish()
