"""Tools of the Messages API: what a request may hold of them, and what it asks for with them.

For: requests.py. Does not know: how a model writes calls. Invariant: as everywhere a ToolUse is without contradictions;
tools that Anthropic's servers run, and those that its models know without a schema, are refused by name.
Source: Anthropic's API reference.
"""

from __future__ import annotations

import re
from typing import Final

from ..openai.errors import JsonObject, OpenAIError, as_json, refuse
from ..openai.tools import MAX_TOOLS, FunctionDefinition, Mode, OfferedTool, ToolChoice, ToolUse, tool_use
from .beta import BetaFields, a_flag, a_list, a_string, an_object, check_cache_control

_NAME: Final = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_FIELDS: Final = (
    "type",
    "name",
    "description",
    "input_schema",
    "strict",
    "cache_control",
    "eager_input_streaming",
    "defer_loading",
    "allowed_callers",
    "input_examples",
)
_MODES: Final[dict[str, Mode]] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


def read_tools(tools: object, choice: object, beta: BetaFields) -> ToolUse | None:
    """None where no tool may be called. Raises OpenAIError."""
    items = [] if tools is None else a_list(tools, "tools")
    if len(items) > MAX_TOOLS:
        message = f"'tools' holds {len(items)} tools, expected at most {MAX_TOOLS}"
        raise OpenAIError(message, param="tools", code="invalid_value")
    offered = [_read_tool(tool, f"tools[{index}]", beta) for index, tool in enumerate(items)]
    chosen, max_calls = (None, None) if choice is None else _read_choice(choice, beta)
    return tool_use(offered, chosen, max_calls)


def _read_tool(value: object, param: str, beta: BetaFields) -> OfferedTool:
    tool = an_object(value, param)
    if (kind := tool.get("type")) not in (None, "custom"):
        message = f"'{param}.type' is {as_json(kind)}: this server runs no tools of its own, and its models know none "
        message += "without a schema; expected a tool with 'name' and 'input_schema'"
        raise OpenAIError(message, param=f"{param}.type", code="unsupported_parameter")
    name = a_string(tool.get("name"), f"{param}.name")
    if not _NAME.fullmatch(name):
        raise refuse(f"{param}.name", "1 to 128 letters, digits, underscores, dashes or dots", name)
    schema = an_object(tool.get("input_schema"), f"{param}.input_schema")
    if (description := tool.get("description")) is not None:
        description = a_string(description, f"{param}.description", may_be_empty=True)
    _check_rest(tool, param, beta)
    is_strict = a_flag(tool.get("strict"), f"{param}.strict")
    function = FunctionDefinition.model_construct(
        name=name, description=description, parameters=schema, strict=is_strict
    )
    return OfferedTool.of(function, f"{param}.input_schema", f"{param}.name")


def _check_rest(tool: JsonObject, param: str, beta: BetaFields) -> None:
    """Fields that change nothing here, with the values of them that would."""
    check_cache_control(tool.get("cache_control"), f"{param}.cache_control", beta)
    if tool.get("eager_input_streaming") not in (None, True):
        beta.unserved(f"{param}.eager_input_streaming", "a call's input is always streamed as it is generated")
    if tool.get("defer_loading") not in (None, False):
        beta.unserved(f"{param}.defer_loading", "this server searches no tools: every tool is in the prompt")
    callers = tool.get("allowed_callers")
    if callers is not None and (not isinstance(callers, list) or "direct" not in callers):
        beta.unserved(f"{param}.allowed_callers", "tools are called by the model directly")
    if tool.get("input_examples"):
        beta.unserved(
            f"{param}.input_examples", "chat templates have no place for examples; write them into 'description'"
        )
    beta.check_names(tool, _FIELDS, param)


def _read_choice(value: object, beta: BetaFields) -> tuple[ToolChoice, int | None]:
    """With the number of calls that the answer may have, None for any."""
    choice = an_object(value, "tool_choice")
    kind = choice.get("type")
    if not isinstance(kind, str) or kind not in _MODES:
        raise refuse("tool_choice.type", 'one of "auto", "any", "tool", "none"', kind)
    fields = ("type", "name", "disable_parallel_tool_use") if kind == "tool" else ("type", "disable_parallel_tool_use")
    beta.check_names(choice, fields, "tool_choice")
    is_single = a_flag(choice.get("disable_parallel_tool_use"), "tool_choice.disable_parallel_tool_use")
    name = a_string(choice.get("name"), "tool_choice.name") if kind == "tool" else ""
    return ToolChoice(_MODES[kind], (name,) if name else None, is_named=bool(name)), 1 if is_single else None
