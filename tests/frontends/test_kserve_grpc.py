"""KServe v2 over gRPC with raw stubs. Expectations are the recorded transcripts."""

from __future__ import annotations

import gc
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from llmbackend.frontends.grpc import service as inference_rpcs
from llmbackend.frontends.grpc.stream import MAX_WAITING_REFUSALS, StreamSession
from tests.helpers.kserve_runner import Running
from tests.helpers.kserve_scripted import RECORD
from tests.helpers.waiting import eventually

RAW = struct.pack("<4f", 1, 2, 3, 4)
EMPTY_FINAL = {"triton_enable_empty_final_response": pb.InferParameter(bool_param=True)}
SPARE_CONFIG = """{"backend":"scripted","max_batch_size":2,
"input":[{"name":"INPUT0","data_type":"TYPE_FP32","dims":[4]}],
"output":[{"name":"OUTPUT0","data_type":"TYPE_FP32","dims":[4]}]}"""
STRICT = (("triton_grpc_error", "true"),)


@pytest.fixture(scope="module")
def channel(running: Running) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(running.grpc) as channel:
        yield channel


@pytest.fixture(scope="module")
def stub(channel: grpc.Channel) -> Any:
    return service_pb2_grpc.GRPCInferenceServiceStub(channel)


def identity(raws: Sequence[bytes] = (RAW,), model: str = "identity", version: str = "", **change: Any) -> Any:
    request = pb.ModelInferRequest(model_name=model, model_version=version, raw_input_contents=raws)
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 4]} | change
    contents = {key: tensor.pop(key) for key in list(tensor) if key.endswith("_contents")}
    request.inputs.add(**tensor)
    for field, values in contents.items():
        getattr(request.inputs[0].contents, field).extend(values)
    return request


def text(words: str, model: str = "llm", shape: Sequence[int] = (1,), **fields: Any) -> Any:
    request = pb.ModelInferRequest(model_name=model, **fields)
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=shape)
    tensor.contents.bytes_contents.append(words.encode())
    return request


def wide(width: int) -> Any:
    request = text("a", "multi")
    request.inputs[0].name = "S"
    request.inputs.add(name="I", datatype="INT32", shape=[2, width]).contents.int_contents.extend([1, 2])
    return request


def twice() -> Any:
    request = identity()
    for _ in range(2):
        request.outputs.add(name="OUTPUT0")
    return request


def failure(call: Callable[[], Any]) -> tuple[str, str | None]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code().name, caught.value.details()


def stream(stub: Any, *requests: Any, **options: Any) -> tuple[list[Any], str]:
    """The messages of a stream of `requests` and how it ended: "OK", or status and details."""
    messages = []
    try:
        for message in stub.ModelStreamInfer(iter(requests), timeout=20, **options):
            messages.append(message)
    except grpc.RpcError as error:
        return messages, f"{error.code().name} {error.details()}"
    return messages, "OK"


def brief(message: Any) -> tuple[Any, ...]:
    """(error or text, id, final flag, model_name, model_version)"""
    response = message.infer_response
    raw = response.raw_output_contents
    content = message.error_message or (raw[0][4:].decode() if raw else "")
    final = response.parameters["triton_final_response"].bool_param if response.parameters else None
    return content, response.id, final, response.model_name, response.model_version


def test_health(running: Running, stub: Any, channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    assert stub.ServerLive(pb.ServerLiveRequest()).live and stub.ServerReady(pb.ServerReadyRequest()).ready
    assert stub.ModelReady(pb.ModelReadyRequest(name="identity")).ready
    assert not stub.ModelReady(pb.ModelReadyRequest(name="nosuch")).ready
    assert not stub.ModelReady(pb.ModelReadyRequest(name="identity", version="9")).ready
    assert health.Check(health_pb2.HealthCheckRequest(service="inference.GRPCInferenceService")).status == 1
    assert failure(lambda: stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="bad"))) == (
        *(
            "INVALID_ARGUMENT",
            "load failed for model 'bad': version 1 is at UNAVAILABLE state: Internal: weights missing;\n",
        ),
    )
    assert not stub.ServerReady(pb.ServerReadyRequest()).ready
    assert health.Check(health_pb2.HealthCheckRequest()).status == 2


