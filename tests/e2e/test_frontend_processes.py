"""A server with two frontend processes: clients see one server, whichever of its processes has their connection."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import re
import signal
import socket
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import gevent
import grpc
import numpy as np
import openai
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from openai.types.chat import ChatCompletion
from tritonclient.utils import InferenceServerException

from llmbackend.server.process_memory import descendants
from tests.helpers.live_stream import PROTOCOLS, LiveStream
from tests.helpers.processes import is_alive
from tests.helpers.server_process import (
    ServerProcess,
    kill_server,
    post,
    running_server,
    start_server,
    stop_server,
    write_mock_model,
)
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.slow
CONNECTIONS = 12
"""So many on one port reach both processes, but for one time in two thousand."""
WAIT_S = 60.0
TOKENS = 40
SUMS = """
import grpc
import numpy as np
from llmbackend.core.backend_api import ResponseFlag, Tensor

def TRITONBACKEND_ModelInstanceInitialize(instance):
    instance.state = {}

def TRITONBACKEND_ModelInstanceExecute(instance, requests):
    for request in requests:
        values = {name: int(tensor.data.ravel()[0]) for name, tensor in request.inputs.items()}
        before = 0 if values["START"] else instance.state[values["CORRID"]]
        instance.state[values["CORRID"]] = before + values["X"]
        response = request.new_response()
        response.add_output(Tensor.of("SUM", np.array([instance.state[values["CORRID"]]], np.int32)))
        response.send(ResponseFlag.FINAL)
        request.release()
"""
SUMS_CONFIG = """
backend: "sums"
input [ { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "SUM" data_type: TYPE_INT32 dims: [ 1 ] } ]
sequence_batching {
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
    { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] }
  ]
}
"""
KEYS = """
boss:sk-boss role=operator
few:sk-few rpm=5
kept:sk-kept rpm=3
two:sk-two concurrency=2
metered:sk-metered tpm=100000
"""


@pytest.fixture(scope="module", autouse=True)
def gevent_hub() -> None:
    """Triton's HTTP client runs on gevent, whose hub keeps its descriptors: they are not leaked by a test."""
    gevent.sleep(0)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """`mock`, `slow` with 20 ms a step, and `sums`, which adds up the requests of a sequence."""
    repository = tmp_path_factory.mktemp("repository")
    write_mock_model(repository, "mock")
    write_mock_model(repository, "slow", mock_step_ms=20)
    (repository / "sums" / "1").mkdir(parents=True)
    (repository / "sums" / "config.pbtxt").write_text(SUMS_CONFIG)
    (repository / "sums" / "backend.py").write_text(SUMS)
    flags = ("--model-control-mode=explicit", "--load-model=*", "--allow-client-shm=true", "--frontend-processes=2")
    traces = ("--trace-config", f"triton,file={repository / 'traces.json'}")
    server = start_server("--model-repository", str(repository), *traces, *flags)
    yield server
    if server.process.poll() is None:
        assert stop_server(server) == 0
    else:  # the last test has killed it
        kill_server(server)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Path]]:
    """One that asks for keys, and its file of keys."""
    folder = tmp_path_factory.mktemp("keyed")
    (file := folder / "keys").write_text(KEYS)
    write_mock_model(folder / "models", "slow", mock_step_ms=20)
    flags = ("--api-key-file", str(file), "--frontend-processes=2", "--enable-request-id-headers")
    with running_server("--model-repository", str(folder / "models"), *flags) as running:
        yield running, file


# --- which process has a connection ---------------------------------------------------------------------------------


def frontends_of(server: ServerProcess) -> list[int]:
    """The process ids of its frontends."""
    return [pid for pid in descendants(server.process.pid) if b"frontend_process" in command_of(pid)]


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # ended meanwhile
        return b""


def frontend_of(server: ServerProcess, client: socket.socket) -> int:
    """The process that has the other end of `client`."""
    ours = client.getsockname()[1]
    rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    (inode,) = [row[9] for row in rows if int(row[2].rpartition(":")[2], 16) == ours and row[9] != "0"]
    (pid,) = [pid for pid in frontends_of(server) if f"socket:[{inode}]" in links_of(Path(f"/proc/{pid}/fd"))]
    return pid


def links_of(folder: Path) -> list[str]:
    found = []
    for one in folder.iterdir():
        try:
            found.append(os.readlink(one))
        except OSError:  # closed meanwhile
            continue
    return found


