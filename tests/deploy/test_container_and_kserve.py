"""deploy/: what the Containerfile copies exists, and KServe's runtime starts a server that answers its probes.

`make deploy-check` reads the same files with hadolint and KServe's own classes.
"""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmbackend import DEMO_MODEL, __version__
from llmbackend.engine.kernels.library import VARIANTS
from tests.helpers.server_process import ROOT, ServerProcess, post, running_server

DEPLOY = ROOT / "deploy"
IN_CONTAINER = {"/mnt/models": str(DEMO_MODEL), "{{.Name}}": "qwen"}
"""What KServe and Kubernetes put in place of these words."""


def instructions() -> list[tuple[str, list[str]]]:
    text = (DEPLOY / "Containerfile").read_text()
    lines = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    return [(words[0], words[1:]) for line in lines if (words := shlex.split(line, posix=False))]


def manifest(name: str) -> Any:
    return yaml.safe_load((DEPLOY / "kserve" / name).read_text())


def container() -> Any:
    (only,) = manifest("serving_runtime.yaml")["spec"]["containers"]
    return only


def test_the_image_is_made_of_files_that_exist_and_are_sent_to_the_build() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    sent = [line[1:] for line in ignored if line.startswith("!")]
    sources = [
        source
        for name, words in instructions()
        if name == "COPY" and not words[0].startswith("--from")
        for source in words[:-1]
    ]
    assert sorted(sources) == sorted(sent)
    assert [source for source in sources if not (ROOT / source).exists()] == []
    assert any(fnmatch.fnmatch("llmbackend/engine/kernels/_amx.abi3.so", line) for line in ignored)


def test_the_image_has_every_kernel_the_servers_ports_and_no_root() -> None:
    by_name: dict[str, list[str]] = dict(instructions())
    assert by_name["EXPOSE"] == ["8000", "8001", "8002"]
    assert by_name["USER"] == ["1000:0"]
    assert f"== {len(VARIANTS)}" in (DEPLOY / "Containerfile").read_text()
    assert json.loads(" ".join(by_name["ENTRYPOINT"])) == ["llmbackend", "serve"]
    (volume,) = json.loads(" ".join(by_name["VOLUME"]))
    assert f"TRITON_CACHE_DIR={volume}/triton" in by_name["ENV"], "/tmp may be mounted noexec"


def test_names_of_images_have_the_version() -> None:
    found = [name for path in (DEPLOY / "Containerfile", DEPLOY / "kserve" / "serving_runtime.yaml")
             for name in re.findall(r"llmbackend:([\w.]+)", path.read_text())]  # fmt: skip
    assert found and set(found) == {__version__}


def test_requests_may_end_before_the_container_is_killed() -> None:
    (exit_timeout_s,) = (int(one.partition("=")[2]) for one in container()["args"] if "--exit-timeout-secs" in one)
    service = manifest("inference_service.yaml")["spec"]["predictor"]
    assert service["terminationGracePeriodSeconds"] > exit_timeout_s
    assert service["model"]["runtime"] == manifest("serving_runtime.yaml")["metadata"]["name"]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    arguments = [*container()["args"], *manifest("inference_service.yaml")["spec"]["predictor"]["model"]["args"]]
    arguments = [one for one in arguments if not one.startswith(("--http-port", "--max-model-len"))]
    for placeholder, value in IN_CONTAINER.items():
        arguments = [one.replace(placeholder, value) for one in arguments]
    arguments = [one for one in arguments if one != "--allow-grpc=false"]  # start_server waits for it
    with running_server(*arguments) as server:
        yield server


@pytest.mark.slow
def test_kserves_probes_are_answered(server: ServerProcess) -> None:
    port = f"--http-port={container()['ports'][0]['containerPort']}"
    assert port in container()["args"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        target = container()[probe]["httpGet"]
        assert port.endswith(f"={target['port']}")
        with urllib.request.urlopen(f"http://{server.http}{target['path']}", timeout=30) as answer:
            assert answer.status == 200


@pytest.mark.slow
def test_kserves_runtime_serves_the_model_by_its_name_and_its_metrics(server: ServerProcess) -> None:
    status, text = post(server, "/v1/completions", {"model": "qwen", "prompt": "Triton is", "max_tokens": 4})
    assert status == 200 and json.loads(text)["choices"][0]["text"]
    annotations = manifest("serving_runtime.yaml")["spec"]["annotations"]
    assert annotations["prometheus.kserve.io/port"] == "8080"
    assert "vllm:generation_tokens_total" in server.get(annotations["prometheus.kserve.io/path"])


def test_only_the_folders_that_are_mounted_are_written_to() -> None:
    mounted = {mount["mountPath"] for mount in container()["volumeMounts"]}
    environment = dict(re.findall(r"(\w+)=(\S+)", (DEPLOY / "Containerfile").read_text()))
    for name in ("HOME", "HF_HOME", "LLMBACKEND_MODEL_CACHE_DIR", "LLMBACKEND_WEIGHT_CACHE_DIR"):
        assert any(Path(environment[name]).is_relative_to(folder) for folder in mounted)
    assert container()["securityContext"]["readOnlyRootFilesystem"] is True
