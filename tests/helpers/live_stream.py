"""One streaming request on its own thread, over HTTP, gRPC or OpenAI: its text, and how it ended."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.helpers.server_process import ServerProcess

PROTOCOLS = ("http", "grpc", "openai")
WAIT_S = 60.0


class LiveStream:
    """Starts at once. `error` is the text of an error event, `broken` that of a connection that ended without one."""

    def __init__(
        self, server: ServerProcess, protocol: str, model: str, prompt: str, max_tokens: int, request_id: str = ""
    ) -> None:
        self.began = threading.Event()
        self.text = ""
        self.error = ""
        self.broken = ""
        self._sampling = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.8, "seed": len(prompt)}
        events = {"http": self._http, "grpc": self._grpc, "openai": self._openai}[protocol]
        self._thread = threading.Thread(
            target=self._read, args=(events(server, model, prompt, request_id),), daemon=True
        )
        self._thread.start()

    def wait_until_begun(self) -> LiveStream:
        assert self.began.wait(WAIT_S), "no token came"
        return self

    def finish(self) -> str:
        """Waits for the end; the text."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the stream did not end"
        return self.text

    def _read(self, events: Iterator[tuple[str, str]]) -> None:
        try:
            for text, error in events:
                self.text += text
                self.error += error
                if self.text or self.error:
                    self.began.set()
        except (OSError, http.client.HTTPException, grpc.RpcError) as error:
            self.broken = f"{type(error).__name__}: {error}"
        self.began.set()

    def _http(self, server: ServerProcess, model: str, prompt: str, request_id: str) -> Iterator[tuple[str, str]]:
        body = {"id": request_id, "text_input": prompt, "stream": True, "parameters": self._sampling}
        for event in _server_sent_events(server, f"/v2/models/{model}/generate_stream", body):
            yield event.get("text_output", ""), event.get("error", "")

    def _openai(self, server: ServerProcess, model: str, prompt: str, request_id: str) -> Iterator[tuple[str, str]]:
        body = {"model": model, "prompt": prompt, "stream": True, **self._sampling}
        for event in _server_sent_events(server, "/v1/completions", body):
            choices = event.get("choices") or [{}]
            yield choices[0].get("text", ""), event.get("error", {}).get("message", "")

    def _grpc(self, server: ServerProcess, model: str, prompt: str, request_id: str) -> Iterator[tuple[str, str]]:
        request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
        sampling = json.dumps(self._sampling)
        for name, value in (("text_input", prompt.encode()), ("sampling_parameters", sampling.encode())):
            request.inputs.add(name=name, datatype="BYTES", shape=[1])
            request.raw_input_contents.append(len(value).to_bytes(4, "little") + value)
        request.inputs.add(name="stream", datatype="BOOL", shape=[1])
        request.raw_input_contents.append(b"\1")
        with grpc.insecure_channel(server.grpc) as channel:
            for answer in service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([request])):
                raw = answer.infer_response.raw_output_contents
                yield raw[0][4:].decode() if raw else "", answer.error_message


def _server_sent_events(server: ServerProcess, path: str, body: Any) -> Iterator[dict[str, Any]]:
    connection = http.client.HTTPConnection(server.http, timeout=WAIT_S)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    for line in answer:
        text = line.decode().strip()
        if text.startswith("data: ") and text != "data: [DONE]":
            yield json.loads(text.removeprefix("data: "))
        elif text.startswith("{"):
            yield json.loads(text)  # refused before the stream began
    connection.close()