class Stream:
    """Server-sent events of one request on a connection of its own, read as the test asks for them."""

    def __init__(self, server: ServerProcess, path: str, body: Any, **headers: str) -> None:
        self._connection = http.client.HTTPConnection(server.http, timeout=WAIT_S)
        self._connection.request("POST", path, json.dumps(body), {"content-type": "application/json", **headers})
        client = self._connection.sock
        self.answer = self._connection.getresponse()
        self.frontend = frontend_of(server, client)

    def events(self) -> Iterator[tuple[str, Any]]:
        """(id, data); ends with the stream."""
        name = ""
        for line in self.answer:
            if line.startswith(b"id: "):
                name = line[4:].strip().decode()
            elif line.startswith(b"data: ") and b"[DONE]" not in line:
                yield name, json.loads(line[6:])

    def close(self) -> None:
        self.answer.close()
        self._connection.close()


def completion(model: str, tokens: int = TOKENS, **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "one two three", "max_tokens": tokens, "ignore_eos": True, "seed": 3, **more}


@pytest.fixture
def streams() -> Iterator[Callable[..., Stream]]:
    """Opens streams, which are closed after the test."""
    with ExitStack() as opened:

        def open_one(server: ServerProcess, body: Any, **headers: str) -> Stream:
            stream = Stream(server, "/v1/completions", body, **headers)
            opened.callback(stream.close)
            return stream

        yield open_one


def on_both(open_one: Callable[[], Stream]) -> tuple[Stream, Stream]:
    """Streams on connections to two different frontends; more than these are closed."""
    first = open_one()
    for _ in range(64):
        other = open_one()
        if other.frontend != first.frontend:
            return first, other
        other.close()
    raise AssertionError("every connection went to the same process")


# --- protocols ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_stream_is_the_same_on_every_connection(two: ServerProcess, protocol: str) -> None:
    streams = [LiveStream(two, protocol, "slow", "one two three", TOKENS) for _ in range(CONNECTIONS)]
    texts = Counter(stream.finish() for stream in streams)
    assert len(texts) == 1 and next(iter(texts)), texts
    assert not any(stream.error or stream.broken for stream in streams)
    eventually(lambda: json.loads(two.get("/load")) == {"server_load": 0}, 20)


def test_triton_s_client_and_openai_s_get_answers_and_errors(two: ServerProcess) -> None:
    with triton_grpc.InferenceServerClient(two.grpc) as client:
        assert client.is_server_ready() and client.get_server_metadata().name == "triton"
        with pytest.raises(InferenceServerException, match="unknown model: 'none' is not found") as raised:
            client.get_model_metadata("none")
        assert raised.value.status() == "StatusCode.NOT_FOUND"
        with pytest.raises(InferenceServerException, match="unknown model: 'none' is not found"):
            client.infer("none", [])
        with pytest.raises(InferenceServerException, match="decoupled"):
            client.infer("slow", [numbers(1)])
    with openai.OpenAI(base_url=f"http://{two.http}/v1", api_key="none", max_retries=0) as client:
        assert {model.id for model in client.models.list()} >= {"mock", "slow"}
        message = {"role": "user", "content": "hello"}
        chat = client.chat.completions.create(model="mock", messages=[message], max_tokens=4)  # type: ignore[list-item]
        assert chat.usage is not None and chat.usage.completion_tokens <= 4
        answer = client.responses.create(model="mock", input="hello", max_output_tokens=4)
        for _ in range(CONNECTIONS):
            with openai.OpenAI(base_url=f"http://{two.http}/v1", api_key="none") as other:
                assert other.responses.retrieve(answer.id).output_text == answer.output_text
        with pytest.raises(openai.NotFoundError, match="none"):
            client.chat.completions.create(model="none", messages=[message])  # type: ignore[list-item]


