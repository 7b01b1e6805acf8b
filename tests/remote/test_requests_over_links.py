"""Requests of every kind to a host over a link: they arrive as they were sent, and are answered as in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmbackend.core.errors import TritonError
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import InferenceRequest, RequestFlag
from llmbackend.core.tensors import RawTensor, Tensor, to_wire
from llmbackend.frontends.inference_gate import InferenceGate
from llmbackend.remote.remote_server import RemoteServer
from llmbackend.remote.requests import packed_request, unpacked_request
from llmbackend.remote.wire import Submit, decode_to_host
from tests.helpers.kserve_scripted import RECORD, start_host
from tests.helpers.waiting import eventually_async
from tests.remote.linked_host import answers, attached, served, shown


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceServer]:
    host = start_host(tmp_path_factory.mktemp("host"))
    yield host
    assert host.stop(10)


def raw(tensor: Tensor) -> RawTensor:
    return RawTensor(tensor.name, tensor.datatype, tensor.shape, to_wire(tensor))


BYTES_OF_EVERY_KIND = Tensor.text("S", b"\0\xff", "text", "")
NUMBERS = Tensor.of("I", np.arange(8, dtype=np.int32).reshape(2, 4))
MANY_NUMBERS = Tensor.of("I", np.arange(1 << 17, dtype=np.int32).reshape(2, -1))
MANY_STRINGS = Tensor.text("S", *(f"string {index}" for index in range(20_000)))
REQUESTS = {
    "tensors": InferenceRequest("multi", inputs=(BYTES_OF_EVERY_KIND, NUMBERS)),
    "raw tensors": InferenceRequest("multi", 1, "id-1", (raw(BYTES_OF_EVERY_KIND), raw(NUMBERS))),
    "large": InferenceRequest("multi", inputs=(MANY_STRINGS, raw(MANY_NUMBERS))),
    "one output": InferenceRequest("multi", inputs=(BYTES_OF_EVERY_KIND, NUMBERS), requested_outputs=("I",)),
    "everything": InferenceRequest(
        "multi",
        inputs=(BYTES_OF_EVERY_KIND, NUMBERS, Tensor.of("B", np.array([True]))),
        id="the id",
        parameters={"text": "ü", "count": 2**62, "fraction": 0.1, "flag": True},
        correlation_id="sequence",
        flags=RequestFlag.SEQUENCE_START | RequestFlag.SEQUENCE_END,
        priority=3,
        timeout_us=10_000_000,
    ),
    "classes": InferenceRequest(
        "identity", inputs=(Tensor.of("INPUT0", np.eye(2, 4, dtype=np.float32)),), classes={"OUTPUT0": 2}
    ),
    "raw input": InferenceRequest("identity", raw_input=np.arange(4, dtype=np.float32).tobytes()),
    "stream": InferenceRequest("llm", inputs=(Tensor.text("text_input", "n=40"),)),
    "stream of large texts": InferenceRequest("llm", inputs=(Tensor.text("text_input", "n=3 kib=300"),)),
    "error among responses": InferenceRequest("llm", inputs=(Tensor.text("text_input", "n=4 err=2 cont"),)),
    "error": InferenceRequest("llm", inputs=(Tensor.text("text_input", "preerr"),)),
}
REFUSED = {
    "unknown model": InferenceRequest("nope"),
    "unknown version": InferenceRequest("multi", 7),
    "unloaded model": InferenceRequest("spare"),
    "missing input": InferenceRequest("multi", inputs=(NUMBERS,)),
    "wrong shape": InferenceRequest("identity", inputs=(Tensor.of("INPUT0", np.zeros((1, 3), np.float32)),)),
    "wrong size": InferenceRequest("identity", inputs=(RawTensor("INPUT0", "FP32", (1, 4), b"abc"),)),
    "unknown datatype": InferenceRequest("identity", inputs=(RawTensor("INPUT0", "FP31", (-1, 4), b""),)),
    "too many dimensions": InferenceRequest("identity", inputs=(RawTensor("INPUT0", "FP32", (1,) * 2000, b""),)),
    "large and wrong": InferenceRequest("identity", inputs=(RawTensor("INPUT0", "FP32", (1, 4), bytes(1 << 20)),)),
}


@pytest.mark.parametrize("kind", REQUESTS)
async def test_answers_are_those_of_the_host_in_one_process(host: InferenceServer, tmp_path: Path, kind: str) -> None:
    async with served(host, tmp_path) as endpoint, attached(endpoint.endpoint) as remote:
        assert shown(await answers(remote, REQUESTS[kind])) == shown(await answers(host, REQUESTS[kind]))


@pytest.mark.parametrize("kind", REFUSED)
async def test_refusals_are_those_of_the_host_in_one_process(host: InferenceServer, tmp_path: Path, kind: str) -> None:
    async def refusal(server: Any) -> tuple[Any, ...]:
        with pytest.raises(TritonError) as caught:
            await answers(server, REFUSED[kind])
        return caught.value.code, caught.value.message, caught.value.param

    async with served(host, tmp_path) as endpoint, attached(endpoint.endpoint) as remote:
        assert await refusal(remote) == await refusal(host)


async def test_a_number_that_no_message_holds_is_refused(host: InferenceServer, tmp_path: Path) -> None:
    async with served(host, tmp_path) as endpoint, attached(endpoint.endpoint) as remote:
        with pytest.raises(TritonError, match="beyond 64 bits"):
            await answers(remote, InferenceRequest("multi", parameters={"count": 2**70}))


async def test_a_response_that_no_message_holds_ends_its_own_request_alone(
    host: InferenceServer, tmp_path: Path
) -> None:
    def request(word: bytes) -> InferenceRequest:
        return InferenceRequest("textid", inputs=(Tensor.of("text_input", np.array([[word]], np.object_)),))

    async with served(host, tmp_path) as endpoint, attached(endpoint.endpoint) as remote:
        halves, huge, other = await asyncio.gather(
            *(answers(remote, request(word)) for word in (b"halves", b"huge", b"other"))
        )
        assert [str(one.error) for one in halves] == ["half of a surrogate pair: ?"]
        assert [(one.model_name, str(one.error)) for one in huge] == [
            ("textid", "internal error, see the server's log")
        ]
        assert shown(other) == shown(await answers(host, request(b"other")))
        assert shown(await answers(remote, REQUESTS["error"])) == shown(await answers(host, REQUESTS["error"]))


async def test_models_are_described_as_by_the_host(host: InferenceServer, tmp_path: Path) -> None:
    def described(server: Any, name: str) -> list[Any]:
        found: list[Any] = [server.model_is_ready(name)]
        for ask in (server.model_metadata, server.model_description, server.model_parameters, server.is_decoupled):
            for version in (-1, 1, 2):
                try:
                    found.append(ask(name, version))
                except TritonError as error:
                    found.append((error.code, error.message))
        return found

    async with served(host, tmp_path) as endpoint, attached(endpoint.endpoint) as remote:
        for name in ("multi", "llm", "spare", "nope"):
            assert described(remote, name) == described(host, name)
        assert remote.repository_index() == host.repository_index()
        assert remote.server_metadata() == host.server_metadata()
        assert (remote.is_live(), remote.is_ready(), remote.is_exiting) == (True, True, False)


async def test_an_announced_load_is_known_to_every_frontend(host: InferenceServer, tmp_path: Path) -> None:
    async with (
        served(host, tmp_path) as endpoint,
        attached(endpoint.endpoint) as first,
        attached(endpoint.endpoint) as second,
    ):
        await asyncio.to_thread(host.load_model, "spare")
        assert await asyncio.to_thread(endpoint.announce, 30.0)
        assert first.model_is_ready("spare") and second.model_is_ready("spare")
        await asyncio.to_thread(host.unload_model, "spare")
        assert await asyncio.to_thread(endpoint.announce, 30.0)
        assert not first.model_is_ready("spare") and not second.model_is_ready("spare")


@pytest.mark.parametrize("how", ["cancel", "close of the frontend"])
async def test_requests_are_cancelled(host: InferenceServer, tmp_path: Path, how: str) -> None:
    async def begin(remote: RemoteServer, gate: InferenceGate) -> Any:
        inference = await gate.send(
            InferenceRequest("llm", id=how, inputs=(Tensor.text("text_input", "n=9 sleep=9000"),))
        )
        await eventually_async(RECORD.began[how].is_set)
        return inference

    async with served(host, tmp_path) as endpoint:
        async with attached(endpoint.endpoint) as remote:
            gate = InferenceGate(remote)
            inference = await begin(remote, gate)
            if how == "cancel":
                inference.close()
                await eventually_async(RECORD.cancelled[how].is_set)
            gate.close()
        await eventually_async(RECORD.cancelled[how].is_set)


@pytest.mark.parametrize("command", ["", '{"action": "unload", "name": "cat"}'])
def test_a_command_of_an_operator_arrives(command: str) -> None:
    request = InferenceRequest("llm", command=command)
    header, *frames = packed_request(1, request, is_confirmed=True, trace=None, resume=None)
    submit = decode_to_host(header)
    assert isinstance(submit, Submit) and unpacked_request(submit, frames) == request
