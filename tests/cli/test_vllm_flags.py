"""A command line of `vllm serve`: every flag is known, its notation is read, and what it says holds."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.tracing.trace import TraceLevel
from llmbackend.server.settings import ServerSettings
from tests.helpers.command_lines import CommandLine
from tests.helpers.server_process import start_server, stop_server
from tools import vllm_flags

Settings = Callable[..., ServerSettings]


@pytest.fixture
def settings(command_line: CommandLine) -> Settings:
    return command_line.settings


@pytest.fixture
def refusal(command_line: CommandLine) -> Callable[..., str]:
    return command_line.refusal_of_flags


def engine_arguments(settings: ServerSettings) -> dict[str, Any]:
    [repository] = settings.options.model_repositories
    arguments: dict[str, Any] = json.loads((repository / settings.flag_model / "1" / "model.json").read_text())
    return arguments


def test_every_flag_of_vllm_is_known_and_on_the_page() -> None:
    page = vllm_flags.PAGE.read_text()
    assert len(vllm_flags.flags()) == 317
    assert "| unknown |" not in vllm_flags.table()
    assert vllm_flags.page(page) == page, "docs/command_line.md: run python -m tools.vllm_flags"


def test_a_flag_without_effect_is_accepted_with_its_reason(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    served = settings("mock", "--max-log-len", "10", "--enable-expert-parallel", "--no-enable-log-deltas", "-ep")
    assert engine_arguments(served) == {"model": "mock"}
    warnings = capsys.readouterr().err
    assert "--max-log-len has no effect: requests are logged only with --log-requests" in warnings
    assert "--enable-expert-parallel has no effect here: every rank has a part of each expert" in warnings


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--headless",), "--headless is not supported: several machines are one server with --cluster"),
        (("--grpc",), "--grpc is not supported: "),
        (("--response-role", "bot"), "--response-role is 'bot', which is not supported: "),
        (("--middleware", "no_such.Class"), "--middleware 'no_such.Class' cannot be imported: "),
        (("--middleware", "json.JSONDecodeErro"), "--middleware 'json.JSONDecodeErro' cannot be imported: "),
        (("--middleware", "json.loads"), "--middleware 'json.loads' is neither a class nor a coroutine function"),
        (("--middleware", "json.JSONDecoder", "--frontend-processes", "2"), "--middleware cannot be combined with"),
        (("--hf-overrides", '{"a": 1}'), "--hf-overrides is "),
        (("-dp", "2"), "--data-parallel-size is '2', only 1 is supported: an engine has one copy of the model"),
        (("--reasoning-parser-plugin", "x.py"), "--reasoning-parser-plugin is 'x.py', only \"\" or null is supported"),
        (("--revision", "v1"), "--revision is 'v1', expected only for the id of a hub, not for 'mock'"),
        (("--root-path", "api"), "--root-path is 'api', expected a path that begins with /"),
        (("--port", "1", "--http-port", "2"), "--port is 1 and --http-port 2: they are one port"),
        (("--model", "mock"), "the model is given twice: 'mock' and --model 'mock'"),
        (("--served-model-name", "a,b"), "--served-model-name is 'a,b', expected printable characters without commas"),
        (("--spec-tokens", "2", "--speculative-config", "{}"), "give either --speculative-config or --spec-…"),
        (("--log-level", "loud"), "--log-level is 'loud', expected one of debug, info, warning, error, critical"),
        (("--ssl-ciphers", "x"), "--ssl-ca-certs, --ssl-cert-reqs and --ssl-ciphers need --ssl-certfile"),
    ],
)
def test_what_would_change_answers_is_refused(
    refusal: Callable[..., str], arguments: tuple[str, ...], reason: str
) -> None:
    assert reason in refusal("mock", *arguments)


def test_a_name_without_a_model_is_refused(refusal: Callable[..., str]) -> None:
    assert "--served-model-name needs a model" in refusal("--served-model-name", "a")


def test_refused_flags_are_accepted_with_what_they_are_anyway(settings: Settings) -> None:
    settings("mock", "--no-headless", "--response-role", "assistant", "-dp", "1", "--tool-strict-level", "auto")


def test_the_notation_of_vllm(settings: Settings) -> None:
    served = settings(
        *("mock", "--max_model_len", "4k", "-tp", "1", "-O3", "--max_num_seqs=3"),
        *("--speculative-config.method", "ngram", "--speculative-config.num_speculative_tokens=2"),
        *("--served-model-name", "first", "org/second:v1", "--api-key", "a", "b"),
        *("--num-gpu-blocks-override", "64", "--cudagraph-capture-sizes", "1", "2"),
    )
    arguments = engine_arguments(served)
    assert arguments.pop("speculative_config")["num_speculative_tokens"] == 2
    assert arguments == {
        "model": "mock",
        "max_model_len": 4000,
        "tensor_parallel_size": 1,
        "max_num_seqs": 3,
        "num_kv_blocks": 64,
        "cudagraph_capture_sizes": [1, 2],
    }
    assert served.access.api_keys == ("a", "b")
    assert served.flag_model == "first"


def test_short_flags_of_speculation(settings: Settings) -> None:
    arguments = engine_arguments(settings("mock", "--spec-method", "ngram", "--spec-tokens", "3"))
    assert arguments["speculative_config"]["num_speculative_tokens"] == 3


def test_a_file_of_flags(settings: Settings, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: mock\nport: 8123\nmax-model-len: 2048\nmax_num_seqs: 4\nenable-prefix-caching: false\n"
        "served-model-name: [one, two]\nspeculative-config: {method: ngram, num_speculative_tokens: 2}\n"
        "allow-metrics: false\n"
    )
    served = settings("--config", str(file), "--max-num-seqs", "8")
    arguments = engine_arguments(served)
    assert (served.http.port, served.flag_model, arguments["max_num_seqs"]) == (8123, "one", 8)
    assert (arguments["max_model_len"], arguments["enable_prefix_caching"]) == (2048, False)
    assert arguments["speculative_config"]["num_speculative_tokens"] == 2
    assert engine_arguments(settings("mock", "--transport=inline", f"--config={file}"))["transport"] == "inline"


@pytest.mark.parametrize(
    ("text", "reason"),
    [("nosuch: 1", "has 'nosuch', which is not a flag"), ("- a", "has no flags"), ("a: [", "cannot be read")],
)
def test_a_wrong_file_of_flags(refusal: Callable[..., str], tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    assert reason in refusal("mock", "--config", str(tmp_path / "x.yaml"))


def test_with_a_model_one_port_is_opened(settings: Settings) -> None:
    for arguments in (("mock",), ("--model", "mock", "--port", "8000"), ("mock", "--uds", "s.sock")):
        served = settings(*arguments)
        assert (served.http.enabled, served.grpc.enabled, served.metrics.enabled) == (True, False, False)
        assert served.protocols.http_metrics and served.is_on_one_port
    served = settings("mock", "--grpc-port", "9001", "--metrics-port", "9002", "--host", "127.0.0.1", "--port", "9000")
    ports = [(each.address, each.port, each.enabled) for each in (served.http, served.grpc, served.metrics)]
    assert ports == [("127.0.0.1", port, True) for port in (9000, 9001, 9002)]
    served = settings("--model", "mock")
    assert all(each.enabled for each in (served.http, served.grpc, served.metrics)) and not served.is_on_one_port


def test_logs_and_traces(settings: Settings) -> None:
    log = settings("mock", "--log-level", "warning").log
    assert (log.verbose, log.info, log.warning, log.error) == (0, False, True, True)
    assert settings("mock", "--log-level", "debug").log.verbose == 1
    log = settings("mock", "--log-level", "info", "--log-info=false", "--log-verbose", "2").log
    assert (log.verbose, log.info) == (0, True), "it replaces Triton's flags"
    trace = settings("mock", "--otlp-traces-endpoint", "http://127.0.0.1:4318/v1/traces").options.trace
    assert (trace.level, trace.rate, trace.mode) == (TraceLevel.TIMESTAMPS, 1, "opentelemetry")
    assert trace.open_telemetry.url == "http://127.0.0.1:4318/v1/traces"
    assert settings("mock", "--enable-log-requests").access.log_requests


def test_vllms_environment_variables_are_defaults_of_flags(
    settings: Settings, refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kubernetes = ("VLLM_SERVICE_HOST", "VLLM_PORT", "VLLM_PORT_8000_TCP_ADDR", "VLLM_CHAT_SERVICE_PORT")
    for name in ("VLLM_USE_MODELSCOPE", "VLLM_CPU_OMP_THREADS_BIND", *kubernetes):
        monkeypatch.setenv(name, "0")
    for name, value in (("CPU_KVCACHE_SPACE", "3"), ("BATCH_INVARIANT", "1"), ("LOGGING_LEVEL", "ERROR")):
        monkeypatch.setenv(f"VLLM_{name}", value)
    served = settings("mock")
    arguments = engine_arguments(served)
    assert (int(arguments["kv_cache_memory_bytes"]), arguments["batch_invariant"]) == (3 << 30, True)
    assert (served.log.warning, served.log.error) == (False, True)
    warning = "environment variables without effect here: VLLM_CPU_OMP_THREADS_BIND, VLLM_USE_MODELSCOPE\n"
    assert warning in capsys.readouterr().err
    given = ("--kv-cache-memory-bytes", "1G", "--no-batch-invariant", "--log-level", "info")
    served = settings("mock", *given)
    arguments = engine_arguments(served)
    assert (int(arguments["kv_cache_memory_bytes"]), arguments["batch_invariant"]) == (1 << 30, False)
    assert served.log.info
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "much")
    assert "VLLM_CPU_KVCACHE_SPACE is 'much', expected a whole number of GiB" in refusal("mock")


def test_the_format_of_a_quantized_checkpoint_may_be_named(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "quantization" not in engine_arguments(settings("mock", "--quantization", "awq"))
    assert "--quantization awq has no effect here" in capsys.readouterr().err


def test_an_automatic_context(settings: Settings) -> None:
    for text in ("auto", "-1"):
        assert engine_arguments(settings("mock", "--max-model-len", text))["max_model_len"] in (-1, "-1", "auto")


def test_operators_see_flags_but_no_secret(settings: Settings) -> None:
    engine = ("--max-num-seqs", "7", "--max-model-len", "2k", "--request-timeout-s", "1.5", "--dtype", "float32")
    assert settings("mock", "--served-model-name", "a", "b", *engine, "--api-key", "12345678").flags == {
        "MODEL": "mock",
        "--served-model-name": "a, b",
        "--max-num-seqs": "7",
        "--max-model-len": "2k",
        "--request-timeout-s": "1.5",
        "--dtype": "float32",
        "--api-key": "(not shown)",
    }


def test_the_key_of_vllms_variable(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "one")
    assert settings("mock").access.api_keys == ("one",)
    assert "VLLM_API_KEY" not in os.environ
    monkeypatch.setenv("VLLM_API_KEY", "one")
    assert settings("mock", "--api-key", "two").access.api_keys == ("two",)


def test_other_names_of_own_flags(settings: Settings) -> None:
    served = settings(
        *("mock", "--api-server-count", "2", "--shutdown-timeout", "7", "--max-num-queued-reqs", "9"),
        *("--h11-max-header-count", "50", "--h11-max-incomplete-event-size", "2048"),
    )
    assert (served.frontend_processes, served.exit_timeout_s) == (2, 7)
    assert served.limits.inference.max_concurrent_requests == 9
    assert (served.limits.http.max_headers, served.limits.http.max_header_bytes) == (50, 2048)


def test_the_name_is_the_model_as_it_was_given(settings: Settings, tmp_path: Path) -> None:
    served = settings("mock", "--served-model-name", "Qwen/Qwen3-0.6B", "other")
    assert served.flag_model == "Qwen3-0.6B"
    server = InferenceServer(served.options)
    server.start()
    try:
        for name in ("Qwen/Qwen3-0.6B", "other", "Qwen3-0.6B"):
            assert server.model_metadata(name).name == "Qwen3-0.6B"
    finally:
        assert server.stop(timeout_s=20)


TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}text{% else %}parts{% endif %}{% endfor %}"
    "{{ style }}"
)


def test_a_server_answers_as_its_flags_say() -> None:
    """Defaults of requests, the chat template's variables and its content, fingerprint."""
    flags = (
        *("mock", "--return-tokens-as-token-ids", "--enable-force-include-usage", "--stream-interval", "3"),
        *("--fingerprint-mode", "custom", "--fingerprint-value", "mine", "--chat-template", TEMPLATE),
        *("--chat-template-content-format", "openai", "--default-chat-template-kwargs.style", "plain"),
        *("--max-logprobs", "2"),
    )
    server = start_server(*flags)
    connection = http.client.HTTPConnection(server.http, timeout=30)
    try:
        messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
        for kwargs, prompt in (({}, "partsplain"), ({"style": "own"}, "partsown")):
            body = {"messages": messages, "chat_template_kwargs": kwargs, "return_token_strs": True}
            tokens = json.loads(ask(connection, "POST", "/tokenize", body)[1])
            assert "".join(tokens["token_strs"]).endswith(prompt)
        body = {"messages": messages, "max_tokens": 6, "logprobs": True}
        answer = json.loads(ask(connection, "POST", "/v1/chat/completions", body)[1])
        assert answer["system_fingerprint"] == "mine"
        [*_, last] = answer["choices"][0]["logprobs"]["content"]
        assert last["token"].startswith("token_id:")
        _, events, _ = ask(
            connection, "POST", "/v1/completions", {"prompt": "a", "max_tokens": 7, "ignore_eos": True, "stream": True}
        )
        chunks = [json.loads(line[6:]) for line in events.splitlines() if line.startswith(b"data: {")]
        assert chunks[-1]["usage"]["completion_tokens"] == 7
        assert len([chunk for chunk in chunks if chunk["choices"] and chunk["choices"][0]["text"]]) <= 3
        connection.close()
    finally:
        assert stop_server(server) == 0