def test_a_stored_chat_is_the_same_on_every_connection(keyed: tuple[ServerProcess, Path]) -> None:
    """The host makes and keeps it, and each request counts once in its key's limit."""
    server, _ = keyed
    ask: Any = {"model": "slow", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "store": True}

    def client(key: str = "sk-kept") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://{server.http}/v1", api_key=key, max_retries=0)

    with client() as first:
        made = [first.chat.completions.create(**ask), *first.chat.completions.create(**ask, stream=True)]
        packed = gzip.compress(json.dumps(ask).encode())
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json", **first.auth_headers}
        made.append(
            first.post("/chat/completions", content=packed, options={"headers": headers}, cast_to=ChatCompletion)
        )
        expected = list(dict.fromkeys(one.id for one in made))
        with pytest.raises(openai.RateLimitError):
            first.chat.completions.create(**ask)
    totals = row_of(server, "kept")["total"]
    assert (totals["accepted"], totals["rate_limited"]) == (3, 1)
    for _ in range(CONNECTIONS):
        with client() as other, client("sk-boss") as stranger:
            assert [one.id for one in other.chat.completions.list()] == expected
            with pytest.raises(openai.NotFoundError):
                stranger.chat.completions.retrieve(expected[0])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_answers_of_frontends_and_of_the_host_have_one_request_id(keyed: tuple[ServerProcess, Path], path: str) -> None:
    """Refusals, too."""
    connection = http.client.HTTPConnection(keyed[0].http, timeout=WAIT_S)
    with closing(connection):
        for key, status in (("sk-boss", 200), ("none", 401)):
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", "X-Request-Id": "one"}
            body = {"model": "slow", "prompt" if "completions" in path else "input": "a"}
            connection.request("POST", path, json.dumps(body), headers)
            answer = connection.getresponse()
            answer.read()
            assert (answer.status, answer.headers.get_all("x-request-id")) == (status, ["one"])


def test_triton_s_http_client_gets_answers_and_errors(two: ServerProcess) -> None:
    """In binary, on connections of its own."""
    number = triton_http.InferInput("X", [1], "INT32").set_data_from_numpy(np.array([5], np.int32))
    with triton_http.InferenceServerClient(two.http, concurrency=4) as client:
        assert client.is_server_ready() and client.get_server_metadata()["name"] == "triton"
        whole = {"sequence_start": True, "sequence_end": True}
        asked = [client.async_infer("sums", [number], sequence_id=90 + i, **whole) for i in range(4)]
        assert [one.get_result().as_numpy("SUM").tolist() for one in asked] == [[5]] * 4
        with pytest.raises(InferenceServerException, match="unknown model: 'none' is not found"):
            client.infer("none", [number])
        assert {model["name"] for model in client.get_model_repository_index()} == {"mock", "slow", "sums"}
        assert client.get_inference_statistics("sums")["model_stats"][0]["name"] == "sums"


