"""A session that imitates Claude Code 2.1: its fields, blocks and headers over /v1/messages.

Used by the short form of suite_agents.py, in `make test`. Independent of the model's script. Invariant: like Claude
Code, it assembles its message from the events of the blocks, and resends the whole conversation each time, including
thinking and signatures.
Source: requests of claude-code 2.1.197, with other texts.
"""

from __future__ import annotations

import json
from typing import Any

from .event_stream import post_stream
from .workspace import Workspace

_HEADERS = {
    "x-api-key": "none",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,"
    "prompt-caching-scope-2026-01-05,mid-conversation-system-2026-04-07,effort-2025-11-24",
    "x-app": "cli",
}
_CACHED = {"cache_control": {"type": "ephemeral"}}


def _tool(name: str, about: str, /, **properties: Any) -> dict[str, Any]:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": properties,
        "required": [key for key, value in properties.items() if "default" not in value],
        "additionalProperties": False,
    }
    return {"name": name, "description": about, "input_schema": schema}


_TEXT = {"type": "string"}
TOOLS = [
    _tool("Read", "Reads a file.", file_path=_TEXT),
    _tool(
        "Edit",
        "Changes a file.",
        file_path=_TEXT,
        old_string=_TEXT,
        new_string={"type": "string"},
        replace_all={"type": "boolean", "default": False},
    ),
    _tool("WebSearch", "Searches.", query={"type": "string", "minLength": 2}, url={"type": "string", "format": "uri"}),
    _tool("Write", "Writes a file.", file_path=_TEXT, content={"type": "string"}),
    _tool("Bash", "Runs a command.", command=_TEXT, description={"type": "string", "default": ""}),
]


def _body(model: str, system: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "model": model,
        "messages": messages,
        "system": [{"type": "text", "text": "billing: none"}, {"type": "text", "text": system, **_CACHED}],
        "tools": TOOLS,
        "metadata": {"user_id": json.dumps({"device_id": "d", "session_id": "s"})},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }


def run_session(address: str, model: str, task: str, workspace: Workspace, system: str) -> list[dict[str, Any]]:
    """All messages, the one with the last words at the end."""
    asked = [{"type": "text", "text": "<today/>"}, {"type": "text", "text": task, **_CACHED}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": asked},
        {"role": "system", "content": "There are no other agents."},
    ]
    while True:
        blocks, reason = _turn(address, _body(model, system, messages))
        messages.append({"role": "assistant", "content": blocks})
        results = [_result(block, workspace) for block in blocks if block["type"] == "tool_use"]
        assert reason == ("tool_use" if results else "end_turn")
        if not results:
            return messages
        messages.append({"role": "user", "content": results})


def _turn(address: str, body: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """The blocks of the answer and why it ended."""
    blocks: list[dict[str, Any]] = []
    arguments: dict[int, str] = {}
    reason, kinds = "", []
    for event in post_stream(address, "/v1/messages?beta=true", body, _HEADERS):
        kinds.append(event["type"])
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            _add(event["delta"], blocks[event["index"]], event["index"], arguments)
        elif event["type"] == "message_delta":
            reason = event["delta"]["stop_reason"]
            assert event["usage"]["output_tokens"] > 0
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    for index, text in arguments.items():
        blocks[index]["input"] = json.loads(text)
    return blocks, reason


def _add(delta: dict[str, Any], block: dict[str, Any], index: int, arguments: dict[int, str]) -> None:
    if delta["type"] == "input_json_delta":
        arguments[index] = arguments.get(index, "") + delta["partial_json"]
    else:
        key = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}[delta["type"]]
        block[key] = block.get(key, "") + delta[key]


def _result(call: dict[str, Any], workspace: Workspace) -> dict[str, Any]:
    asked = call["input"]
    tools = {
        "Read": lambda: workspace.read(asked["file_path"]),
        "Edit": lambda: workspace.edit(asked["file_path"], asked["old_string"], asked["new_string"]),
        "Write": lambda: workspace.write(asked["file_path"], asked["content"]),
        "Bash": lambda: workspace.run(asked["command"]),
    }
    return {"type": "tool_result", "tool_use_id": call["id"], "content": tools[call["name"]]()}
