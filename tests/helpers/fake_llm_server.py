"""A host with one language model in memory, for tests of frontends: the LLM tensor interface without core and adapter.

Deterministic: a token is a character, and the answer is "You said: " followed by the client's last message. Words in
the prompt trigger problems: "too long", "overloaded", "fail late", "forever", "flood", "silent". One thread per request
sends the responses, like an engine.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
from prometheus_client.samples import Sample

from llmbackend.core.backend_api import ResponseFlag
from llmbackend.core.errors import TritonError, cancelled, internal, invalid_argument, not_found, unavailable
from llmbackend.core.messages import (
    InferenceRequest,
    InferenceResponse,
    ModelIndex,
    ModelMetadata,
    ResponseCallback,
    TensorMetadata,
)
from llmbackend.core.tensors import Tensor
from llmbackend.core.tracing.manager import TraceManager
from llmbackend.core.tracing.trace import TraceSettings
from llmbackend.frontends.generation.models import MAX_MODEL_LEN_FAMILY

MODEL = "fake"
_OPTIONS = (
    *("stream", "sampling_parameters", "exclude_input_in_output", "return_finish_reason", "return_logprobs"),
    *("return_num_input_tokens", "return_num_output_tokens", "return_num_cached_tokens"),
)
_DATATYPES = {"stream": "BOOL", "exclude_input_in_output": "BOOL", "input_ids": "INT32"}
_METADATA = {
    MODEL: (("text_input", "messages", "input_ids", *_OPTIONS), ("text_output",)),
    "org/completions-only": (("text_input", *_OPTIONS), ("text_output",)),
    "resnet": (("image",), ("label",)),
}
FAILED = "broken"
"""A model that could not be loaded."""
REASON = "Internal: its weights can not be read"


class FakeHandle:
    """Cancelling sets an event that the request's thread waits on."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self.over = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()


class FakeLlmServer:
    """The methods of InferenceServer that the OpenAI frontend uses. `inferences` remembers what was asked."""

    is_exiting = False

    def __init__(self) -> None:
        self.tracing = TraceManager(TraceSettings())
        self.inferences: list[dict[str, Any]] = []
        self.handles: list[FakeHandle] = []

    def repository_index(self, ready_only: bool = False) -> list[ModelIndex]:
        rows = [ModelIndex(name, "1", "READY") for name in _METADATA]
        return rows if ready_only else [*rows, *self._others()]

    @staticmethod
    def _others() -> list[ModelIndex]:
        failed = ModelIndex(FAILED, "1", "UNAVAILABLE", REASON)
        gone = ModelIndex("gone", "1", "UNAVAILABLE", "unloaded")
        return [ModelIndex("young", "1", "LOADING"), ModelIndex("unloaded"), failed, gone]

    def metric_samples(self, name: str) -> list[Sample]:
        return [Sample(name, {"model": MODEL, "version": "1"}, 2048.0)] if name == MAX_MODEL_LEN_FAMILY else []

    def model_metadata(self, name: str, version: int = -1) -> ModelMetadata:
        if name not in _METADATA:
            raise not_found(f"Request for unknown model: '{name}' is not found")
        inputs, outputs = (tuple(map(_tensor, names)) for names in _METADATA[name])
        optional = frozenset(tensor.name for tensor in inputs)
        return ModelMetadata(name, ("1",), "fake", inputs, outputs, optional, fingerprint="f1a9")

    def model_parameters(self, name: str, version: int = -1) -> dict[str, str]:
        return {}

    def infer_async(self, request: InferenceRequest, callback: ResponseCallback) -> FakeHandle:
        inputs = {tensor.name: tensor.data for tensor in request.inputs}  # type: ignore[union-attr]
        asked = _decode(inputs)
        self.inferences.append(asked)
        if "overloaded" in asked["said"]:
            raise unavailable("Exceeds maximum queue size")
        handle = FakeHandle()
        self.handles.append(handle)
        threading.Thread(target=_answer, args=(request, callback, asked, handle), daemon=True).start()
        return handle


def _tensor(name: str) -> TensorMetadata:
    datatype = "BOOL" if name.startswith("return_") else _DATATYPES.get(name, "BYTES")
    return TensorMetadata(name, datatype, (-1,) if name == "input_ids" else (1,))


