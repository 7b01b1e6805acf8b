"""The flags of `vllm serve` that have an effect, each with the test that shows it; and servers started with many."""

from __future__ import annotations

import http.client
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from llmbackend.cli.serve import app
from llmbackend.demo import DEMO_REPOSITORY
from tests.helpers.hub import hub_environment, hub_of
from tests.helpers.server_process import ROOT, ServerProcess, running_server, start_server, stop_server
from tools import vllm_flags

CHECKPOINT = DEMO_REPOSITORY / "demo" / "1"
PAGE = "https://page.example"
_HERE, _FLAGS = "cli/test_vllm_flag_effects.py", "cli/test_vllm_flags.py"
_DEMO = f"{_HERE}::test_a_server_of_the_demo_model"
_ANSWERS, _NAMES = f"{_FLAGS}::test_a_server_answers_as_its_flags_say", f"{_FLAGS}::test_a_server_by_the_names"
_TLS = "access/test_tls_e2e.py::test"

EFFECTS = {
    "--allow-credentials": _DEMO,
    "--allowed-headers": _DEMO,
    "--allowed-methods": _DEMO,
    "--allowed-origins": _DEMO,
    "--api-key": "access/test_access_e2e.py::test",
    "--api-server-count": "e2e/test_frontend_processes.py::test",
    "--async-scheduling": "engine/test_overlap.py::test_steps_are_read_one_by_one_where_that_is_asked_for",
    "--block-size": _DEMO,
    "--chat-template": _ANSWERS,
    "--chat-template-content-format": _ANSWERS,
    "--config": f"{_FLAGS}::test_a_file_of_flags",
    "--cudagraph-capture-sizes": "engine/gpu/test_gpu_memory.py::test_room_is_left_for_graphs_and_they_are_captured",
    "--default-chat-template-kwargs": _ANSWERS,
    "--disable-fastapi-docs": _NAMES,
    "--download-dir": "e2e/test_hub.py::test_a_folder_for_downloads",
    "--dtype": _DEMO,
    "--enable-force-include-usage": _ANSWERS,
    "--enable-log-requests": "access/test_http_access.py::test_the_access_log_has_one_line_and_no_secret",
    "--enable-lora": "frontends/test_lora_clients.py::test",
    "--enable-per-request-metrics": f"{_HERE}::test_answers_have_their_times",
    "--enable-prefix-caching": _DEMO,
    "--enable-request-id-headers": _NAMES,
    "--enable-tokenizer-info-endpoint": _DEMO,
    "--enforce-eager": "engine/test_decoder_program.py::test_the_program_is_an_option",
    "--fingerprint-mode": _ANSWERS,
    "--fingerprint-value": _ANSWERS,
    "--generation-config": "adapter/test_sampling_defaults.py::test_the_models_file_counts_unless_another_or_none",
    "--gpu-memory-utilization": "engine/gpu/test_gpu_memory.py::test_blocks_get_what_is_left",
    "--grpc-port": f"{_FLAGS}::test_with_a_model_one_port_is_opened",
    "--h11-max-header-count": f"{_FLAGS}::test_other_names_of_own_flags",
    "--h11-max-incomplete-event-size": f"{_FLAGS}::test_other_names_of_own_flags",
    "--hf-token": f"{_HERE}::test_the_token_and_the_tokenizers_revision_reach_the_hub",
    "--host": f"{_FLAGS}::test_with_a_model_one_port_is_opened",
    "--kv-cache-dtype": "engine/gpu/test_gpu_memory.py::test_keys_and_values_of_8_bits_take_a_quarter_of_the_memory",
    "--kv-cache-memory-bytes": f"{_HERE}::test_the_size_of_the_kv_cache",
    "--kv-events-config": "engine/test_kv_events.py::test",
    "--kv-offloading-size": "engine/test_host_tier.py::test_its_size_is_given_in_gib_or_in_blocks",
    "--load-format": f"{_HERE}::test_the_size_of_the_kv_cache",
    "--log-level": f"{_FLAGS}::test_logs_and_traces",
    "--long-prefill-token-threshold": "engine/test_step_reports.py::test_a_long_prompt_waits_for_another_one",
    "--lora-modules": "frontends/test_lora_clients.py::test",
    "--max-cpu-loras": "engine/test_lora.py::test_more_adapters_than_stay_in_memory",
    "--max-lora-rank": "engine/test_lora.py::test_an_adapter_that_asks_for_more_is_refused",
    "--max-loras": "engine/gpu/test_device_adapters.py::test_adapters_come_and_go_while_steps_are_in_flight",
    "--max-logprobs": "frontends/test_openai_e2e.py::test_all_of_the_vocabulary_may_be_asked_for_where",
    "--max-model-len": _DEMO,
    "--max-num-batched-tokens": "engine/test_scheduler.py::test_a_long_prompt_is_chunked_and_decodes_go_first",
    "--max-num-queued-reqs": "frontends/test_openai_e2e.py::test_each_choice_counts_as_a_request",
    "--max-num-seqs": "engine/test_step_reports.py::test_why_a_request_waits",
    "--middleware": f"{_HERE}::test_middleware_sees_requests_and_whole_responses",
    "--model": f"{_FLAGS}::test_with_a_model_one_port_is_opened",
    "--num-gpu-blocks-override": _DEMO,
    "--otlp-traces-endpoint": f"{_FLAGS}::test_logs_and_traces",
    "--override-generation-config": _DEMO,
    "--pipeline-parallel-size": "engine/gpu/test_pipeline_engine.py::test_two_stages_give_the_tokens_of_one_process",
    "--port": f"{_FLAGS}::test_with_a_model_one_port_is_opened",
    "--quantization": "engine/test_decoder_program.py::test_int8",
    "--reasoning-parser": "frontends/test_formats_over_protocols.py::test",
    "--return-tokens-as-token-ids": _ANSWERS,
    "--revision": "e2e/test_hub.py::test_a_model_of_the_hub_is_fetched_once",
    "--root-path": _NAMES,
    "--seed": f"{_HERE}::test_the_size_of_the_kv_cache",
    "--served-model-name": _NAMES,
    "--skip-tokenizer-init": "frontends/test_without_tokenizer.py::test_text_is_refused",
    "--shutdown-timeout": "e2e/test_lifecycle_e2e.py::test_what_outlives_the_exit_timeout_is_cut_with_an_error",
    "--spec-method": f"{_FLAGS}::test_short_flags_of_speculation",
    "--spec-tokens": f"{_FLAGS}::test_short_flags_of_speculation",
    "--speculative-config": "engine/test_speculation.py::test_text_that_repeats_takes_fewer_steps",
    "--ssl-ca-certs": _TLS,
    "--ssl-cert-reqs": _TLS,
    "--ssl-certfile": _TLS,
    "--ssl-keyfile": _TLS,
    "--sse-keep-alive-interval": f"{_HERE}::test_a_quiet_stream_sends_comments_as_often_as_the_flag_says",
    "--stream-interval": _ANSWERS,
    "--structured-outputs-config": "engine/test_grammars.py::test_batch_chunks_and_preemption_do_not_change_tokens",
    "--tensor-parallel-size": "engine/gpu/test_pipeline_engine.py::test_two_stages_of_two_ranks_each",
    "--tokenizer": f"{_HERE}::test_the_size_of_the_kv_cache",
    "--tokenizer-revision": f"{_HERE}::test_the_token_and_the_tokenizers_revision_reach_the_hub",
    "--tool-call-parser": f"{_HERE}::test_the_parser_of_calls_is_the_one_that_the_flag_names",
    "--trust-request-chat-template": "adapter/test_prompt_fields.py::test_a_template_of_the_request",
    "--uds": f"{_FLAGS}::test_a_unix_socket",
}
"""Flag → the test, `file::beginning of its name` below tests/. A flag of the engine may be shown by the test of its
argument: `e2e/test_engine_flags.py` shows that flags become arguments."""
NOT_SHOWN = {"--help", "--spec-model", "--ssl-ciphers", "--trust-remote-code"}
"""Flags that work and that no test here shows: a draft model runs on GPUs alone."""


