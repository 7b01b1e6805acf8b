"""The bundled model in two stages on two Ray nodes, one of which lacks its files: one machine's text, also when a rank
is killed under a stream."""

from __future__ import annotations

import json
import os
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from llmbackend.cluster.secrets_folder import SecretsFolder
from tests.helpers.cluster import copies_of, engines_of, head_of, processes_of, run_folder, start_machine
from tests.helpers.llm_host import llm_host
from tests.helpers.server_process import post, stop_server, write_mock_model
from tests.helpers.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HERE = "/proc/self/cwd/model"
"""Another folder on each machine, by what its processes work in."""
DEMO = Path(__file__).parents[2] / "model_repository" / "demo" / "1"
SPLIT: dict[str, Any] = {"transport": "process", "pipeline_parallel_size": 2, "num_threads": 1}
SAMPLING: dict[str, Any] = {"max_tokens": 100, "temperature": 0.8, "seed": 3, "ignore_eos": True}
GENERATE = "/v2/models/split/generate"
REQUEST: dict[str, Any] = {"text_input": "Count from 1 to 100", "parameters": SAMPLING}


def ranks_in(folder: Path) -> list[int]:
    return [
        pid for pid, command in processes_of(folder).items() if "llmbackend.engine.gpu.parallel.rank_process" in command
    ]


def test_a_split_model_gives_one_machines_text_and_survives_a_rank(tmp_path: Path) -> None:
    """Each node has room for one of two ranks. Only the first one has the model."""
    with llm_host(tmp_path / "one machine", model=str(DEMO), **SPLIT) as host:
        call = host.start(text_input=REQUEST["text_input"], sampling=SAMPLING)
        eventually(lambda: call.num_finals, 120)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    (tmp_path / "first/model").symlink_to(DEMO)
    write_mock_model(tmp_path / "models", "split", **SPLIT | {"model": HERE})
    secrets = SecretsFolder.create(tmp_path / "secrets").path
    own = ("--cluster-cpus", "1", "--model-repository", str(tmp_path / "models"), "--model-control-mode", "explicit")
    with run_folder() as first, run_folder() as second, ExitStack() as servers:
        head = start_machine(first, secrets, "--cluster-bind", "127.0.0.2", *own, works_in=tmp_path / "first")
        servers.callback(stop_server, head)
        member = start_machine(
            second,
            secrets,
            *("--cluster-bind", "127.0.0.3", *own),
            cluster=head_of(first),
            works_in=tmp_path / "second",
        )
        servers.callback(stop_server, member)
        status, said = post(head, "/v2/repository/models/split/load", {})
        assert status == 200, said
        assert (len(copies_of(first)), len(copies_of(second))) == (0, 1)
        [(rank, folder)] = [(pid, folder) for folder in (first, second) for pid in ranks_in(folder)]
        assert len(engines_of(first)) + len(engines_of(second)) == 1 and not engines_of(folder), "on one machine each"
        answers: list[tuple[int, str]] = []
        client = threading.Thread(target=lambda: answers.append(post(head, GENERATE, REQUEST)))
        client.start()
        eventually(lambda: head.metric("vllm:generation_tokens_total", "split") > 5, 60)
        os.kill(rank, signal.SIGKILL)
        client.join(120)
        assert [(status, json.loads(text)["text_output"]) for status, text in answers] == [(200, call.text)]
        assert ranks_in(folder) != [rank]