def test_a_version_that_is_no_number(stub: Any) -> None:
    assert failure(lambda: stub.ModelReady(pb.ModelReadyRequest(name="identity", version="abc"))) == (
        "INVALID_ARGUMENT",
        "failed to get model version from specified version string 'abc' (details: stol), "
        "version should be an integral value > 0",
    )


def test_descriptions(stub: Any) -> None:
    assert stub.ServerMetadata(pb.ServerMetadataRequest()).name == "triton"
    metadata = stub.ModelMetadata(pb.ModelMetadataRequest(name="identity"))
    assert metadata.platform == "scripted" and list(metadata.inputs[0].shape) == [-1, 4]
    assert stub.ModelConfig(pb.ModelConfigRequest(name="llm")).config.model_transaction_policy.decoupled
    assert stub.ModelStatistics(pb.ModelStatisticsRequest(name="identity")).model_stats[0].version == "1"
    assert stub.RepositoryIndex(pb.RepositoryIndexRequest()).models[0].name == "bad"
    named = pb.RepositoryIndexRequest(repository_name="r")
    not_supported = ("UNIMPLEMENTED", "'repository_name' specification is not supported")
    assert failure(lambda: stub.RepositoryIndex(named)) == not_supported
    unknown = "Request for unknown model: 'nosuch' is not found"
    assert failure(lambda: stub.ModelMetadata(pb.ModelMetadataRequest(name="nosuch"))) == ("NOT_FOUND", unknown)


def test_load_and_unload(running: Running, stub: Any) -> None:
    request = pb.RepositoryModelLoadRequest(model_name="spare")
    request.parameters["config"].string_param = SPARE_CONFIG
    request.parameters["file:1/x"].bytes_param = b"\xff"
    stub.RepositoryModelLoad(request)
    assert stub.ModelConfig(pb.ModelConfigRequest(name="spare")).config.max_batch_size == 2
    unload = pb.RepositoryModelUnloadRequest(model_name="spare")
    unload.parameters["unload_dependents"].bool_param = True
    stub.RepositoryModelUnload(unload)
    assert not stub.ModelReady(pb.ModelReadyRequest(name="spare")).ready
    request.parameters["nosuch"].string_param = "1"
    assert failure(lambda: stub.RepositoryModelLoad(request)) == (
        *("INVALID_ARGUMENT", "unrecognized load parameter 'nosuch'"),
    )
    unload.parameters["unload_dependents"].string_param = "true"
    assert failure(lambda: stub.RepositoryModelUnload(unload)) == (
        *("INVALID_ARGUMENT", "invalid value type for 'unload_dependents' parameter, expected bool_param."),
    )


@pytest.mark.parametrize(
    "request_", [identity(), identity(raws=(), fp32_contents=[1, 2, 3, 4]), identity(raws=(RAW, RAW))]
)
def test_infer(stub: Any, request_: Any) -> None:
    request_.id = "g1"
    response = stub.ModelInfer(request_)
    assert (response.model_name, response.model_version, response.id) == ("identity", "1", "g1")
    assert list(response.outputs[0].shape) == [1, 4] and response.raw_output_contents[0] == RAW