def test_every_flag_that_works_has_a_test_of_its_effect() -> None:
    command: Any = get_command(app)
    options = {name: option for option in command.params for name in (*option.opts, *option.secondary_opts)}
    working = {f for f in vllm_flags.flags() if vllm_flags.described(f, options.get(f)).startswith("works")}
    assert working - EFFECTS.keys() - NOT_SHOWN == set()
    assert EFFECTS.keys() <= working and len(EFFECTS) >= 60
    for flag, test in EFFECTS.items():
        file, _, name = test.partition("::")
        assert re.search(rf"^def {name}", (ROOT / "tests" / file).read_text(), re.MULTILINE), f"{flag}: {test}"


def ask(server: ServerProcess, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
    connection = http.client.HTTPConnection(server.http, timeout=30)
    try:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {"content-type": "application/json", **named})
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers
    finally:
        connection.close()


def complete(server: ServerProcess, **fields: Any) -> Any:
    status, content, _ = ask(server, "POST", "/v1/completions", {"prompt": "The engine", **fields})
    assert status == 200, content
    return json.loads(content)


@pytest.fixture(scope="module")
def demo() -> Iterator[ServerProcess]:
    with running_server(
        *(str(CHECKPOINT), "--served-model-name", "m", "--device", "cpu", "--dtype", "float32"),
        *("--max-model-len", "256", "--block-size", "16", "--num-gpu-blocks-override", "48"),
        *("--no-enable-prefix-caching", "--override-generation-config", '{"temperature": 0}'),
        *("--allowed-origins", f'["{PAGE}"]', "--allow-credentials"),
        *("--allowed-methods", '["POST"]', "--allowed-headers", '["x-mine"]', "--enable-tokenizer-info-endpoint"),
    ) as server:
        yield server


