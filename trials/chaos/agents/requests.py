"""Agents' requests, generated from a seed: the required form of an answer, the number of choices, the additional
features.

Used by the rounds of agents. Independent of faults and of how a request travels. Invariant: as in specs.py, the same
seed gives the same requests, and each specifies its sampling seed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from ..specs import StreamSpec

BUDGET_TOKENS = 24
"""Of thinking: the bundled model would never stop thinking by itself."""
_CITIES = ("Paris", "Rome", "Oslo", "Lima")
PLAN_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 40},
        "steps": {
            "type": "array",
            "minItems": 1,
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {
                    "what": {"type": "string", "maxLength": 24},
                    "minutes": {"type": "integer", "minimum": 1},
                },
                "required": ["what", "minutes"],
                "additionalProperties": False,
            },
        },
        "mood": {"enum": ["good", "bad", None]},
    },
    "required": ["title", "steps", "mood"],
    "additionalProperties": False,
}


def _tool(name: str, properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": f"To {name.replace('_', ' ')}", "parameters": parameters}
    return {"type": "function", "function": function | more}


TOOLS = (
    _tool("get_weather", {"city": {"type": "string", "maxLength": 30}}),
    _tool("book_table", {"name": {"type": "string", "maxLength": 30}, "guests": {"type": "integer", "minimum": 1}}),
)
"""Not closed against other properties: that is the template's and the model's business."""
PARAMETERS: dict[str, Any] = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


def _plain(rng: random.Random) -> dict[str, Any]:
    return {"ignore_eos": rng.random() < 0.5}


def _schema(rng: random.Random) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "plan", "schema": PLAN_SCHEMA}}}


def _required_tools(rng: random.Random) -> dict[str, Any]:
    named = {"type": "function", "function": {"name": "book_table"}}
    return {"tools": list(TOOLS), "tool_choice": rng.choice(["required", named])}


def _free_tools(rng: random.Random) -> dict[str, Any]:
    return {"tools": list(TOOLS)}


def _reasoning(rng: random.Random) -> dict[str, Any]:
    return {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": rng.randint(6, BUDGET_TOKENS)}


def _reasoning_and_schema(rng: random.Random) -> dict[str, Any]:
    return _reasoning(rng) | _schema(rng)


def _reasoning_and_tools(rng: random.Random) -> dict[str, Any]:
    return _reasoning(rng) | _required_tools(rng)


KINDS: tuple[Callable[[random.Random], dict[str, Any]], ...] = (
    _plain,
    _schema,
    _required_tools,
    _free_tools,
    _reasoning,
    _reasoning_and_schema,
    _reasoning_and_tools,
)
"""What may stand beside each: 3 choices, log probabilities of prompt or answer, an adapter."""


def make_agent_specs(seed: int, count: int, model: str, adapters: tuple[str, ...]) -> list[StreamSpec]:
    """Each kind in turn; three in four are streamed. `adapters`: names of models of the OpenAI API."""
    rng = random.Random(seed)
    return [_spec(rng, index, model, adapters) for index in range(count)]


def _spec(rng: random.Random, index: int, model: str, adapters: tuple[str, ...]) -> StreamSpec:
    body: dict[str, Any] = {"model": rng.choice([model, *adapters]), "messages": messages(rng, index)}
    body |= {"max_tokens": rng.randint(60, 220), "temperature": rng.choice([0.0, 0.6, 1.0]), "seed": index + 1}
    body |= KINDS[index % len(KINDS)](rng)
    body |= rng.choice([{}, {}, {"n": 3}])
    body |= rng.choice([{}, {}, {"logprobs": True, "top_logprobs": 2}])
    body |= rng.choice([{}, {}, {"prompt_logprobs": 2}])
    return StreamSpec(index, "agent", model, "", json.dumps(body), index % 4 != 3, None)


def messages(rng: random.Random, index: int) -> list[dict[str, str]]:
    city = rng.choice(_CITIES)
    asked = rng.choice([f"What is the weather in {city}?", f"Book a table in {city} for four", f"Plan a day in {city}"])
    asked += " " + "please " * rng.randint(0, 40)
    system = [{"role": "system", "content": "You are a helpful assistant."}] if rng.random() < 0.3 else []
    return [*system, {"role": "user", "content": f"{asked}({index})"}]
