"""The Codex CLI over /v1/responses and Claude Code over /v1/messages: whole sessions of tool calls, also with engines
that die in the middle. The model is scripted (trials/agents/); agents, tools, server and engine are real.

Part of `make clients`. Independent of the agents' requests. Invariant: an agent gets its own home directory and no
address but the server's.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from trials.agents.scripted_server import engine_dies, scripted_server
from trials.agents.scripts import CallFormat, Hermes, Qwen3Coder
from trials.agents.sessions import (
    LAST_WORDS,
    TASK,
    check,
    claude_helpers,
    claude_turns,
    codex_programs,
    codex_turns,
    deaths,
    prepare,
)
from trials.clients.environment import AGENTS_DIRECTORY

TIMEOUT_S = 100
FORMS = pytest.mark.parametrize("form", [Hermes(), Qwen3Coder()], ids=lambda form: form.parser)
CODEX_MODEL = "gpt-5.5"
"""A name that Codex knows: for others it does not offer its tool of patches."""
CODEX_PROGRAM_MODEL = "gpt-6.1-sol"
"""One that Codex lets write programs, whose tools come as an item of the input, in namespaces."""
CLAUDE_MODEL = "scripted"
CODEX_CONFIG = """
model = "{model}"
model_provider = "local"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.local]
name = "local"
base_url = "http://{address}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""


def run(name: str, arguments: Sequence[str], folder: Path, home: Path, variables: Mapping[str, str]) -> str:
    """The agent's standard output; it must have ended well."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "NO_COLOR": "1", **variables}
    command = [str(AGENTS_DIRECTORY / "node_modules" / ".bin" / name), *arguments]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{name} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def codex(address: str, folder: Path, home: Path, model: str = CODEX_MODEL) -> str:
    """Its last words."""
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(CODEX_CONFIG.format(model=model, address=address))
    arguments = ["exec", "--skip-git-repo-check", "--json", TASK]
    output = run("codex", arguments, folder, home, {"CODEX_HOME": str(home)})
    events = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    said = [event["item"] for event in events if event["type"] == "item.completed"]
    assert events[-1]["type"] == "turn.completed" and events[-1]["usage"]["output_tokens"] > 0
    return str(next(item["text"] for item in reversed(said) if item["type"] == "agent_message"))


def claude(address: str, folder: Path, home: Path) -> str:
    """Its last words."""
    home.mkdir(exist_ok=True)
    arguments = ["-p", TASK, "--output-format", "stream-json", "--verbose", "--permission-mode", "acceptEdits"]
    arguments += ["--allowedTools", "Read Edit Write Bash Agent"]
    variables = {
        "ANTHROPIC_BASE_URL": f"http://{address}",
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": CLAUDE_MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": CLAUDE_MODEL,
        "CLAUDE_CONFIG_DIR": str(home / ".claude"),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_RETRIES": "0",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
    }
    output = run("claude", arguments, folder, home, variables)
    last = json.loads(output.splitlines()[-1])
    assert (last["type"], last["subtype"], last["is_error"]) == ("result", "success", False)
    return str(last["result"])


@FORMS
def test_codex(form: CallFormat, tmp_path: Path) -> None:
    folder = prepare(tmp_path / "work")
    with scripted_server(tmp_path, CODEX_MODEL, form, codex_turns(form)) as server:
        assert codex(server.http, folder, tmp_path / "home") == LAST_WORDS
    check(folder)


@FORMS
def test_codex_with_programs(form: CallFormat, tmp_path: Path) -> None:
    folder = prepare(tmp_path / "work")
    with scripted_server(tmp_path, CODEX_PROGRAM_MODEL, form, codex_programs(form)) as server:
        assert codex(server.http, folder, tmp_path / "home", CODEX_PROGRAM_MODEL) == LAST_WORDS
    check(folder)


def test_codex_while_engines_die(tmp_path: Path) -> None:
    folder, form = prepare(tmp_path / "work"), Hermes()
    turns = codex_turns(form)
    with (
        scripted_server(tmp_path, CODEX_MODEL, form, turns) as server,
        engine_dies(server, CODEX_MODEL, deaths(turns)),
    ):
        assert codex(server.http, folder, tmp_path / "home") == LAST_WORDS
    check(folder)


@FORMS
def test_claude_code(form: CallFormat, tmp_path: Path) -> None:
    folder = prepare(tmp_path / "work")
    with scripted_server(tmp_path, CLAUDE_MODEL, form, claude_turns(form, folder)) as server:
        assert claude(server.http, folder, tmp_path / "home") == LAST_WORDS
    check(folder)


@FORMS
def test_claude_code_with_helpers(form: CallFormat, tmp_path: Path) -> None:
    """Three conversations, two of them side by side."""
    folder = prepare(tmp_path / "work")
    with scripted_server(tmp_path, CLAUDE_MODEL, form, claude_helpers(form, folder)) as server:
        assert claude(server.http, folder, tmp_path / "home") == LAST_WORDS


def test_claude_code_while_engines_die(tmp_path: Path) -> None:
    folder, form = prepare(tmp_path / "work"), Qwen3Coder()
    turns = claude_turns(form, folder)
    with (
        scripted_server(tmp_path, CLAUDE_MODEL, form, turns) as server,
        engine_dies(server, CLAUDE_MODEL, deaths(turns)),
    ):
        assert claude(server.http, folder, tmp_path / "home") == LAST_WORDS
    check(folder)