@pytest.mark.slow
def test_a_server_of_the_demo_model(demo: ServerProcess) -> None:
    metrics = demo.get("/metrics")
    [info] = re.findall(r"^vllm:cache_config_info\{(.*)\}", metrics, re.MULTILINE)
    for label in ('block_size="16"', 'num_gpu_blocks="48"', 'enable_prefix_caching="False"'):
        assert label in info
    [model] = json.loads(ask(demo, "GET", "/v1/models")[1])["data"]
    assert model["max_model_len"] == 256
    status, content, _ = ask(demo, "POST", "/v1/completions", {"prompt": [5] * 300})
    assert status == 400 and b"256" in content

    status, content, _ = ask(demo, "GET", "/tokenizer_info")
    info = json.loads(content)
    assert (status, info["chat_template"]) == (200, json.loads(demo.get("/v2/models/m/config"))["parameters"]
            ["chat_template"]["string_value"])  # fmt: skip
    of_file = json.loads((CHECKPOINT / "tokenizer_config.json").read_text())
    assert info.items() >= {name: value for name, value in of_file.items() if name != "chat_template"}.items()
    assert ask(demo, "GET", "/tokenizer_info?model=absent")[0] == 404
    assert ask(demo, "POST", "/tokenizer_info")[0] == 405

    greedy, other = complete(demo), complete(demo, seed=2)
    assert greedy["choices"][0]["text"] == other["choices"][0]["text"]
    assert complete(demo)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    preflight = {"Origin": PAGE, "Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "x-mine"}
    status, _, headers = ask(demo, "OPTIONS", "/v1/completions", **preflight)
    assert (status, headers["access-control-allow-credentials"]) == (200, "true")
    assert headers["access-control-allow-methods"] == "POST"
    for name, value in (("Access_Control_Request_Method", "GET"), ("Access_Control_Request_Headers", "x-other")):
        assert ask(demo, "OPTIONS", "/v1/completions", **{**preflight, name: value})[0] == 400


@pytest.mark.slow
def test_the_size_of_the_kv_cache(tmp_path: Path) -> None:
    """Also: a checkpoint without weights, whose random ones come from --seed, and a tokenizer from elsewhere."""
    folder, tokenizer = tmp_path / "model", tmp_path / "tokenizer"
    shutil.copytree(CHECKPOINT, folder, ignore=shutil.ignore_patterns("*.safetensors", "tokenizer*"))
    shutil.copytree(CHECKPOINT, tokenizer, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    texts = []
    for seed, kv_bytes in (("1", "4M"), ("1", "8M"), ("2", "8M")):
        with running_server(
            *(str(folder), "--load-format", "dummy", "--seed", seed, "--tokenizer", str(tokenizer)),
            *("--device", "cpu", "--kv-cache-memory-bytes", kv_bytes),
        ) as server:
            texts.append(complete(server, max_tokens=8, temperature=0)["choices"][0]["text"])
            [blocks] = re.findall(r'num_gpu_blocks="(\d+)"', server.get("/metrics"))
            texts.append(int(blocks))
    assert texts[0] == texts[2] != texts[4]
    assert texts[3] == texts[5] >= 2 * texts[1] > 0


@pytest.mark.slow
def test_the_token_and_the_tokenizers_revision_reach_the_hub(tmp_path: Path) -> None:
    with hub_of(CHECKPOINT, "org/tiny") as hub:
        server = start_server(
            *(str(CHECKPOINT), "--device", "cpu", "--tokenizer", "org/tiny", "--tokenizer-revision", "v1"),
            *("--hf-token", "secret"),
            variables=hub_environment(hub, tmp_path),
        )
        assert stop_server(server) == 0
        assert any("/revision/v1" in line for line in hub.asked)
        assert hub.tokens == {"Bearer secret"}


def test_a_quiet_stream_sends_comments_as_often_as_the_flag_says() -> None:
    with running_server("mock", "--mock-step-ms", "500", "--sse-keep-alive-interval", "0.1") as server:
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "stream": True}
        asked = {
            "/v1/completions": {"prompt": "a", "max_tokens": 3, "stream": True},
            "/v1/messages": {"model": "mock", **chat},
            "/v1/responses": {"input": "a", "max_output_tokens": 3, "stream": True},
        }
        for path, body in asked.items():
            _, content, _ = ask(server, "POST", path, body)
            assert content.count(b": ping\n") >= 4, content


MIDDLEWARE = """
from starlette.responses import JSONResponse


class CountsEvents:
    def __init__(self, app):
        self.app, self.count = app, 0

    async def __call__(self, scope, receive, send):
        async def counted(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-before", str(self.count).encode())]
            self.count += message.get("body", b"").count(b"data: ")
            await send(message)

        await self.app(scope, receive, counted)


async def refuses_models(request, call_next):
    if request.url.path == "/v1/models":
        return JSONResponse({"refused": True}, status_code=403)
    return await call_next(request)
"""


@pytest.fixture(scope="module")
def mock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Flags that do not disturb each other."""
    folder = tmp_path_factory.mktemp("middleware")
    (folder / "house_rules.py").write_text(MIDDLEWARE)
    with running_server(
        *("mock", "--middleware", "house_rules.CountsEvents", "--middleware", "house_rules.refuses_models"),
        *("--enable-per-request-metrics", "--tool-call-parser", "hermes"),
        *("--chat-template", "{{ tools }}{{ messages[0].content }}"),
        variables={"PYTHONPATH": f"{ROOT}:{folder}"},
    ) as server:
        yield server


def test_middleware_sees_requests_and_whole_responses(mock: ServerProcess) -> None:
    def events() -> int:
        """So many were sent before."""
        status, _, headers = ask(mock, "GET", "/health")
        assert status == 200
        return int(headers["x-before"])

    before = events()
    assert ask(mock, "GET", "/v1/models")[:2] == (403, b'{"refused":true}')
    body = {"prompt": "a", "max_tokens": 4, "stream": True}
    _, content, headers = ask(mock, "POST", "/v1/completions", body)
    assert headers["x-before"] == str(before) and content.endswith(b"data: [DONE]\n\n")
    assert complete(mock, max_tokens=4, ignore_eos=True)["usage"]["completion_tokens"] == 4
    assert events() == before + content.count(b"data: ") > before


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_answers_have_their_times(mock: ServerProcess, path: str) -> None:
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
    body = {**prompt, "max_tokens": 5, "ignore_eos": True}
    whole = json.loads(ask(mock, "POST", path, body)[1])
    found = [whole["metrics"]]
    for options in ({}, {"stream_options": {"include_usage": True}}):
        _, content, _ = ask(mock, "POST", path, {**body, **options, "stream": True})
        events = [json.loads(line[6:]) for line in content.splitlines() if line.startswith(b"data: {")]
        assert [event for event in events if "metrics" in event] == events[-1:]
        found.append(events[-1]["metrics"])
    for metrics in found:
        assert metrics["queue_time_ms"] >= 0 and metrics["time_to_first_token_ms"] > 0
        assert 0 < metrics["generation_time_ms"] == pytest.approx(4 * metrics["mean_itl_ms"])
        total_ms = metrics["time_to_first_token_ms"] + metrics["generation_time_ms"]
        assert metrics["tokens_per_second"] == pytest.approx(5e3 / total_ms)
    assert "metrics" not in json.loads(ask(mock, "POST", path, {**body, "n": 2})[1])
    assert "metrics" not in json.loads(ask(mock, "POST", path, {**body, "include_metrics": False})[1])


def test_the_parser_of_calls_is_the_one_that_the_flag_names(mock: ServerProcess) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    body = {"messages": [{"role": "user", "content": "a"}], "tools": tools, "tool_choice": "required"}
    status, content, _ = ask(mock, "POST", "/v1/chat/completions", body)
    assert status == 200, content
    [choice] = json.loads(content)["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "f"
