"""Whether a response or message is what its request asked for, however it was produced.

Used by the rounds of agents. Independent of faults and of the undisturbed answer. Invariant: as in validity.py.
"""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema

from ..outcome import Outcome
from ..specs import StreamSpec
from .api_requests import PATCH
from .requests import PARAMETERS, PLAN_SCHEMA
from .validity import Validity

_CUT_OFF = ("max_output_tokens", "max_tokens ", "model_context_window_exceeded ")
_CALLS = ("function_call", "custom_tool_call", "tool_use")


def api_validity(spec: StreamSpec, seen: Outcome) -> Validity:
    body, parts = spec.sampling, dict(seen.parts)
    try:
        assert "usage" in parts, "no usage"
        if parts.get("finish_reason") in _CUT_OFF:
            return Validity(truncated=1)
        kinds = {int(name.split()[0]): kind for name, kind in parts.items() if name.endswith(" type")}
        assert sorted(kinds) == list(range(len(kinds))), f"items are numbered {sorted(kinds)}"
        if "text" in body or "output_config" in body:
            (place,) = (place for place, kind in kinds.items() if kind in ("message", "text"))
            jsonschema.validate(json.loads(parts[f"{place} text"]), PLAN_SCHEMA)
        calls = [place for place, kind in kinds.items() if kind in _CALLS]
        if "tool_choice" in body:
            assert calls, f"no call, tool_choice is {body['tool_choice']}"
            for place in calls:
                _check_call(parts, place)
    except (AssertionError, ValueError, KeyError, jsonschema.ValidationError) as error:
        return Validity(complaint=f"{type(error).__name__}: {error}"[:300])
    return Validity(valid=1)


def _check_call(parts: dict[str, str], place: int) -> None:
    name, text = parts[f"{place} name"], parts.get(f"{place} arguments") or parts.get(f"{place} input", "")
    if name == PATCH["name"]:
        format_: Any = PATCH["format"]
        assert re.fullmatch(format_["definition"], text), f"the input of {name} is {text!r}"
    else:
        jsonschema.validate(json.loads(text), PARAMETERS[name])
