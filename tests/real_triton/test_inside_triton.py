"""The same model directory under this server and inside NVIDIA's: same tokens, real cancels, a model that ends.

Runs when there is a real Triton (LLMBACKEND_REAL_TRITON, docs/inside_triton.md), and against it: a stub's abort, a
deadlock with Triton's process or a response that Triton does not take shows here and nowhere else.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from tests.helpers.grpc_streams import GrpcStream
from tests.helpers.server_process import start_server, stop_server
from tests.helpers.triton_server import Addresses, TritonServer, triton_server, why_not_here
from tests.helpers.waiting import eventually

pytestmark = [
    pytest.mark.skipif(bool(why_not_here()), reason=why_not_here() or "-"),
    pytest.mark.timeout(300),
]
ROOT = Path(__file__).resolve().parents[2]
STEP_MS = 40.0
STUB = "triton_python_backend_stub"
PROMPTS = ["What is Triton?", "Zażółć gęślą jaźń", "Count: 1, 2, 3,", "def f(x):"]


@dataclass(frozen=True)
class Both:
    """The two servers on one repository."""

    triton: TritonServer
    ours: Addresses

    @property
    def addresses(self) -> dict[str, Addresses]:
        return {"inside Triton": self.triton.addresses, "this server": self.ours}


def write_mock(repository: Path, name: str, pbtxt: str = "", backend: str = "llm", **arguments: Any) -> None:
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version / "model.json").write_text(json.dumps({"model": "mock", "max_model_len": 512, **arguments}))
    (version.parent / "config.pbtxt").write_text(f'backend: "{backend}"\n{pbtxt}')


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, faults: Path) -> Iterator[Both]:
    work = tmp_path_factory.mktemp("triton")
    repository = work / "repository"
    shutil.copytree(ROOT / "model_repository" / "demo", repository / "demo")
    shutil.copytree(ROOT / "model_repository_pipelines", repository, dirs_exist_ok=True)
    (work / "model_repository").symlink_to(ROOT / "model_repository")
    for name in ("preprocessing", "postprocessing"):  # a stub looks for modules beside its model
        (repository / name / "1" / "tokenizers").symlink_to(work / "backends" / "llm" / "packages" / "tokenizers")
    write_mock(repository, "slow", mock_step_ms=STEP_MS)
    write_mock(repository, "whole", "model_transaction_policy { decoupled: false }")
    write_mock(repository, "mortal", mock_step_ms=10.0, fault_directory=str(faults))
    write_mock(
        repository,
        "doomed",
        'parameters { key: "ENABLE_VLLM_HEALTH_CHECK" value { string_value: "true" } }',
        fault_directory=str(faults / "doomed"),
        max_engine_failures=1,
    )
    write_mock(repository, "of_vllm", backend="vllm", disable_log_requests=True, gpu_memory_utilization=0.5)
    (faults / "doomed").mkdir()
    models = [f"--load-model={path.name}" for path in repository.iterdir() if path.is_dir()]
    write_mock(repository, "unlucky", no_such_argument=1)
    flags = ["--model-control-mode=explicit", *models]
    with triton_server(repository, work, *flags) as triton, our_server(repository, models) as ours:
        yield Both(triton, ours)


@contextlib.contextmanager
def our_server(repository: Path, models: list[str]) -> Iterator[Addresses]:
    flags = [word for model in models for word in model.split("=")]
    running = start_server("--model-repository", str(repository), "--model-control-mode", "explicit", *flags)
    try:
        yield Addresses(running.http, running.grpc, running.metrics)
    finally:
        exit_code = stop_server(running)
    assert exit_code == 0


def infer(address: Addresses, model: str, body: dict[str, Any], path: str = "generate") -> tuple[int, Any]:
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"http://{address.http}/v2/models/{model}/{path}", data, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def test_the_same_tokens_over_grpc_streams_under_both_servers(both: Both) -> None:
    samplings: list[dict[str, Any]] = [
        {"max_tokens": 48, "temperature": 0, "logprobs": 2},
        {"max_tokens": 48, "temperature": 0.9, "seed": 7, "top_p": 0.9},
        {"max_tokens": 32, "temperature": 1.2, "seed": 8, "repetition_penalty": 1.2, "stop": ["e"], "min_tokens": 4},
    ]
    for prompt in PROMPTS:
        for sampling in samplings:
            got = {}
            for name, address in both.addresses.items():
                streams = [GrpcStream(address.grpc, "demo", prompt, sampling, stream) for stream in (True, False)]
                streamed, whole = (one.finish() for one in streams)
                assert streamed.error is None, streamed.error
                assert (streamed.token_ids, streamed.text) == (whole.token_ids, whole.text), name
                got[name] = (streamed.token_ids, streamed.text, streamed.finish_reason, streamed.logprobs)
            assert got["inside Triton"] == got["this server"], (prompt, sampling)
            assert got["this server"][0]


def test_many_streams_at_once_give_what_each_gives_alone(both: Both) -> None:
    address = both.triton.addresses.grpc
    samplings = [{"max_tokens": 24, "temperature": 0.8, "seed": seed} for seed in range(24)]
    alone = [GrpcStream(address, "demo", PROMPTS[0], one).finish() for one in samplings[:4]]
    together = [GrpcStream(address, "demo", PROMPTS[0], one) for one in samplings]
    together = [one.finish() for one in together]
    assert [one.error for one in together] == [None] * 24
    assert [one.token_ids for one in together[:4]] == [one.token_ids for one in alone]


def test_a_cancel_frees_the_kv_memory_within_a_step_under_both(both: Both) -> None:
    steps = {name: _steps_after_a_cancel(name, address) for name, address in both.addresses.items()}
    # The way of a cancel takes its time (inside Triton a question every few milliseconds); then one step is finished.
    assert all(extra <= 5 for extra in steps.values()), steps


def test_a_client_that_disconnects_from_generate_stream_is_a_cancel(both: Both) -> None:
    address = both.triton.addresses
    body = {"text_input": "x", "stream": True, "parameters": {"max_tokens": 400, "ignore_eos": True}}
    request = urllib.request.Request(
        f"http://{address.http}/v2/models/slow/generate_stream", json.dumps(body).encode(), method="POST"
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.readline().startswith(b"data: ")
        eventually(lambda: address.metric("vllm:num_requests_running", "slow"))
    eventually(lambda: not address.metric("vllm:num_requests_running", "slow"), 5)


def test_generate_and_its_errors(both: Both) -> None:
    body = {"text_input": "hello", "parameters": {"max_tokens": 8, "temperature": 0}}
    answers = [infer(address, "demo", body) for address in both.addresses.values()]
    assert answers[0] == answers[1]
    assert answers[0][1]["text_output"].startswith("hello")
    for bad, told in (
        ({"text_input": "x", "parameters": {"max_tokens": -1}}, "'max_tokens' is"),
        ({"text_input": "x", "parameters": {"lora_name": "a"}}, "LoRA feature is not enabled."),
        ({"text_input": "x" * 100_000}, "expected at most"),
    ):
        status, answer = infer(both.triton.addresses, "demo", bad)
        assert status == 400 and told in answer["error"]
    assert infer(both.triton.addresses, "demo", body) == answers[0]


def test_a_model_that_is_not_decoupled_answers_infer(both: Both) -> None:
    inputs = [
        {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hi"]},
        {"name": "sampling_parameters", "datatype": "BYTES", "shape": [1], "data": ['{"temperature": 0}']},
    ]
    answers = [infer(address, "whole", {"inputs": inputs}, "infer") for address in both.addresses.values()]
    assert [status for status, _ in answers] == [200, 200]
    texts = [{one["name"]: one["data"] for one in answer["outputs"]}["text_output"] for _, answer in answers]
    assert texts[0] == texts[1]


def test_the_pipeline_of_tensorrtllms_layout_gives_the_same_under_both(both: Both) -> None:
    bodies: list[dict[str, Any]] = [
        {"text_input": PROMPTS[0], "max_tokens": 20},
        {
            "text_input": PROMPTS[1],
            "max_tokens": 20,
            "top_k": 20,
            "temperature": 1.1,
            "seed": 4,
            "return_log_probs": True,
        },
        {"text_input": PROMPTS[2], "max_tokens": 30, "stop_words": ["a", "e"]},
    ]
    for body in bodies:
        answers = [infer(address, "ensemble", body) for address in both.addresses.values()]
        assert answers[0] == answers[1]
        assert answers[0][0] == 200, answers[0]
        streams = [_events(address, "tensorrt_llm_bls", body | {"stream": True}) for address in both.addresses.values()]
        assert streams[0] == streams[1]
        assert "".join(event["text_output"] for event in streams[0]) == answers[0][1]["text_output"]
    refused = [infer(address, "ensemble", bodies[0] | {"beam_width": 2}) for address in both.addresses.values()]
    assert all("'beam_width' is 2" in answer["error"] for _, answer in refused), refused


def test_an_engines_death_loses_nothing_and_spares_the_stub(both: Both, faults: Path) -> None:
    address = both.triton.addresses
    sampling = {"max_tokens": 60, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    whole = GrpcStream(address.grpc, "mortal", "go", sampling).finish()
    stubs = {pid for pid, command in both.triton.children().items() if STUB in command}
    for fault in ("segfault", "exit", "malformed"):
        stream = GrpcStream(address.grpc, "mortal", "go", sampling)
        assert stream.began.wait(30)
        (faults / fault).touch()
        assert stream.finish().error is None, fault
        assert stream.token_ids == whole.token_ids, fault
    stream = GrpcStream(address.grpc, "mortal", "go", sampling)
    assert stream.began.wait(30)
    (engine,) = both.triton.children(_fork_server_of(both.triton, "mortal"))
    os.kill(engine, signal.SIGKILL)
    assert stream.finish().token_ids == whole.token_ids
    now = {pid for pid, command in both.triton.children().items() if STUB in command}
    assert now == stubs
    eventually(lambda: address.metric("llmbackend:engine_restarts_total", "mortal") == 4)


def test_custom_metrics_are_in_tritons_metrics(both: Both) -> None:
    address = both.triton.addresses
    GrpcStream(address.grpc, "of_vllm", "count", {"max_tokens": 5, "ignore_eos": True}).finish()
    expected = {
        "request_success_total": 1,
        "generation_tokens_total": 5,
        "request_generation_tokens_sum": 5,
        "time_to_first_token_seconds_count": 1,
        "inter_token_latency_seconds_count": 4,
    }
    eventually(lambda: {name: address.metric(f"vllm:{name}", "of_vllm") for name in expected} == expected)
    labels = 'engine="0",le="+Inf",model="of_vllm",model_name="of_vllm",version="1"'
    assert f"vllm:time_to_first_token_seconds_bucket{{{labels}}} 1" in address.metrics_text()
    assert both.ours.metric("vllm:request_success_total", "of_vllm") == 0


def test_idle_models_use_no_cpu(both: Both) -> None:
    """The thread that asks Triton for cancels sleeps when there is no request to ask about."""
    eventually(lambda: not both.triton.addresses.metric("vllm:num_requests_running", "slow"))
    time.sleep(0.5)
    pids = list(both.triton.children())
    before_s = sum(map(_cpu_s, pids))
    time.sleep(2.0)
    assert sum(map(_cpu_s, pids)) - before_s < 0.3


def test_unload_waits_for_the_streams_and_then_ends_the_engine(both: Both) -> None:
    address = both.triton.addresses
    with triton_grpc.InferenceServerClient(address.grpc) as client:
        stream = GrpcStream(address.grpc, "slow", "last words", {"max_tokens": 30, "ignore_eos": True})
        assert stream.began.wait(30)
        fork_server = _fork_server_of(both.triton, "slow")
        engines = {fork_server, *both.triton.children(fork_server)}
        client.unload_model("slow")
        assert len(stream.finish().token_ids) == 30
        eventually(lambda: _state(client, "slow") == ("UNAVAILABLE", "unloaded"))
        assert "model 'slow' is finalised" in both.triton.log.read_text()
        assert address.metric("vllm:num_requests_running", "slow") is None
        assert not engines & both.triton.children().keys()
        client.load_model("slow")
        assert (
            len(GrpcStream(address.grpc, "slow", "again", {"max_tokens": 3, "ignore_eos": True}).finish().token_ids)
            == 3
        )


def test_a_model_whose_engine_is_given_up_is_unloaded(both: Both, faults: Path) -> None:
    """What vllm_backend does with ENABLE_VLLM_HEALTH_CHECK."""
    address = both.triton.addresses
    (faults / "doomed" / "poison").write_text("1")
    with triton_grpc.InferenceServerClient(address.grpc) as client:
        eventually(lambda: _is_refused(address, client), 60)


def test_a_bad_model_is_a_load_error_with_its_reason(both: Both) -> None:
    with triton_grpc.InferenceServerClient(both.triton.addresses.grpc) as client:
        # Not over a model that is served: this Triton then waits for it until its exit timeout, with any backend.
        with pytest.raises(InferenceServerException, match="unknown engine argument 'no_such_argument'"):
            client.load_model("unlucky")
        assert not client.is_model_ready("unlucky")
        assert client.is_model_ready("demo")


def _is_refused(address: Addresses, client: Any) -> bool:
    infer(address, "doomed", {"text_input": chr(1), "parameters": {"max_tokens": 1}})
    return _state(client, "doomed")[0] != "READY"


def _state(client: Any, model: str) -> tuple[str, str]:
    return next((one.state, one.reason) for one in client.get_model_repository_index().models if one.name == model)


def _fork_server_of(triton: TritonServer, model: str) -> int:
    """The process that a model's stub has started, and that forks its engine."""
    stubs = [pid for pid, command in triton.children().items() if STUB in command and f" {model}_" in command]
    (stub,) = stubs
    below = triton.children(stub)
    (fork_server,) = (pid for pid in below if triton.children(pid))
    return fork_server


def _steps_after_a_cancel(name: str, address: Addresses) -> float:
    """How many tokens the engine made that the client had not seen when it gave up."""

    def metric(metric: str) -> float:
        return address.metric(f"vllm:{metric}", "slow") or 0.0

    before = metric("generation_tokens_total")
    stream = GrpcStream(address.grpc, "slow", "cancel me", {"max_tokens": 400, "ignore_eos": True})
    assert stream.began.wait(30)
    eventually(lambda: metric("kv_cache_usage_perc"))
    came = len(stream.token_ids)
    stream.cancel()
    eventually(lambda: not metric("num_requests_running"), 5)
    eventually(lambda: not metric("kv_cache_usage_perc"), 5)
    time.sleep(5 * STEP_MS / 1e3)  # what was counted late is counted now
    assert address.status("/v2/models/slow/ready") == 200
    return metric("generation_tokens_total") - before - came


def _events(address: Addresses, model: str, body: dict[str, Any]) -> list[Any]:
    url = f"http://{address.http}/v2/models/{model}/generate_stream"
    with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
