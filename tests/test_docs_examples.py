"""What README and docs ask of a server is asked of the demo model's; answers that they show are those that it gives.

An example is a fenced block that names a server's address, a `client`, or a method and a path. One that needs another
server than the demo model's is in ELSEWHERE, with the reason or the test that runs it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.helpers.server_process import ROOT, ServerProcess, post, running_server

pytestmark = pytest.mark.slow

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_ASKS = re.compile(r"localhost:8000|127\.0\.0\.1:8000|^(?:GET|POST|DELETE) /|\bclient\.", re.MULTILINE)
_POST = re.compile(r"^POST (\S+) +(\{.*?\})\n((?: +\S.*\n)*)", re.MULTILINE)
KEY = "sk-docs"
ELSEWHERE = {
    "curl localhost:8000/v1/chat/completions --json": "tests/real_models/test_by_name.py",
    "import openai  # the server of smollm2": "tests/real_models/test_by_name.py",
    "llmbackend serve --model-repository models --backend-directory": "tests/backends/test_backend_guide.py",
    "# ~/.codex/config.toml": "make clients",
    "ANTHROPIC_BASE_URL=": "make clients",
    "POST /v1/load_lora_adapter": "tests/frontends/test_lora_at_run_time.py",
    "region = shm.create_shared_memory_region": "tests/frontends/test_shared_memory_clients.py",
    "curl -N localhost:8000/v2/engine/events": "a stream without an end: tests/frontends/test_engine_events.py",
}
PRELUDE = """
import json, anthropic, openai
client = openai.OpenAI(base_url="http://localhost:8000/v1", api_key="none")
WEATHER = {"type": "function", "name": "get_weather", "description": "Get the weather of a city.",
           "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
"""
"""What examples take for granted."""
EPILOGUES = {"docs/tool_calling.md": 'assert json.loads(call.function.arguments) == {"city": "Paris"}, call'}
INTERPRETER = """
import contextlib, io, json, sys, traceback
results = {}
for name, program in json.load(sys.stdin).items():
    printed, error = io.StringIO(), ""
    with contextlib.redirect_stdout(printed):
        try:
            exec(program, {"__name__": "__main__"})
        except BaseException:
            error = traceback.format_exc()
    results[name] = (printed.getvalue(), error)
print(json.dumps(results))
"""
"""Runs programs one after the other, each with names of its own: importing the clients takes seconds."""


@dataclass(frozen=True)
class Example:
    page: str
    language: str
    text: str

    @property
    def elsewhere(self) -> str:
        return next((where for start, where in ELSEWHERE.items() if self.text.startswith(start)), "")


def _examples() -> list[Example]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    blocks = (
        Example(str(page.relative_to(ROOT)), language, text)
        for page in pages
        for language, text in _FENCE.findall(page.read_text())
    )
    return [block for block in blocks if _ASKS.search(block.text)]


EXAMPLES = _examples()
RUN_HERE = [example for example in EXAMPLES if not example.elsewhere]
PROGRAMS = [example for example in RUN_HERE if example.language == "python"]


def _named(example: Example) -> str:
    return f"{example.page}: {example.text.splitlines()[0][:50]}"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running_server("--demo", "--allow-fault-injection=true") as started:
        yield started


@pytest.fixture(scope="module")
def server_with_keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"alice:sk-alice rpm=60 tpm=20000\ndocs:{KEY} role=operator\n")
    with running_server("--demo", f"--api-key-file={keys}") as started:
        yield started


@pytest.fixture(scope="module")
def results(server: ServerProcess) -> dict[str, tuple[str, str]]:
    """What each program printed, and its traceback."""
    programs = {_named(example): _at(server, _program(example)) for example in PROGRAMS}
    found: dict[str, tuple[str, str]] = json.loads(_output([sys.executable, "-c", INTERPRETER], json.dumps(programs)))
    return found


def _program(example: Example) -> str:
    prelude = "" if "tritonclient" in example.text else PRELUDE
    return "\n".join((prelude, example.text, EPILOGUES.get(example.page, "")))


@pytest.mark.parametrize("example", PROGRAMS, ids=_named)
def test_a_program_runs(example: Example, results: dict[str, tuple[str, str]]) -> None:
    printed, error = results[_named(example)]
    assert not error
    assert printed or "print(" not in example.text


@pytest.mark.parametrize("example", [example for example in RUN_HERE if example.text.startswith("curl")], ids=_named)
def test_a_request_of_curl_is_answered_as_shown(example: Example, request: pytest.FixtureRequest) -> None:
    needs_key = "$OPERATOR_KEY" in example.text
    server: ServerProcess = request.getfixturevalue("server_with_keys" if needs_key else "server")
    command, _, shown = example.text.partition("\n{") if "'{" not in example.text else (example.text, "", "")
    answer = _output(["bash", "-c", _at(server, f"{command.replace('curl', 'curl -sS --fail')}")])
    assert answer
    missing = _keys("{" + shown) - _keys(answer)
    assert not missing, (missing, answer)


@pytest.mark.parametrize("example", [example for example in RUN_HERE if example.text.startswith("POST")], ids=_named)
def test_a_request_is_answered_word_by_word_as_shown(example: Example, server: ServerProcess) -> None:
    compared = 0
    for path, body, shown in _POST.findall(example.text):
        if "..." in body:
            continue
        status, answer = post(server, path, json.loads(body))
        assert (status, json.loads(answer)) == (200, json.loads(shown))
        compared += 1
    assert compared


def test_every_example_is_of_a_kind_that_is_run() -> None:
    kinds = [example.language == "python" or example.text.startswith(("curl", "POST")) for example in RUN_HERE]
    assert all(kinds) and len(RUN_HERE) >= 10
    assert all(any(example.text.startswith(start) for example in EXAMPLES) for start in ELSEWHERE)
    paths = [where for where in ELSEWHERE.values() if where.startswith("tests/")]
    assert not [path for path in paths if not (ROOT / path).exists()]


def _at(server: ServerProcess, text: str) -> str:
    text = text.replace("localhost:8000", server.http).replace("localhost:8001", server.grpc)
    return text.replace("$OPERATOR_KEY", KEY)


def _output(command: list[str], given: str = "") -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def _keys(text: str) -> set[str]:
    """The names in a JSON text, which may be shortened."""
    return set(re.findall(r'"(\w+)":', text))
