"""A whole session of Claude Code in the form of its requests, with a scripted model, real tools, and an engine that
dies three times. `make clients` runs Claude Code itself (trials/clients/suite_agents.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from trials.agents.claude_form import run_session
from trials.agents.scripted_server import engine_dies, scripted_server
from trials.agents.scripts import CallFormat, Hermes, Qwen3Coder
from trials.agents.sessions import LAST_WORDS, SYSTEM, TASK, check, claude_turns, deaths, prepare
from trials.agents.workspace import Workspace

pytestmark = pytest.mark.slow

MODEL = "scripted"


@pytest.mark.parametrize("form", [Hermes(), Qwen3Coder()], ids=lambda form: form.parser)
def test_a_session_while_engines_die(form: CallFormat, tmp_path: Path) -> None:
    folder = prepare(tmp_path / "work")
    turns = claude_turns(form, folder)
    with (
        scripted_server(tmp_path, MODEL, form, turns) as server,
        engine_dies(server, MODEL, deaths(turns)),
    ):
        session = run_session(server.http, MODEL, TASK, Workspace(folder), SYSTEM)
    check(folder)
    answers = [message["content"] for message in session if message["role"] == "assistant"]
    assert [[block["type"] for block in blocks] for blocks in answers] == [
        ["thinking", "text", "tool_use", "tool_use"],
        ["thinking", "tool_use"],
        ["tool_use"],
        ["text", "tool_use"],
        ["thinking", "text"],
    ]
    assert answers[-1][-1]["text"] == LAST_WORDS
    assert all(block["signature"] for blocks in answers for block in blocks if block["type"] == "thinking")
