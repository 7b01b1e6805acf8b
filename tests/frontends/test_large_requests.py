"""Large requests: answered as small ones are, and nothing of their work is done on the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from kserve_runner import Running

from llmbackend.core.messages import InferenceRequest
from llmbackend.core.tensors import RawTensor
from llmbackend.frontends.inference import nobody

MANY = 10_000


@contextmanager
def threads_that_submit(running: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    names: list[str] = []
    infer_async = running.host.infer_async

    def noted(request: InferenceRequest) -> Any:
        names.append(threading.current_thread().name)
        return infer_async(request)

    monkeypatch.setattr(running.host, "infer_async", noted)
    yield names
    monkeypatch.undo()


def multi(client_module: Any, count: int) -> list[Any]:
    strings = client_module.InferInput("S", [count], "BYTES")
    strings.set_data_from_numpy(np.array([b"%d" % n for n in range(count)], dtype=np.object_))
    numbers = client_module.InferInput("I", [2, 1], "INT32")
    numbers.set_data_from_numpy(np.zeros((2, 1), np.int32))
    return [strings, numbers]


@pytest.mark.parametrize("count", [10, MANY])
def test_many_strings_are_decoded_off_the_event_loop(
    running: Running, client: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = triton_http if isinstance(client, triton_http.InferenceServerClient) else triton_grpc
    with threads_that_submit(running, monkeypatch) as names:
        echoed = client.infer("multi", multi(module, count)).as_numpy("S")
    assert echoed.tolist() == [b"%d" % n for n in range(count)]
    assert [name == "frontends" for name in names] == [count == 10]


def test_a_client_that_leaves_while_its_strings_are_decoded_leaves_nothing(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    infer_async = running.host.infer_async

    def held(request: InferenceRequest) -> Any:
        begun.set()
        assert go_on.wait(20)
        return infer_async(request)

    monkeypatch.setattr(running.host, "infer_async", held)
    raw = b"".join(b"\1\0\0\0x" for _ in range(MANY))
    tensors = RawTensor("S", "BYTES", (MANY,), raw), RawTensor("I", "INT32", (2, 1), bytes(8))

    async def leave() -> None:
        sending = asyncio.ensure_future(running.gate.send(InferenceRequest("multi", nobody, inputs=tensors)))
        await asyncio.to_thread(begun.wait, 20)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert running.gate.open_inferences == 1
        go_on.set()
        while running.gate.open_inferences:
            await asyncio.sleep(0.01)

    running.call(leave())


def test_a_refused_request_gives_its_place_back(running: Running) -> None:
    tensors = (RawTensor("S", "BYTES", (MANY,), bytes(8 * MANY)),)
    with pytest.raises(Exception, match="but got 1 inputs"):
        running.call(running.gate.send(InferenceRequest("multi", nobody, inputs=tensors)))
    assert running.gate.open_inferences == 0