def ask(connection: http.client.HTTPConnection, method: str, path: str, body: Any = None) -> tuple[int, Any, Any]:
    headers = {"content-type": "application/json"}
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    answer = connection.getresponse()
    return answer.status, answer.read(), answer.headers


def test_a_server_by_the_names_that_clients_have() -> None:
    flags = ("mock", "--served-model-name", "org/m:v1", "b", "--root-path", "/proxy", "--enable-request-id-headers")
    server = start_server(*flags, "--disable-fastapi-docs")
    connection = http.client.HTTPConnection(server.http, timeout=30)
    try:
        models = json.loads(ask(connection, "GET", "/v1/models")[1])["data"]
        assert [(model["id"], model["root"]) for model in models] == [("org/m:v1", "org/m:v1"), ("b", "org/m:v1")]
        for name in ("org/m:v1", "b", None):
            body = {"prompt": "a", "max_tokens": 2, **({} if name is None else {"model": name})}
            status, content, headers = ask(connection, "POST", "/proxy/v1/completions", body)
            assert (status, len(headers["x-request-id"])) == (200, 32)
            assert json.loads(content)["model"] == (name or "org/m:v1")
        assert ask(connection, "GET", "/v1/models/org/m:v1")[0] == 200
        for path in ("org%2Fm:v1", "org%2fm%3Av1", "b", "m_v1"):
            status, content, _ = ask(connection, "POST", f"/v2/models/{path}/generate", {"text_input": "a"})
            assert (status, json.loads(content)["model_name"]) == (200, "m_v1")
            assert ask(connection, "GET", f"/v2/models/{path}/ready")[0] == 200
        assert ask(connection, "POST", "/v2/models/org%2Fother/generate", {"text_input": "a"})[0] == 404
        assert ask(connection, "GET", "/openapi.json")[0] == 404
        metrics = ask(connection, "GET", "/metrics")[1].decode()
        assert 'vllm:num_requests_waiting{engine="0",model="m_v1",model_name="org/m:v1",version="1"} 0' in metrics
        assert re.search(r'^vllm:cache_config_info{block_size="32",.*num_gpu_blocks="\d+"', metrics, re.MULTILINE)
        connection.request("GET", "/v1/models", headers={"X-Request-Id": "mine"})
        assert connection.getresponse().headers["x-request-id"] == "mine"
    finally:
        connection.close()
        assert stop_server(server) == 0


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as left_by_a_dead_server:
        left_by_a_dead_server.bind(str(path))
    command = [sys.executable, "-m", "llmbackend.cli", "serve", "mock", "--uds", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, contextlib.ExitStack() as stack:
        stack.callback(server.kill)
        assert server.stdout is not None
        lines = list(itertools.takewhile(lambda line: "curl" not in line, server.stdout))
        assert f"http     unix:{path}" in "".join(lines)
        assert "--grpc-port and --metrics-port open others" in "".join(lines)
        with contextlib.closing(http.client.HTTPConnection("localhost", timeout=30)) as connection:
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.connect(str(path))
            assert ask(connection, "POST", "/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
            assert server.poll() is None
            server.send_signal(signal.SIGTERM)
            assert server.wait(timeout=40) == 0
