"""Requests of ModelStreamInfer that a client comes back to by `resume_from`, on another stream and on another host."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from llmbackend.frontends.grpc import resumable
from llmbackend.frontends.grpc import stream as grpc_stream
from llmbackend.frontends.grpc.resumable import JournalAnswer
from llmbackend.frontends.journals import stream_copies
from llmbackend.frontends.journals.journal import Journal, StreamHead
from llmbackend.frontends.journals.resumable_streams import ResumableStream
from tests.helpers.linked_hosts import Hosts
from tests.helpers.mock_llm_host import MODEL
from tests.helpers.waiting import eventually, eventually_async

Response = Any


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    hosts = Hosts(tmp_path_factory.mktemp("hosts"), mock_step_ms=2)
    yield hosts
    hosts.stop()


@pytest.fixture(autouse=True)
def everything_is_up(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(stream_copies, "_RETRY_INTERVAL_S", 0.0)
    yield
    hosts.reset()


def request(tokens: int = 12, **parameters: Any) -> Any:
    message = pb.ModelInferRequest(model_name=MODEL, id="mine")
    sampling = json.dumps({"temperature": 1, "max_tokens": tokens, "ignore_eos": True})
    for name, value in (("text_input", b"one two"), ("sampling_parameters", sampling.encode())):
        tensor = message.inputs.add(name=name, datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(value)
    tensor = message.inputs.add(name="stream", datatype="BOOL", shape=[1])
    tensor.contents.bool_contents.append(True)
    _set(message, triton_enable_empty_final_response=True, **parameters)
    return message


def back(place: str) -> Any:
    message = pb.ModelInferRequest(model_name=MODEL, id="another")
    _set(message, resume_from=place)
    return message


def _set(message: Any, **parameters: Any) -> None:
    for name, value in parameters.items():
        field = {bool: "bool_param", str: "string_param", int: "int64_param"}[type(value)]
        setattr(message.parameters[name], field, value)


def read(hosts: Hosts, name: str, *messages: Any, at_most: int = 1 << 30) -> list[Response]:
    """The responses to the messages on one stream, which the client leaves behind `at_most` of them."""
    found: list[Response] = []
    with grpc.insecure_channel(hosts.all[name].grpc) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter(messages), timeout=30)
        for response in call:
            found.append(response)
            if len(found) == at_most:
                call.cancel()
                break
    return found


def place(response: Response) -> str:
    parameters = response.infer_response.parameters
    return f"{parameters['stream_id'].string_param}:{parameters['event_number'].int64_param}"


@pytest.mark.parametrize("cut", [1, 4, 12])
@pytest.mark.parametrize("other", ["a", "c"])
def test_a_client_gets_what_it_did_not_have(hosts: Hosts, cut: int, other: str) -> None:
    begun = read(hosts, "a", request(resumable=True), at_most=cut)
    if other != "a":
        hosts.network.down.add("a")
    rest = read(hosts, other, back(place(begun[-1])))
    stream = place(begun[0]).partition(":")[0]
    whole = read(hosts, "a", back(stream))
    assert begun + rest == whole
    assert [place(response) for response in whole] == [f"{stream}:{number}" for number in range(len(whole))]
    assert whole[-1].infer_response.parameters["triton_final_response"].bool_param
    assert {response.infer_response.id for response in whole} == {"mine"}


def test_its_responses_are_those_of_any_request(hosts: Hosts) -> None:
    fixed = request()
    sampling = json.dumps({"temperature": 0, "max_tokens": 9})
    fixed.inputs[1].contents.bytes_contents[0] = sampling.encode()
    plain = read(hosts, "b", fixed)
    _set(fixed, resumable=True)
    marked = read(hosts, "b", fixed)
    for response in marked:
        del response.infer_response.parameters["stream_id"], response.infer_response.parameters["event_number"]
    assert marked == plain and len(plain) > 1


def test_several_requests_share_a_stream(hosts: Hosts) -> None:
    begun = read(hosts, "a", request(20, resumable=True), at_most=3)
    mixed = read(hosts, "a", back(place(begun[-1])), request(5), request(5, resumable=True))
    places = [place(response).partition(":") for response in mixed]
    first = place(begun[0]).partition(":")[0]
    assert len({stream for stream, _, _ in places} - {first, ""}) == 1
    numbers = [int(number) for stream, _, number in places if stream == first]
    assert numbers == list(range(3, 3 + len(numbers))) and len(numbers) > 2


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (back("17"), "parameter 'resume_from' is '17', expected the id of an event"),
        (back("a" * 32 + ":5"), f"there is no stream '{'a' * 32}', or it is no longer available"),
        (request(resumable="yes"), "parameter 'resumable' is a string_param, expected bool_param"),
        (request(resume_from=5), "parameter 'resume_from' is a int64_param, expected string_param"),
    ],
)
def test_what_is_wrong_is_named(hosts: Hosts, message: Any, text: str) -> None:
    (response,) = read(hosts, "a", message)
    assert response.error_message == text and response.infer_response.id == message.id


def test_who_comes_back_hears_by_the_status_whether_to_come_again(hosts: Hosts) -> None:
    """With the metadata by which Triton's clients ask for a status."""
    for down, code in (((), grpc.StatusCode.NOT_FOUND), (("b", "c"), grpc.StatusCode.UNAVAILABLE)):
        hosts.network.down.update(down)
        with grpc.insecure_channel(hosts.all["a"].grpc) as channel:
            call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(
                iter([back("a" * 32)]), timeout=30, metadata=[("triton_grpc_error", "true")]
            )
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
        assert caught.value.code() is code