@pytest.mark.parametrize(
    ("request_", "code", "message"),
    [
        (identity(model="nosuch"), "NOT_FOUND", "Request for unknown model: 'nosuch' is not found"),
        (identity(version="9"), "NOT_FOUND", "Request for unknown model: 'identity' version 9 is not found"),
        (identity(name="NOPE"), "INVALID_ARGUMENT", "unexpected inference input 'NOPE' for model 'identity'"),
        (
            *(identity(datatype="FLOAT"), "INVALID_ARGUMENT"),
            "[request id: <id_unknown>] inference input 'INPUT0' data-type is '<invalid>', "
            "but model 'identity' expects 'FP32'",
        ),
        (
            *(identity(raws=()), "INVALID_ARGUMENT"),
            "unable to find data for input tensor 'INPUT0' for model 'identity' in request.",
        ),
        (
            *(identity(raws=(), int_contents=[1, 2, 3, 4]), "INVALID_ARGUMENT"),
            "unexpected explicit tensor data for input tensor 'INPUT0' for model 'identity' of type 'INT32', "
            "expected datatype 'FP32'",
        ),
        (
            *(identity(fp32_contents=[1, 2, 3, 4]), "INVALID_ARGUMENT"),
            "contents field must not be specified when using raw_input_contents for 'INPUT0' for model 'identity'",
        ),
        (
            *(identity(raws=(), fp32_contents=[1, 2, 3]), "INVALID_ARGUMENT"),
            "[request id: <id_unknown>] input byte size mismatch for input 'INPUT0' for model 'identity'. "
            "Expected 16, got 12",
        ),
        (
            *(text("n=1"), "UNIMPLEMENTED"),
            "ModelInfer RPC doesn't support models with decoupled transaction policy",
        ),
        (text("fail", "textid", (1, 1)), "INTERNAL", "model says no"),
        (
            *(wide(2**62), "INVALID_ARGUMENT"),
            f"shape of input 'I' causes total element count to exceed maximum size of {2**63 - 1}",
        ),
        (wide(2**61), "INVALID_ARGUMENT", "byte size overflow for input 'I'"),
        (
            *(twice(), "INVALID_ARGUMENT"),
            "[request id: <id_unknown>] output 'OUTPUT0' already exists in request",
        ),
    ],
)
def test_infer_errors(stub: Any, request_: Any, code: str, message: str) -> None:
    assert failure(lambda: stub.ModelInfer(request_)) == (code, message)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            *("triton_x", {"int64_param": 1}),
            "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys starting "
            "with 'triton_' are allowed: triton_enable_empty_final_response",
        ),
        (
            *("u", {"uint64_param": 4}),
            "invalid value type for 'u' parameter, expected int64_param, bool_param, or string_param.",
        ),
        (
            *("sequence_start", {"int64_param": 4}),
            "invalid value type for 'sequence_start' parameter, expected bool_param.",
        ),
        ("priority", {"int64_param": -4}, "invalid value for 'priority', expected value >= 0."),
    ],
)
def test_parameter_errors(stub: Any, key: str, value: dict[str, Any], message: str) -> None:
    request = identity()
    request.parameters[key].CopyFrom(pb.InferParameter(**value))
    assert failure(lambda: stub.ModelInfer(request)) == ("INVALID_ARGUMENT", message)


def test_bytes_that_are_no_message(channel: grpc.Channel) -> None:
    def raw(name: str) -> tuple[str, str | None]:
        call: Any = channel.unary_unary(f"/inference.GRPCInferenceService/{name}")
        return failure(lambda: call(b"\xff\xff\xff\xff"))

    assert raw("ModelInfer") == ("INTERNAL", "Unable to parse request")
    assert raw("ServerLive") == ("INTERNAL", "Unable to parse request")
    assert raw("Nope")[0] == "UNIMPLEMENTED"
    call: Any = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
    assert failure(lambda: list(call(iter([b"\xff\xff\xff\xff"])))) == ("INTERNAL", "Unable to parse request")