def _decode(inputs: dict[str, Any]) -> dict[str, Any]:
    asked: dict[str, Any] = {name: bool(data[0]) for name, data in inputs.items() if data.dtype == np.bool_}
    asked["sampling"] = orjson.loads(inputs["sampling_parameters"][0])
    if "messages" in inputs:
        asked["messages"] = orjson.loads(inputs["messages"][0])
        messages = asked["messages"]["messages"] if isinstance(asked["messages"], dict) else asked["messages"]
        asked["said"] = messages[-1]["content"]
    elif "input_ids" in inputs:
        asked["said"] = "".join(chr(token) for token in inputs["input_ids"])
    else:
        asked["said"] = inputs["text_input"][0].decode()
    return asked


def _answer(request: InferenceRequest, callback: ResponseCallback, asked: dict[str, Any], handle: FakeHandle) -> None:
    try:
        _send_all(request, callback, asked, handle)
    except TritonError as error:
        callback(InferenceResponse(MODEL, 1, request.id, error=error), ResponseFlag.FINAL)
    finally:
        handle.over.set()


def _send_all(request: InferenceRequest, callback: ResponseCallback, asked: dict[str, Any], handle: FakeHandle) -> None:
    said = asked["said"]
    if "too long" in said:
        why = "this model's maximum context length is 2048 tokens, with room for at least one more"
        raise invalid_argument(f"the prompt has 99999 tokens, expected at most 2047: {why}")
    if asked["sampling"].get("seed") == 13:
        raise invalid_argument("sampling parameter 'seed' is 13, which this model refuses", param="seed")
    if "silent" in said:
        handle.cancelled.wait()
        raise cancelled("Request was cancelled")
    pieces = _pieces(said, asked["sampling"], handle)
    if not asked["stream"]:
        pieces = iter([_merge(list(pieces))])
    for count, (tokens, text, reason) in enumerate(pieces):
        if "fail late" in said and count == 3:
            raise internal("the engine died")
        outputs = _outputs(asked, tokens, text, reason)
        flags = ResponseFlag.FINAL if reason else ResponseFlag.NONE
        callback(InferenceResponse(MODEL, 1, request.id, outputs), flags)


Piece = tuple[list[str], str, str]
"""(tokens, text, finish reason or "")"""


def _pieces(said: str, sampling: dict[str, Any], handle: FakeHandle) -> Iterator[Piece]:
    if "forever" in said:
        while not handle.cancelled.wait(0.005):
            yield ["a"], "a", ""
        raise cancelled("Request was cancelled")
    if "flood" in said:
        while not handle.cancelled.is_set():
            yield ["a"], "a" * 8192, ""
            handle.cancelled.wait(0.0005)
        raise cancelled("Request was cancelled")
    text = f"You said: {said}"
    reason = "stop"
    limit = sampling["max_tokens"]
    if limit is not None and limit < len(text):
        text, reason = text[:limit], "length"
    for stop in sampling.get("stop", []):
        if stop in text:
            text, reason = text[: text.index(stop)], "stop"
    for char in text:
        if handle.cancelled.is_set():
            raise cancelled("Request was cancelled")
        yield [char], char, ""
    yield [], "", reason


def _merge(pieces: list[Piece]) -> Piece:
    tokens = [token for piece in pieces for token in piece[0]]
    return tokens, "".join(piece[1] for piece in pieces), pieces[-1][2]


def _outputs(asked: dict[str, Any], tokens: list[str], text: str, reason: str) -> tuple[Tensor, ...]:
    logprobs: list[dict[str, Any]] | None = None
    if asked["return_logprobs"]:
        logprobs = [_entries(token, asked["sampling"]["logprobs"]) for token in tokens]
    wanted = [
        Tensor.text("text_output", text),
        Tensor.text("finish_reason", reason),
        Tensor.text("logprobs", orjson.dumps(logprobs)),
        Tensor.of("num_input_tokens", np.array([len(asked["said"])], dtype=np.uint32)),
        Tensor.of("num_output_tokens", np.array([len(tokens)], dtype=np.uint32)),
    ]
    return tuple(tensor for tensor in wanted if asked.get(f"return_{tensor.name}", True))


def _entries(token: str, top: int) -> dict[str, Any]:
    """The chosen token is the second most likely one, so that it is not among the top 1."""
    others = [chr(ord("A") + rank) for rank in range(top + 1)]
    ranked = {others[rank]: {"logprob": -0.5 * (rank + 1), "rank": rank + 1} for rank in range(top) if rank != 1}
    chosen = {str(ord(token)): {"logprob": -1.0, "rank": 2, "decoded_token": token}}
    return chosen | {str(1000 + ord(name)): {**entry, "decoded_token": name} for name, entry in ranked.items()}
