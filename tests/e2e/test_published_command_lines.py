"""Command lines that others have published for `vllm serve`, run with the program's name changed: of tutorials, Helm
charts and a compose file, and the KServe runtime of deploy/. Their models come from a stand-in of the hub."""

from __future__ import annotations

import json
import re
import shlex
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmbackend.demo import DEMO_REPOSITORY
from tests.helpers.hub import hub_environment, hub_of
from tests.helpers.server_process import ROOT, ServerProcess, running_server

pytestmark = pytest.mark.slow

DEMO = DEMO_REPOSITORY / "demo" / "1"
QUICKSTART = "vllm serve Qwen/Qwen2.5-1.5B-Instruct --dtype auto --api-key token-abc123"
"""vLLM's documentation, "OpenAI-Compatible Server"."""
TOOLS = (
    "vllm serve meta-llama/Llama-3.1-8B-Instruct --enable-auto-tool-choice --tool-call-parser llama3_json "
    "--max-model-len 1024 --gpu-memory-utilization 0.9 --disable-log-requests --uvicorn-log-level warning"
)
"""vLLM's documentation, "Tool Calling", with bounds that guides add."""
CHART = """
image:
  command: ["vllm", "serve", "/data/", "--served-model-name", "opt-125m", "--dtype", "bfloat16",
            "--host", "0.0.0.0", "--port", "8000"]
"""
"""The values of the Helm chart in vLLM's examples (chart-helm/values.yaml)."""
STACK = """
command: ["vllm", "serve"]
args: ["facebook/opt-125m", "--host", "0.0.0.0", "--port", "8000", "--no-enable-prefix-caching",
       "--no-enable-chunked-prefill", "--max-model-len", "1024", "--dtype", "float32",
       "--tensor-parallel-size", "1", "--max-num-seqs", "32", "--max-loras", "4"]
"""
"""What the Helm chart of vLLM's production stack makes of `vllmConfig`."""
COMPOSE = """
services:
  vllm:
    image: vllm/vllm-openai:latest
    ports: ["8000:8000"]
    ipc: host
    command: >
      --model mistralai/Mistral-7B-Instruct-v0.3
      --served-model-name mistral
      --max-model-len 1024
      --gpu-memory-utilization 0.90
      --max_num_batched_tokens 2k
      --swap-space 8
      --trust-remote-code
"""


def own(words: list[str], replaced: dict[str, str]) -> list[str]:
    """Without the program's name, and without what only the test's machine has otherwise: addresses, ports, folders."""
    text = " ".join(shlex.quote(word) for word in words)
    text = re.sub(r"--(host|port)[ =]\S+", "", text)
    for word, value in replaced.items():
        text = text.replace(word, value)
    return shlex.split(text)


@contextmanager
def serving(arguments: list[str], model: str, home: Path) -> Iterator[ServerProcess]:
    with (
        hub_of(DEMO, model) as hub,
        running_server(*arguments, "--device", "cpu", variables=hub_environment(hub, home)) as server,
    ):
        yield server


def answer(server: ServerProcess, model: str, key: str = "") -> Any:
    body = {"model": model, "messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 4}
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(f"http://{server.http}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


@pytest.mark.parametrize(("line", "key"), [(QUICKSTART, "token-abc123"), (TOOLS, "")])
def test_lines_of_tutorials(line: str, key: str, tmp_path: Path) -> None:
    program, command, *arguments = shlex.split(line)
    assert (program, command) == ("vllm", "serve")
    model = arguments[0]
    with serving(own(arguments, {}), model, tmp_path) as server:
        assert answer(server, model, key)["model"] == model


def test_the_values_of_vllms_helm_chart(tmp_path: Path) -> None:
    _, _, *arguments = yaml.safe_load(CHART)["image"]["command"]
    with serving(own(arguments, {"/data/": str(DEMO)}), "none/none", tmp_path) as server:
        assert answer(server, "opt-125m")["model"] == "opt-125m"
        assert server.get("/health") == ""  # its probe


def test_the_arguments_of_the_production_stack(tmp_path: Path) -> None:
    with serving(own(yaml.safe_load(STACK)["args"], {}), "facebook/opt-125m", tmp_path) as server:
        assert answer(server, "facebook/opt-125m")["choices"]


def test_a_docker_compose_file(tmp_path: Path) -> None:
    """The image's entry point is `vllm serve`, as ours is `llmbackend serve`."""
    command = yaml.safe_load(COMPOSE)["services"]["vllm"]["command"]
    with serving(own(shlex.split(command), {}), "mistralai/Mistral-7B-Instruct-v0.3", tmp_path) as server:
        assert answer(server, "mistral")["model"] == "mistral"


def test_the_cluster_serving_runtime(tmp_path: Path) -> None:
    runtime = yaml.safe_load((ROOT / "deploy" / "kserve" / "cluster_serving_runtime.yaml").read_text())
    [container] = runtime["spec"]["containers"]
    port = container["ports"][0]["containerPort"]
    assert f"--port={port}" in container["args"]
    values = {"/mnt/models": str(DEMO), "{{.Name}}": "qwen", "$(CPUS)": "2"}
    with serving(own(container["args"], values), "none/none", tmp_path) as server:
        assert answer(server, "qwen")["model"] == "qwen"
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            target = container[probe]["httpGet"]
            assert target["port"] == port and server.get(target["path"]) == ""
        assert "vllm:" in server.get(runtime["spec"]["annotations"]["prometheus.kserve.io/path"])