def test_stream_of_a_decoupled_model(stub: Any) -> None:
    first, second = (" tok0", "a", False, "llm", "1"), (" tok1", "a", False, "llm", "1")
    end = ("", "a", True, "llm", "")

    def run(words: str, **fields: Any) -> list[Any]:
        messages, status = stream(stub, text(words, id="a", **fields))
        assert status == "OK"
        return [brief(message) for message in messages]

    assert run("n=2") == [first, second]
    assert run("n=2", parameters=EMPTY_FINAL) == [first, second, end]
    last = (" tok1", "a", True, "llm", "1")
    assert run("n=2 lastfinal") == run("n=2 lastfinal", parameters=EMPTY_FINAL) == [first, last]
    assert run("n=0") == [] and run("n=0", parameters=EMPTY_FINAL) == [end]
    assert run("preerr") == [("early failure", "a", True, "llm", "")]
    assert run("n=3 err=1", parameters=EMPTY_FINAL) == [first, ("boom at 1", "a", True, "llm", "")]
    assert run("n=3 err=1 cont") == [first, ("boom at 1", "a", False, "llm", ""), (" tok2", "a", False, "llm", "1")]


def test_stream_parameters_reach_the_model(stub: Any) -> None:
    parameters = EMPTY_FINAL | {"k": pb.InferParameter(int64_param=3), "t": pb.InferParameter(double_param=0.5)}
    messages, _ = stream(stub, text("params", id="p", parameters=parameters))
    assert '"params": {"k": 3, "t": 0.5}' in brief(messages[0])[0]


def test_refusals_leave_the_stream_open(stub: Any) -> None:
    messages, status = stream(
        stub,
        text("n=1", model="nosuch", id="u", parameters=EMPTY_FINAL),
        text("n=1", id="r", parameters={"triton_foo": pb.InferParameter(bool_param=True)}),
        pb.ModelInferRequest(model_name="llm", id="m"),
        text("n=1", id="v", model_version="abc"),
        text("n=1", id="ok"),
    )
    assert status == "OK"
    briefs = {row[1]: row for row in map(brief, messages)}
    assert briefs["u"] == ("Request for unknown model: 'nosuch' is not found", "u", None, "", "")
    assert briefs.keys() == {"u", "r", "m", "v", "ok"} and len(messages) == 5
    assert briefs["m"][0].startswith("[request id: m] ") and briefs["ok"][0] == " tok0"


def test_requests_of_a_stream_run_at_the_same_time(stub: Any) -> None:
    slow, quick = text("n=1 sleep=400", id="slow"), text("n=2", id="quick")
    messages, _ = stream(stub, slow, quick)
    assert [message.infer_response.id for message in messages] == ["quick", "quick", "slow"]


def test_a_model_that_is_not_decoupled_answers_in_order(stub: Any) -> None:
    requests = [text("x" * index, "textid", (1, 1), id=str(index)) for index in range(1, 30)]
    messages, status = stream(stub, *requests)
    assert status == "OK" and [int(message.infer_response.id) for message in messages] == list(range(1, 30))
    assert brief(messages[0])[2] is True


def test_refusals_follow_earlier_requests_to_models_that_are_not_decoupled(running: Running, stub: Any) -> None:
    """A request to a decoupled model, which is not ordered, shows that all requests before it were read."""
    slow = text("slow", "textid", (1, 1), id="held")
    refused = [identity(name="NOPE"), text("n=1", model="nosuch"), text("n=1", model_version="abc")]
    for request, name in zip(refused, "abc", strict=True):
        request.id = name
    call = stub.ModelStreamInfer(iter([slow, *refused, text("n=1", id="quick")]), timeout=20)
    assert next(call).infer_response.id == "quick"
    assert running.host.cancel_requests("textid", request_id="held") == 1
    assert [message.infer_response.id for message in call] == ["held", "a", "b", "c"]


def test_many_refusals_are_all_answered(stub: Any) -> None:
    """More than may wait for a slow client."""
    requests = [identity(name="NOPE") for _ in range(3 * MAX_WAITING_REFUSALS)]
    for number, request in enumerate(requests):
        request.id = str(number)
    messages, status = stream(stub, *requests)
    assert status == "OK" and [int(message.infer_response.id) for message in messages] == list(range(len(requests)))


