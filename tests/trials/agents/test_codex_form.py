"""A whole session of the Codex CLI in the form of its requests, with a scripted model, real tools, and an engine that
dies three times. `make clients` runs Codex itself (trials/clients/suite_agents.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from trials.agents.codex_form import run_session
from trials.agents.scripted_server import engine_dies, scripted_server
from trials.agents.scripts import CallFormat, Hermes, Qwen3Coder
from trials.agents.sessions import LAST_WORDS, SYSTEM, TASK, check, codex_turns, deaths, prepare
from trials.agents.workspace import Workspace

pytestmark = pytest.mark.slow

MODEL = "scripted"
WRITTEN = [
    *("reasoning", "message", "function_call", "function_call"),
    *("reasoning", "custom_tool_call"),
    *("message", "function_call"),
    *("reasoning", "message"),
]


@pytest.mark.parametrize("form", [Hermes(), Qwen3Coder()], ids=lambda form: form.parser)
def test_a_session_while_engines_die(form: CallFormat, tmp_path: Path) -> None:
    folder = prepare(tmp_path / "work")
    turns = codex_turns(form)
    with (
        scripted_server(tmp_path, MODEL, form, turns) as server,
        engine_dies(server, MODEL, deaths(turns)),
    ):
        session = run_session(server.http, MODEL, TASK, Workspace(folder), SYSTEM)
    check(folder)
    written = [item for item in session if item.get("role") not in ("user", "developer")]
    assert [item["type"] for item in written if not item["type"].endswith("_output")] == WRITTEN
    assert [part["text"] for part in session[-1]["content"]] == [LAST_WORDS]
    assert all(item["encrypted_content"] for item in written if item["type"] == "reasoning")
