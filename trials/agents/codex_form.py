"""A session that imitates the Codex CLI 0.169: its fields, items and headers over /v1/responses.

Used by the short form of suite_agents.py, in `make test`. Independent of the model's script. Invariant: like Codex, it
acts only on `response.output_item.done` and `response.completed`, resends all items of the conversation each time, and
asks the server to store nothing.
Source: requests of codex 0.169.0, with other texts.
"""

from __future__ import annotations

import json
from typing import Any

from .event_stream import post_stream
from .workspace import Workspace

THREAD = "0b6f3c52-6a40-78f2-a867-d78987f8c357"
_HEADERS = {"session-id": THREAD, "thread-id": THREAD, "originator": "codex_exec", "x-client-request-id": THREAD}
PATCH_GRAMMAR = """start: first change+ last
first: "*** Begin Patch" LF
last: "*** End Patch" LF?
change: add | remove | update
add: "*** Add File: " name LF ("+" /(.*)/ LF)+
remove: "*** Delete File: " name LF
update: "*** Update File: " name LF move? lines?
name: /(.+)/
move: "*** Move to: " name LF
lines: (context | line)+ end?
context: ("@@" | "@@ " /(.+)/) LF
line: ("+" | "-" | " ") /(.*)/ LF
end: "*** End of File" LF

%import common.LF
"""
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "name": "exec_command",
        "description": "Runs a command.",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {
                "cmd": {"type": "string", "description": "The command."},
                "yield_time_ms": {"type": "number", "description": "How long to wait for it."},
                "tty": {"type": "boolean"},
                "prefix_rule": {"type": "array", "items": {"type": "string"}},
                "sandbox_permissions": {"type": "string", "enum": ["use_default", "require_escalated"]},
            },
            "required": ["cmd"],
            "additionalProperties": False,
        },
    },
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Changes files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR},
    },
]


def _message(role: str, text: str, number: int) -> dict[str, Any]:
    content = [{"type": "input_text", "text": text}]
    return {"type": "message", "id": f"msg_0b6f3c52-6a40-78f2-a867-{number:012d}", "role": role, "content": content}


def _body(model: str, items: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "model": model,
        "input": items,
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": THREAD,
        "text": {"verbosity": "low"},
        "client_metadata": {"session_id": THREAD, "x-codex-turn-metadata": json.dumps({"turn_id": THREAD})},
    }


def run_session(address: str, model: str, task: str, workspace: Workspace, system: str) -> list[dict[str, Any]]:
    """All items of the conversation, the last words' message at the end."""
    items = [_message("developer", system, 1), _message("user", "<cwd>here</cwd>", 2), _message("user", task, 3)]
    while True:
        made = _turn(address, _body(model, items))
        results = [_result(item, workspace) for item in made if item["type"] in _RESULTS]
        items += made + results
        if not results:
            return items


def _turn(address: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    completed = None
    for number, event in enumerate(post_stream(address, "/v1/responses", body, _HEADERS)):
        assert completed is None and event["sequence_number"] == number
        if event["type"] == "response.output_item.done":
            made.append(event["item"])
        elif event["type"] == "response.completed":
            completed = event["response"]
    assert completed is not None, "the stream ended without response.completed"
    assert completed["output"] == made and completed["usage"]["output_tokens"] > 0
    return made


_RESULTS = {"function_call": "function_call_output", "custom_tool_call": "custom_tool_call_output"}


def _result(call: dict[str, Any], workspace: Workspace) -> dict[str, Any]:
    if call["type"] == "custom_tool_call":
        assert call["name"] == "apply_patch"
        output = workspace.patch(call["input"])
    else:
        assert call["name"] == "exec_command"
        output = workspace.run(json.loads(call["arguments"])["cmd"])
    return {"type": _RESULTS[call["type"]], "id": f"fco_{THREAD}", "call_id": call["call_id"], "output": output}