CODES = {
    "UNKNOWN": "UNKNOWN",
    "INTERNAL": "INTERNAL",
    "INVALID_ARG": "INVALID_ARGUMENT",
    "UNSUPPORTED": "UNIMPLEMENTED",
}
CODES |= {code: code for code in ("NOT_FOUND", "UNAVAILABLE", "ALREADY_EXISTS", "CANCELLED")}


@pytest.mark.parametrize("code", CODES)
def test_strict_errors_end_the_stream(running: Running, stub: Any, code: str) -> None:
    other = text("n=1000 sleep=50", id=f"other-{code}")
    messages, status = stream(stub, other, text(f"n=3 err=1 code={code}", id="e"), metadata=STRICT)
    assert status == f"{CODES[code]} boom at 1"
    assert all(not message.error_message for message in messages)
    assert RECORD.cancelled[f"other-{code}"].wait(10)


def test_an_error_text_with_half_of_a_surrogate_pair_ends_its_request_alone(stub: Any) -> None:
    halves = text("halves", "textid", (1, 1), id="halves")
    said = "half of a surrogate pair: ?"
    messages, status = stream(stub, halves, text("n=1", id="other"))
    assert status == "OK" and {brief(message)[:2] for message in messages} == {(said, "halves"), (" tok0", "other")}
    assert failure(lambda: stub.ModelInfer(halves)) == ("INTERNAL", said)
    assert stream(stub, halves, metadata=STRICT) == ([], f"INTERNAL {said}")


def test_strict_mode_keeps_refusals_in_band(stub: Any) -> None:
    messages, status = stream(stub, text("n=1", model="nosuch", id="u"), metadata=STRICT)
    assert status == "OK" and messages[0].error_message == "Request for unknown model: 'nosuch' is not found"


def test_an_empty_stream(stub: Any) -> None:
    assert stream(stub) == ([], "OK")


def test_half_close_waits_for_what_is_pending(stub: Any) -> None:
    messages, status = stream(stub, text("n=3 sleep=50", id="c3"))
    assert status == "OK" and len(messages) == 3


def test_cancel_and_deadline_cancel_every_request_of_the_stream(running: Running, stub: Any) -> None:
    requests = [text("n=1000 sleep=20", id="c1"), text("n=1 sleep=20000", id="c2")]
    release = threading.Event()

    def feed() -> Iterator[Any]:
        yield from requests
        release.wait(20)  # the client does not half-close

    call = stub.ModelStreamInfer(feed())
    next(call)
    next(call)
    call.cancel()
    release.set()
    assert all(RECORD.cancelled[name].wait(10) for name in ("c1", "c2"))
    _, details = failure(lambda: list(stub.ModelStreamInfer(iter([text("n=9 sleep=300", id="d")]), timeout=0.5)))
    assert details is not None and "Deadline Exceeded" in details and RECORD.cancelled["d"].wait(10)


def test_a_unary_call_that_is_cancelled(running: Running, stub: Any) -> None:
    future = stub.ModelInfer.future(text("slow", "textid", (1, 1), id="unary"))
    assert RECORD.began["unary"].wait(10)
    future.cancel()
    assert RECORD.cancelled["unary"].wait(10)


def test_an_ended_stream_leaves_nothing_to_the_garbage_collector(
    stub: Any, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions: weakref.WeakSet[StreamSession] = weakref.WeakSet()
    made = 0

    class Watched(StreamSession):
        def __init__(self, *arguments: Any) -> None:
            nonlocal made
            super().__init__(*arguments)
            sessions.add(self)
            made += 1

    monkeypatch.setattr(inference_rpcs, "StreamSession", Watched)
    gc.disable()
    try:
        messages, ended = stream(stub, text("n=3"), identity(), identity(), text("preerr"))
        assert (len(messages), ended) == (6, "OK")
        assert stream(stub, identity(model="no such model"))[1] == "OK"
        assert made == 2
        eventually(lambda: not sessions)
    finally:
        gc.enable()
