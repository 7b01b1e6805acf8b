"""One request over a gRPC stream of Triton's own client, the same against either server."""

from __future__ import annotations

import json
import queue
import threading
from typing import Any

import numpy as np
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

WAIT_S = 60.0


class GrpcStream:
    """Starts at once. `token_ids`, `text` and `finish_reason` are what came, `error` how it ended if not well."""

    def __init__(
        self,
        address: str,
        model: str,
        prompt: str,
        sampling: dict[str, Any],
        stream: bool = True,
        prompt_input: str = "text_input",
    ) -> None:
        """prompt_input: the tensor that `prompt` is sent as: `text_input`, or `messages` for a conversation as JSON."""
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason = ""
        self.logprobs: list[Any] = []
        self.error: InferenceServerException | None = None
        self.began = threading.Event()
        self.ended = threading.Event()
        self._responses: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._client = triton_grpc.InferenceServerClient(address)
        self._client.start_stream(lambda result, error: self._came(result, error))
        inputs: dict[str, str | bool] = {
            prompt_input: prompt,
            "stream": stream,
            "sampling_parameters": json.dumps(sampling),
            "exclude_input_in_output": True,
            "return_output_ids": True,
            "return_finish_reason": True,
            "return_logprobs": True,
        }
        tensors = [_tensor(name, value) for name, value in inputs.items()]
        self._client.async_stream_infer(model, tensors, enable_empty_final_response=True)

    def cancel(self) -> None:
        stream = self._client._stream
        self._client.stop_stream(cancel_requests=True)
        stream._request_queue.put(None)  # the client leaves the thread that sends requests waiting for one
        self._client.close()

    def finish(self) -> GrpcStream:
        assert self.ended.wait(WAIT_S), "the stream did not end"
        self._client.stop_stream()
        self._client.close()
        return self

    def _came(self, result: Any, error: Any) -> None:
        if error is not None:
            self.error = error
            self.ended.set()
            return
        response = result.get_response()
        if (ids := result.as_numpy("output_ids")) is not None:
            self.token_ids += ids.tolist()
            self.text += result.as_numpy("text_output")[0].decode()
            self.logprobs += json.loads(result.as_numpy("logprobs")[0]) or []
            self.finish_reason = result.as_numpy("finish_reason")[0].decode()
            self.began.set()
        if response.parameters["triton_final_response"].bool_param:
            self.ended.set()


def _tensor(name: str, value: str | bool) -> Any:
    data = np.array([value]) if isinstance(value, bool) else np.array([value.encode()], np.object_)
    tensor = triton_grpc.InferInput(name, [1], "BOOL" if isinstance(value, bool) else "BYTES")
    tensor.set_data_from_numpy(data)
    return tensor
