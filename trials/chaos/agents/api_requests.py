"""The agents' requests again, over Responses, over Messages, and in the background.

Used by the rounds of agents. Independent of faults and of how a request travels. Invariant: as in requests.py.
"""

from __future__ import annotations

import json
import random
from typing import Any

from ..specs import Protocol, StreamSpec
from .requests import KINDS, messages

API_PROTOCOLS: tuple[Protocol, ...] = ("responses", "messages", "background")
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "To change a file.",
    "format": {"type": "grammar", "syntax": "regex", "definition": "(add|drop) [a-z]{1,12}\\n"},
}
"""A custom tool, whose input is text of a grammar."""
_SAME = ("temperature", "seed", "ignore_eos", "chat_template_kwargs")
"""Fields of a chat that a response has under the same name."""


def make_api_specs(seed: int, count: int, model: str) -> list[StreamSpec]:
    """Protocols in turn, and each kind of request in each of them; three in four are streamed."""
    rng = random.Random(seed)
    return [_spec(rng, index, model) for index in range(count)]


def _spec(rng: random.Random, index: int, model: str) -> StreamSpec:
    protocol = API_PROTOCOLS[index % len(API_PROTOCOLS)]
    chat = KINDS[index // len(API_PROTOCOLS) % len(KINDS)](rng)
    chat |= {"messages": messages(rng, index), "max_tokens": rng.randint(60, 220)}
    chat |= {"temperature": rng.choice([0.0, 0.6, 1.0]), "seed": index + 1}
    body = _as_message(chat) if protocol == "messages" else _as_response(rng, chat)
    return StreamSpec(900_000 + index, protocol, model, "", json.dumps({"model": model} | body), index % 4 != 3, None)


def _as_response(rng: random.Random, chat: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = {
        name: chat[name] for name in ("temperature", "seed", "ignore_eos", "chat_template_kwargs") if name in chat
    }
    body |= {"input": chat["messages"], "max_output_tokens": chat["max_tokens"]}
    if "response_format" in chat:
        body["text"] = {"format": {"type": "json_schema", "strict": True} | chat["response_format"]["json_schema"]}
    if "tools" in chat:
        body["tools"] = [{"type": "function", "strict": False} | tool["function"] for tool in chat["tools"]]
    if "tool_choice" in chat:
        named = isinstance(chat["tool_choice"], dict)
        body["tool_choice"] = {"type": "custom", "name": PATCH["name"]} if named else "required"
        body["tools"].append(PATCH)
    return body | rng.choice([{}, {"include": ["reasoning.encrypted_content", "message.output_text.logprobs"]}])


def _as_message(chat: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = {name: chat[name] for name in ("max_tokens", "temperature") if name in chat}
    system = [one["content"] for one in chat["messages"] if one["role"] == "system"]
    body |= {"messages": [one for one in chat["messages"] if one["role"] != "system"], "top_k": 1}
    body |= {"system": system[0]} if system else {}
    if "response_format" in chat:
        schema = chat["response_format"]["json_schema"]["schema"]
        body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
    if "tools" in chat:
        body["tools"] = [_tool(one["function"]) for one in chat["tools"]]
    if "tool_choice" in chat:
        named = isinstance(chat["tool_choice"], dict)
        body["tool_choice"] = {"type": "tool", "name": "book_table"} if named else {"type": "any"}
    if "thinking_token_budget" in chat:
        body["thinking"] = {"type": "enabled", "budget_tokens": 1024}
        body["max_tokens"] = 1100
    return body


def _tool(function: dict[str, Any]) -> dict[str, Any]:
    return {"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}
