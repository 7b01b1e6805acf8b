"""Known models served by their names, in the types of their files: with drafts and over faults; what smollm2 says in
chats, by schemas too.

Runs where test_real_models.py does. Answers in the docs are those that come.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from llmbackend.server.known_models import KNOWN_MODELS, FetchError, KnownModel
from llmbackend.server.package_files import file_of
from tests.e2e.test_few_descriptors import engine_pids
from tests.helpers.grpc_streams import GrpcStream
from tests.helpers.server_process import ROOT, ServerProcess, kill_server, start_server, stop_server
from tests.helpers.waiting import eventually

from .protocols import answers, chat
from .test_real_models import FOLDER, PROMPTS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not FOLDER, reason="LLMBACKEND_REAL_MODELS names no folder of real models (make real-models)"),
]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 30},
        "country": {"enum": ["France", "Japan", "Italy"]},
        "inhabitants": {"type": "integer", "minimum": 1000, "maximum": 50_000_000},
        "sights": {"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 1, "maxItems": 3},
    },
    "required": ["city", "country", "inhabitants", "sights"],
    "additionalProperties": False,
}
KEPT = {
    "smollm2": "linear layers: 210 kept INT4_MIN",
    "gemma3-270m": "linear layers: 81 kept Q5_0, 27 kept Q4_K, 10 kept Q8_0, 9 kept Q6_K",
}
COUNTING, COUNTED = "1, 2, 3, 4, 5,", " 6, 7, 8, 9, 10,"
"""Without near ties in either model, so that every kernel library continues in the same way."""
REPEATING = "Repeat this list three times:\n" + "\n".join(f"{n}. The quick brown fox" for n in range(1, 8))
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 4}'
PAGE = ROOT / "docs" / "weights.md"


chats = pytest.mark.parametrize("model", KNOWN_MODELS[:1], ids=lambda model: model.name, indirect=True, scope="module")
"""For the only known model with a chat template."""


@pytest.fixture(scope="module", params=KNOWN_MODELS, ids=lambda model: model.name)
def model(request: pytest.FixtureRequest) -> KnownModel:
    found: KnownModel = request.param
    try:
        file_of(found)
    except FetchError as error:
        pytest.skip(str(error))
    return found


@contextmanager
def server_of(model: KnownModel, *arguments: str, log: Path | None = None) -> Iterator[ServerProcess]:
    with open(log or os.devnull, "a") as file:
        server = start_server(model.name, "--offline", "--device=cpu", *arguments, log=file)
        try:
            yield server
        finally:
            if server.process.poll() is None:
                assert stop_server(server) == 0


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "log"


@pytest.fixture(scope="module")
def server(model: KnownModel, log: Path) -> Iterator[ServerProcess]:
    with server_of(model, log=log) as server:
        yield server


def streams(server: ServerProcess, model: KnownModel, prompts: tuple[str, ...]) -> list[GrpcStream]:
    sampling = {"max_tokens": 200, "temperature": 0, "ignore_eos": True}
    return [GrpcStream(server.grpc, model.name, prompt, sampling) for prompt in prompts]


def tokens(running: list[GrpcStream]) -> list[list[int]]:
    found = [stream.finish() for stream in running]
    assert [stream.error for stream in found] == [None] * len(found)
    return [stream.token_ids for stream in found]


def test_weights_stay_in_the_types_of_the_file(server: ServerProcess, model: KnownModel, log: Path) -> None:
    [answer] = streams(server, model, (COUNTING,))
    assert answer.finish().text.startswith(COUNTED)
    assert KEPT[model.name] in log.read_text()


@chats
def test_every_protocol_gives_the_same_answer(server: ServerProcess, model: KnownModel) -> None:
    found = answers(server, model.name)
    assert set(found.values()) == {"The capital of Japan is Tokyo."}, found


@chats
@pytest.mark.parametrize("temperature", [0, 1])
def test_what_a_schema_asks_for_comes(server: ServerProcess, model: KnownModel, temperature: int) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    for city in ("Paris", "Tokyo", "Rome"):
        answer = chat(
            server, model.name, f"Describe {city} as JSON.", max_tokens=400, response_format=asked,
            temperature=temperature, seed=1,
        )  # fmt: skip
        jsonschema.validate(json.loads(answer), SCHEMA)


def test_drafts_change_no_token(server: ServerProcess, model: KnownModel) -> None:
    prompts = (*PROMPTS, REPEATING)
    expected = tokens(streams(server, model, prompts))
    with server_of(model, f"--speculative-config={DRAFTS}") as drafting:
        assert tokens(streams(drafting, model, prompts)) == expected
        assert drafting.metric("vllm:spec_decode_num_accepted_tokens_total", model.name) > 100


def test_a_killed_engine_costs_no_token(server: ServerProcess, model: KnownModel) -> None:
    expected = tokens(streams(server, model, PROMPTS))
    running = streams(server, model, PROMPTS)
    eventually(lambda: all(len(stream.token_ids) >= 10 for stream in running))
    [engine] = engine_pids(server)
    os.kill(engine, signal.SIGKILL)
    assert tokens(running) == expected
    eventually(lambda: engine_pids(server) not in ([], [engine]))


def test_a_killed_server_starts_again_with_the_same_answers(model: KnownModel) -> None:
    with server_of(model) as server:
        expected = tokens(streams(server, model, PROMPTS[:1]))
        begun = streams(server, model, PROMPTS)
        eventually(lambda: all(stream.token_ids for stream in begun))
        kill_server(server)
        for stream in begun:
            stream.finish()
    with server_of(model) as server:
        assert tokens(streams(server, model, PROMPTS[:1])) == expected


@chats
def test_answers_in_the_docs_are_real(server: ServerProcess, model: KnownModel) -> None:
    """Of its section: each block that asks, and behind it, or in its comments, what came."""
    section = PAGE.read_text().partition("\n## Models by name\n")[2].partition("\n## ")[0]
    blocks = [text for text in re.findall(r"^```\w*\n(.*?)^```", section, re.MULTILINE | re.DOTALL) if "8000" in text]
    assert len(blocks) == 2
    curl, program = (text.replace("localhost:8000", server.http) for text in blocks)
    command, _, shown = curl.partition("\n{")
    found = json.loads(_output(["bash", "-c", command.replace("curl", "curl -sS --fail")]))
    assert found["choices"][0]["message"] == json.loads(re.findall(r'"message": (\{.*?\})', shown)[0])
    assert _output([sys.executable, "-c", program]).splitlines() == re.findall(r"^# (.*)$", program, re.MULTILINE)


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
