"""Whether an answer is what its request asked for, however it was produced.

Used by the rounds of agents. Independent of faults and of the undisturbed answer. Invariant: an answer that was cut off
at its token limit need not be complete, and is counted separately.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import jsonschema

from ..outcome import Outcome
from ..specs import StreamSpec
from .requests import PARAMETERS


@dataclass(frozen=True)
class Validity:
    """Choices that are whole and valid, those that were cut off, and what is wrong ("" if nothing)."""

    valid: int = 0
    truncated: int = 0
    complaint: str = ""


def validity(spec: StreamSpec, seen: Outcome) -> Validity:
    body, parts = spec.sampling, dict(seen.parts)
    valid = truncated = 0
    try:
        for choice in range(body.get("n", 1)):
            reason = parts.get(f"{choice} finish_reason")
            if reason == "length":
                truncated += 1
                continue
            _check_choice(body, parts, choice, reason)
            valid += 1
        _check_beside(body, parts)
    except (AssertionError, ValueError, KeyError, jsonschema.ValidationError) as error:
        return Validity(valid, truncated, f"{type(error).__name__}: {error}"[:300])
    return Validity(valid, truncated)


def _check_choice(body: dict[str, Any], parts: dict[str, str], choice: int, reason: str | None) -> None:
    calls = [key for key in parts if key.startswith(f"{choice} call ") and key.endswith("arguments")]
    is_named = isinstance(body.get("tool_choice"), dict)  # then OpenAI's API says stop
    is_held = "tool_choice" in body  # a free call may be broken off by the model: then it is no reason to end
    is_whole = bool(calls) and (is_held or all(_is_json(parts[key]) for key in calls))
    expected = ("tool_calls",) if is_whole and not is_named else ("stop", "tool_calls") if calls else ("stop",)
    assert reason in expected, f"choice {choice} has {len(calls)} calls and ended by {reason}"
    if "response_format" in body:
        schema = body["response_format"]["json_schema"]["schema"]
        jsonschema.validate(json.loads(parts[f"{choice} content"]), schema)
    if is_held:
        assert calls, f"choice {choice} has no call, tool_choice is {body['tool_choice']}"
    for key in calls:
        name = parts[key.replace("arguments", "name")]
        if is_held:
            jsonschema.validate(json.loads(parts[key]), PARAMETERS[name])


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _check_beside(body: dict[str, Any], parts: dict[str, str]) -> None:
    for choice in range(body.get("n", 1)):
        assert not body.get("logprobs") or f"{choice} logprobs" in parts, f"choice {choice} has no logprobs"
        if "thinking_token_budget" in body and f"{choice} content" in parts:  # a model may end before it thinks
            assert f"{choice} reasoning" in parts, f"choice {choice} has no reasoning"
    assert "prompt_logprobs" not in body or "prompt_logprobs" in parts, "no prompt_logprobs"
    assert "usage" in parts, "no usage"