def test_a_sequence_goes_on_over_any_connection(two: ServerProcess) -> None:
    for number in range(CONNECTIONS):
        with triton_grpc.InferenceServerClient(two.grpc) as client:
            ends = {"sequence_start": number == 0, "sequence_end": number == CONNECTIONS - 1}
            result = client.infer("sums", [numbers(number)], sequence_id=7, **ends)
            assert result.as_numpy("SUM").tolist() == [number * (number + 1) // 2]


def numbers(value: int) -> Any:
    made = triton_grpc.InferInput("X", [1], "INT32")
    made.set_data_from_numpy(np.array([value], np.int32))
    return made


def test_shared_memory_that_one_connection_registers_serves_all(two: ServerProcess) -> None:
    key = f"/llmbackend_frontends_{os.getpid()}"
    region = Path("/dev/shm" + key)
    region.write_bytes(bytes(64))
    try:
        with triton_grpc.InferenceServerClient(two.grpc) as client:
            client.register_system_shared_memory("r", key, 64)
        for number in range(CONNECTIONS):
            with region.open("r+b") as file:
                file.write(number.to_bytes(4, "little"))
            given = triton_grpc.InferInput("X", [1], "INT32")
            given.set_shared_memory("r", 4)
            wanted = triton_grpc.InferRequestedOutput("SUM")
            wanted.set_shared_memory("r", 4, 32)
            with triton_grpc.InferenceServerClient(two.grpc) as client:
                client.infer("sums", [given], outputs=[wanted], sequence_id=9, sequence_start=True, sequence_end=True)
            assert int.from_bytes(region.read_bytes()[32:36], "little") == number
        with triton_grpc.InferenceServerClient(two.grpc) as client:
            client.unregister_system_shared_memory("r")
    finally:
        region.unlink()


def test_passed_on_requests_of_every_form(two: ServerProcess) -> None:
    """On one connection: with a body of known length and in chunks, HEAD, errors."""
    with closing(http.client.HTTPConnection(two.http, timeout=WAIT_S)) as connection:
        for method, path, status in (("GET", "/v2", 200), ("HEAD", "/v2", 405), ("GET", "/none", 404)):
            connection.request(method, path)
            answer = connection.getresponse()
            answer.read()
            assert answer.status == status, path
        body = json.dumps({"ready": True}).encode()
        connection.request("POST", "/v2/repository/index", iter([body[:3], body[3:]]), encode_chunked=True)
        answer = connection.getresponse()
        assert (answer.status, len(json.loads(answer.read()))) == (200, 3)


# --- one view -------------------------------------------------------------------------------------------------------


def test_what_one_connection_changes_every_other_one_sees(two: ServerProcess) -> None:
    for number in range(CONNECTIONS):
        is_load = number % 2 == 1
        assert post(two, f"/v2/repository/models/mock/{'load' if is_load else 'unload'}", {})[0] == 200
        (row,) = [one for one in json.loads(post(two, "/v2/repository/index", {})[1]) if one["name"] == "mock"]
        assert (row["state"] == "READY") is is_load
        assert (post(two, "/v1/completions", completion("mock", 2))[0] == 200) is is_load
        changed = json.loads(post(two, "/v2/trace/setting", {"trace_rate": str(number + 2)})[1])
        assert changed["trace_rate"] == json.loads(two.get("/v2/trace/setting"))["trace_rate"] == str(number + 2)


def test_statistics_and_traces_are_of_all_connections(two: ServerProcess) -> None:
    def successes() -> int:
        (stats,) = json.loads(two.get("/v2/models/mock/stats"))["model_stats"]
        return int(stats["inference_stats"]["success"]["count"])

    before, setting = successes(), {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_count": "-1"}
    file = Path(json.loads(two.get("/v2/trace/setting"))["trace_file"])
    assert post(two, "/v2/models/mock/trace/setting", setting)[0] == 200
    for _ in range(CONNECTIONS):
        assert post(two, "/v2/models/mock/generate", {"text_input": "hello", "parameters": {"max_tokens": 2}})[0] == 200
    assert post(two, "/v2/models/mock/trace/setting", {"trace_level": ["OFF"]})[0] == 200
    eventually(lambda: successes() == before + CONNECTIONS, 20)
    eventually(lambda: file.read_text().count("HTTP_SEND_END") == CONNECTIONS, 20)


def test_a_key_s_limits_hold_over_all_frontends(
    keyed: tuple[ServerProcess, Path], streams: Callable[..., Stream]
) -> None:
    server, _ = keyed
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        asked = [pool.submit(answer_to, server, "sk-few") for _ in range(CONNECTIONS)]
        answers = Counter(one.result() for one in asked)
    (refused,) = set(answers) - {(200, "")}
    assert answers[200, ""] == 5 and answers[refused] == CONNECTIONS - 5
    assert refused == (429, "Rate limit reached for requests per minute (RPM): limit 5")
    body = completion("slow", 200, stream=True)
    first, second = (streams(server, body, authorization="Bearer sk-two") for _ in range(2))
    for _ in range(CONNECTIONS):
        assert answer_to(server, "sk-two") == (429, "API key 'two' is at its limit of 2 concurrent requests")
    first.close()
    second.close()
    eventually(lambda: answer_to(server, "sk-two")[0] == 200, 30)


def answer_to(server: ServerProcess, key: str) -> tuple[int, str]:
    """The status of a short request, and the first sentence of its error."""
    with closing(http.client.HTTPConnection(server.http, timeout=WAIT_S)) as connection:
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        connection.request("POST", "/v1/completions", json.dumps(completion("slow", 1)), headers)
        answer = connection.getresponse()
        content = json.loads(answer.read())
    return answer.status, content.get("error", {}).get("message", "").partition(".")[0]


def row_of(server: ServerProcess, key_name: str) -> Any:
    """What the report on access says of a key."""
    url, headers = f"http://{server.http}/v2/engine/access", {"authorization": "Bearer sk-boss"}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
        (row,) = [one for one in json.load(answer)["keys"] if one["name"] == key_name]
    return row


def test_metrics_and_reports_count_what_every_frontend_did(keyed: tuple[ServerProcess, Path]) -> None:
    server, _ = keyed
    for _ in range(CONNECTIONS):
        assert answer_to(server, "sk-metered")[0] == 200

    def generated() -> float:
        with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=30) as page:
            text = page.read().decode()
        assert text.count("# TYPE llmbackend:api_tokens_total counter") == 1
        found = re.search(r'^llmbackend:api_tokens_total\{key_name="metered",kind="generated"\} (\S+)$', text, re.M)
        return float(found[1]) if found else 0.0

    eventually(lambda: generated() == CONNECTIONS, 20)
    row = row_of(server, "metered")
    assert row["total"]["accepted"] == row["total"]["generated_tokens"] == CONNECTIONS
    assert row["left"]["tokens"] <= 100000


def test_a_hangup_makes_every_frontend_read_its_keys_again(keyed: tuple[ServerProcess, Path]) -> None:
    server, file = keyed
    file.write_text(KEYS + "late:sk-late\n")
    server.process.send_signal(signal.SIGHUP)
    eventually(lambda: all(answer_to(server, "sk-late")[0] == 200 for _ in range(CONNECTIONS)), 30)


# --- ends -----------------------------------------------------------------------------------------------------------


def test_a_frontend_that_is_killed_ends_only_its_own_connections(
    two: ServerProcess, streams: Callable[..., Stream]
) -> None:
    body = completion("slow", stream=True)
    doomed, other = on_both(lambda: streams(two, body))
    before, events = frontends_of(two), doomed.events()
    next(events)
    os.kill(doomed.frontend, signal.SIGKILL)
    assert not any(choice["finish_reason"] for _, data in cut_off(events) for choice in data["choices"])
    *_, (_, last) = other.events()
    assert last["choices"][0]["finish_reason"] == "length"
    eventually(lambda: len(set(frontends_of(two)) - set(before)) == 1 and answers_everywhere(two), 30)
    eventually(lambda: json.loads(two.get("/load")) == {"server_load": 0}, 20)


def cut_off(events: Iterator[Any]) -> Iterator[Any]:
    """Those that come before the connection is lost."""
    with contextlib.suppress(OSError, http.client.HTTPException, grpc.RpcError):
        yield from events


def answers_everywhere(server: ServerProcess) -> bool:
    try:
        return all(server.get("/v2/health/ready") == "" for _ in range(CONNECTIONS))
    except OSError:  # a connection that the killed process had been given
        return False


def test_a_resumable_stream_goes_on_when_its_frontend_has_died(
    two: ServerProcess, streams: Callable[..., Stream]
) -> None:
    body, asked = completion("slow", stream=True), {"x-resumable-stream": "true"}
    expected = [data["choices"] for _, data in streams(two, body, **asked).events()]
    first = streams(two, body, **asked)
    events = first.events()
    got = [next(events) for _ in range(5)]
    os.kill(first.frontend, signal.SIGKILL)
    eventually(lambda: answers_everywhere(two), 30)
    got += streams(two, body, **{"last-event-id": got[-1][0]}).events()
    assert [data["choices"] for _, data in got] == expected


def test_a_resumable_grpc_stream_goes_on_when_every_frontend_has_died(two: ServerProcess) -> None:
    asked = triton_grpc.service_pb2.ModelInferRequest(model_name="slow")
    sampling = json.dumps({"max_tokens": TOKENS, "ignore_eos": True, "seed": 5}).encode()
    for name, datatype, value in (
        ("text_input", "BYTES", b"\3\0\0\0one"),
        ("sampling_parameters", "BYTES", len(sampling).to_bytes(4, "little") + sampling),
        ("stream", "BOOL", b"\1"),
    ):
        asked.inputs.add(name=name, datatype=datatype, shape=[1])
        asked.raw_input_contents.append(value)
    asked.parameters["resumable"].bool_param = True
    begun = list(cut_off(grpc_responses(two, asked, kill_after=3)))
    parameters = begun[-1].parameters
    eventually(lambda: answers_everywhere(two), 30)
    back = triton_grpc.service_pb2.ModelInferRequest(model_name="slow")
    stream = parameters["stream_id"].string_param
    back.parameters["resume_from"].string_param = f"{stream}:{parameters['event_number'].int64_param}"
    rest = list(grpc_responses(two, back))
    back.parameters["resume_from"].string_param = stream
    whole = list(grpc_responses(two, back))
    assert begun + rest == whole and len(whole) > TOKENS // 2


def grpc_responses(server: ServerProcess, request: Any, kill_after: int = 0) -> Iterator[Any]:
    """Of one request; behind `kill_after` of them every frontend is killed."""
    with grpc.insecure_channel(server.grpc) as channel:
        stub = triton_grpc.service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for number, answer in enumerate(stub.ModelStreamInfer(iter([request]), timeout=WAIT_S), 1):
            assert not answer.error_message
            yield answer.infer_response
            if number == kill_after:
                for pid in frontends_of(server):
                    os.kill(pid, signal.SIGKILL)


def test_a_port_that_another_server_s_frontends_have_is_found_before_models_load(two: ServerProcess) -> None:
    with pytest.raises(AssertionError, match="exit code 1"):
        start_server("--model=mock", "--frontend-processes=2", http_port=int(two.http.rpartition(":")[2]))


def test_a_host_that_was_killed_while_all_were_stopped_leaves_neither_ports_nor_folders() -> None:
    with tempfile.TemporaryDirectory() as folder:  # sockets need short paths
        check_what_a_killed_host_leaves(Path(folder))


def check_what_a_killed_host_leaves(temporary: Path) -> None:
    begin = ("--model=mock", "--frontend-processes=2")
    killed = start_server(*begin, variables={"TMPDIR": str(temporary)})
    port = int(killed.http.rpartition(":")[2])
    below = descendants(killed.process.pid)
    for pid in (*below, killed.process.pid):
        os.kill(pid, signal.SIGSTOP)
    killed.process.kill()
    killed.process.wait()
    assert killed.process.stdout is not None
    killed.process.stdout.close()
    eventually(lambda: can_bind(port), WAIT_S)  # nobody has been continued
    for pid in below:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    eventually(lambda: not any(map(is_alive, below)), WAIT_S)
    assert {path.name.rsplit("-", 1)[0] for path in temporary.iterdir()} >= {"llmbackend-host"}
    second = start_server(*begin, http_port=port, variables={"TMPDIR": str(temporary)})
    assert len(list(temporary.glob("llmbackend-host-*"))) == 1
    assert stop_server(second) == 0
    assert not list(temporary.glob("llmbackend-*-*"))


def can_bind(port: int) -> bool:
    with closing(socket.socket()) as claim, contextlib.suppress(OSError):
        claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        claim.bind(("127.0.0.1", port))
        return True
    return False


def test_a_server_that_stops_takes_nothing_new_and_lets_streams_run_to_their_end(
    make_server: Callable[..., ServerProcess], tmp_path: Path, streams: Callable[..., Stream]
) -> None:
    """gRPC refuses connections, as a server of one process does, and Triton."""
    write_mock_model(tmp_path, "slow", mock_step_ms=20)
    server = make_server("--model-repository", str(tmp_path), "--frontend-processes=2")
    calls = [LiveStream(server, "grpc", "slow", f"the {number}th", 300) for number in range(4)]
    for call in calls:
        call.wait_until_begun()
    body = completion("slow", 300, stream=True)
    events = [stream.events() for stream in on_both(lambda: streams(server, body))]
    began = [next(one) for one in events]
    server.process.send_signal(signal.SIGTERM)
    eventually(lambda: is_refused(server.grpc))
    eventually(lambda: post(server, "/v1/completions", completion("slow", 1))[0] == 503, 20)
    assert server.process.poll() is None
    late = LiveStream(server, "grpc", "slow", "late", 5)
    assert late.finish() == "" and "Connection refused" in (late.error or late.broken)
    texts = {
        "".join(choice["text"] for _, data in (first, *rest) for choice in data["choices"])
        for first, rest in zip(began, events, strict=True)
    }
    assert len(texts) == 1 and len(texts.pop()) >= 150
    assert all(call.finish() for call in calls) and not any(call.error or call.broken for call in calls)
    assert server.process.wait(timeout=WAIT_S) == 0


def is_refused(address: str) -> bool:
    host, port = address.split(":")
    try:
        socket.create_connection((host, int(port))).close()
    except ConnectionRefusedError:
        return True
    return False


def test_the_death_of_the_server_ends_its_frontends(two: ServerProcess) -> None:
    """The last test of this server."""
    eventually(lambda: len(frontends_of(two)) == 2, 30)
    frontends = frontends_of(two)
    two.process.kill()
    eventually(lambda: not any(map(command_of, frontends)) and not listens_at(two.http), 30)


def listens_at(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=5):
            return True
    except OSError:
        return False