def test_a_refused_request_says_why(hosts: Hosts) -> None:
    wrong = request(resumable=True)
    wrong.inputs[1].contents.bytes_contents[0] = b'{"max_tokens": -1}'
    (response,) = read(hosts, "a", wrong)
    assert "'max_tokens' is -1" in response.error_message
    assert response.infer_response.parameters["triton_final_response"].bool_param


def test_without_its_client_it_is_cancelled_after_the_grace(hosts: Hosts) -> None:
    running = hosts.all["a"]
    read(hosts, "a", request(200, resumable=True), at_most=2)
    assert running.gate.open_inferences == 1
    running.call(running.streams.close())
    eventually(lambda: not running.gate.open_inferences)


def test_a_call_reads_a_limited_number_of_streams_at_a_time(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client reads nothing at first."""
    monkeypatch.setattr(grpc_stream, "MAX_RESUMED", 4)
    whole = read(hosts, "a", request(200, resumable=True))
    name = place(whole[0]).partition(":")[0]
    (stream,) = hosts.all["a"].streams._kept.all(ResumableStream)
    counts: list[int] = []
    changed = stream.journal.on_readers

    def on_readers(count: int) -> None:
        counts.append(count)
        changed(count)

    stream.journal.on_readers = on_readers
    with grpc.insecure_channel(hosts.all["a"].grpc) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([back(name)] * 12), timeout=60)
        eventually(lambda: 4 in counts)
        assert len(list(call)) == 12 * len(whole)
    assert max(counts) == 4


def test_refused_requests_are_not_counted_as_streams(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_stream, "MAX_RESUMED", 1)
    whole = read(hosts, "a", request(resumable=True))
    found = read(hosts, "a", back("17"), back("18"), back(place(whole[0])), back(place(whole[0])))
    assert [response for response in found if not response.error_message] == whole[1:] * 2


async def test_a_message_is_copied_when_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []

    def numbered(message: bytes, key: str, number: int) -> bytes:
        written.append(number)
        return message

    monkeypatch.setattr(resumable, "numbered", numbered)
    journal = Journal(1000)
    journal.publish([b"a", b"b", b"c"])
    journal.end()
    stream = ResumableStream(owner="", key="k", journal=journal, head=StreamHead(key="k", path="grpc:m"))
    waiting: list[JournalAnswer] = []
    left: list[JournalAnswer] = []
    answer = JournalAnswer(stream, 0, waiting.append, left.append)
    await eventually_async(lambda: waiting)
    assert not written
    assert [answer.take() for _ in range(2)] == [b"b", b"c"] and written == [1, 2]
    assert not answer.has_more
    await eventually_async(lambda: left == [answer])


def test_a_stream_of_a_large_request_is_not_copied(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable, "MAX_REQUEST_BYTES", 20)
    before = hosts.copies("b").num_held + hosts.copies("c").num_held
    begun = read(hosts, "a", request(resumable=True), at_most=3)
    assert hosts.copies("b").num_held + hosts.copies("c").num_held == before
    rest = read(hosts, "a", back(place(begun[-1])))
    assert begun + rest == read(hosts, "a", back(place(begun[0]).partition(":")[0]))
    assert rest[-1].infer_response.parameters["triton_final_response"].bool_param
