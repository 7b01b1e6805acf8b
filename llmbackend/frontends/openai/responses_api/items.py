"""The items of a request's input and of conversations.

Invariants: every item that this server writes is accepted as input; items and content parts of other types are refused
by type and path. They are TypedDicts, because a body may contain thousands of them (see messages.py). Sources: OpenAI's
API reference, `ResponseInputItem`; what Codex sends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import BeforeValidator, ConfigDict, Discriminator, Tag
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict  # pydantic accepts typing.TypedDict only from Python 3.12 on

from ...generation.validation import AnyObject, Expected, Items, OfTypes, Only, refuse_unknown
from ...http.errors import JsonObject
from ..schema import TEXT_ONLY
from .tools import DIRECT_ONLY, HOSTED, Tools

REFUSED_PARTS: Mapping[str, str] = dict.fromkeys(("input_image", "input_file", "input_audio"), TEXT_ONLY)
REFUSED_ITEMS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "file_search_call", "web_search_call", "code_interpreter_call", "image_generation_call", "computer_call",
            "computer_call_output", "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output",
            "apply_patch_call", "apply_patch_call_output", "mcp_list_tools", "mcp_approval_request",
            "mcp_approval_response", "mcp_call", "program", "program_output",
        ),
        HOSTED,
    ),
    "compaction_trigger": "conversations are compacted by POST /v1/responses/compact",
    "configuration_update": "these are fields of the request",
}  # fmt: skip
_DIRECT = {"type": "direct"}
_Status = (
    Annotated[
        Literal["in_progress", "completed", "incomplete"],
        Expected('"in_progress", "completed" or "incomplete"'),
    ]
    | None
)
_CLOSED = ConfigDict(extra="allow", json_schema_extra={"additionalProperties": {"type": "null"}})
"""`check_fields` refuses unknown fields that are not null: pydantic would collect an error for each."""


class _Closed(TypedDict):
    __pydantic_config__ = _CLOSED  # type: ignore[misc]


class InputText(_Closed):
    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: NotRequired[AnyObject | None]


class OutputText(_Closed):
    type: Literal["output_text"]
    text: str
    annotations: NotRequired[list[Any] | None]
    logprobs: NotRequired[list[Any] | None]


class RefusalPart(_Closed):
    type: Literal["refusal"]
    refusal: str


class ReasoningText(_Closed):
    type: Literal["reasoning_text"]
    text: str


class SummaryText(_Closed):
    type: Literal["summary_text"]
    text: str


def item_type(item: Mapping[str, Any]) -> object:
    """Short messages and references may omit their type."""
    kind = item.get("type")
    if kind is None and "role" in item:
        return "message"
    return "item_reference" if kind is None and "id" in item else kind


def _string_or_list(value: object) -> object:
    if not isinstance(value, str | list):
        raise PydanticCustomError("expected", "a string or a list")
    return value


def _form(value: object) -> str:
    return "(text)" if isinstance(value, str) else "(list)"


_InputPart = Annotated[Any, OfTypes({"input_text": InputText}, REFUSED_PARTS)]
_MessagePart = Annotated[
    Any, OfTypes({"input_text": InputText, "output_text": OutputText, "refusal": RefusalPart}, REFUSED_PARTS)
]
MessageContent = Annotated[
    Annotated[str, Tag("(text)")] | Annotated[list[_MessagePart], Items(), Tag("(list)")],
    Discriminator(_form),
    BeforeValidator(_string_or_list),
]
ToolOutput = Annotated[
    Annotated[str, Tag("(text)")] | Annotated[list[_InputPart], Items(), Tag("(list)")],
    Discriminator(_form),
    BeforeValidator(_string_or_list),
]


class MessageItem(_Closed):
    """A message of the client or of a model, in short or full form."""

    type: NotRequired[Literal["message"] | None]
    id: NotRequired[str | None]
    role: Annotated[
        Literal["user", "assistant", "system", "developer"],
        Expected('"user", "assistant", "system" or "developer"'),
    ]
    content: MessageContent
    status: NotRequired[_Status]
    phase: NotRequired[
        Annotated[Literal["commentary", "final_answer"], Expected('"commentary" or "final_answer"')] | None
    ]


class ReasoningItem(_Closed):
    """The text is in `content`, or sealed in `encrypted_content`, or is another server's `summary`."""

    type: Literal["reasoning"]
    id: NotRequired[str | None]
    summary: NotRequired[Annotated[list[Annotated[Any, OfTypes({"summary_text": SummaryText})]], Items()] | None]
    content: NotRequired[Annotated[list[Annotated[Any, OfTypes({"reasoning_text": ReasoningText})]], Items()] | None]
    encrypted_content: NotRequired[str | None]
    status: NotRequired[_Status]


class _OfTool(_Closed):
    id: NotRequired[str | None]
    call_id: str
    namespace: NotRequired[str | None]
    status: NotRequired[_Status]
    caller: NotRequired[Annotated[Any, Only(_DIRECT, reason=DIRECT_ONLY)]]


class _Call(_OfTool):
    name: str


class FunctionCallItem(_Call):
    type: Literal["function_call"]
    arguments: str


class CustomToolCallItem(_Call):
    type: Literal["custom_tool_call"]
    input: str


class _Output(_OfTool):
    name: NotRequired[str | None]
    output: ToolOutput


class FunctionCallOutputItem(_Output):
    type: Literal["function_call_output"]


class CustomToolCallOutputItem(_Output):
    type: Literal["custom_tool_call_output"]


_ByClient = Annotated[Any, Only("client", reason=HOSTED)]


class ToolSearchCallItem(_Closed):
    type: Literal["tool_search_call"]
    id: NotRequired[str | None]
    call_id: str
    arguments: AnyObject
    execution: NotRequired[_ByClient]
    status: NotRequired[_Status]


class ToolSearchOutputItem(_Closed):
    """The tools in it become callable."""

    type: Literal["tool_search_output"]
    id: NotRequired[str | None]
    call_id: str
    tools: Tools
    execution: NotRequired[_ByClient]
    status: NotRequired[_Status]


class AdditionalToolsItem(_Closed):
    type: Literal["additional_tools"]
    id: NotRequired[str | None]
    role: Annotated[Literal["developer"], Expected('"developer"')]
    tools: Tools


class CompactionItem(_Closed):
    """A sealed summary of all earlier items."""

    type: Literal["compaction"]
    id: NotRequired[str | None]
    encrypted_content: str
    created_by: NotRequired[str | None]


class ItemReference(_Closed):
    """Refers to a stored item."""

    type: NotRequired[Literal["item_reference"] | None]
    id: str


ITEM_FORMS: Mapping[str, type] = {
    "message": MessageItem,
    "reasoning": ReasoningItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "custom_tool_call": CustomToolCallItem,
    "custom_tool_call_output": CustomToolCallOutputItem,
    "tool_search_call": ToolSearchCallItem,
    "tool_search_output": ToolSearchOutputItem,
    "additional_tools": AdditionalToolsItem,
    "compaction": CompactionItem,
    "item_reference": ItemReference,
}
Item = Annotated[Any, OfTypes(ITEM_FORMS, REFUSED_ITEMS, item_type)]
Input = Annotated[
    Annotated[str, Tag("(text)")] | Annotated[list[Item], Items(), Tag("(list)")],
    Discriminator(_form),
    BeforeValidator(_string_or_list),
]

_FIELDS = {name: frozenset(form.__annotations__) for name, form in ITEM_FORMS.items()}
_PART_FIELDS = {
    "input_text": frozenset(InputText.__annotations__),
    "output_text": frozenset(OutputText.__annotations__),
    "refusal": frozenset(RefusalPart.__annotations__),
    "reasoning_text": frozenset(ReasoningText.__annotations__),
    "summary_text": frozenset(SummaryText.__annotations__),
}
_PART_LISTS = ("content", "summary", "output")


def check_fields(items: Sequence[JsonObject], field: str = "input") -> None:
    """Raises OpenAIError for an unknown field of an item of `field`, or of its parts."""
    for index, item in enumerate(items):
        kind = item_type(item)
        refuse_unknown(item, _FIELDS[str(kind)], f"{field}[{index}]", may_be_null=True)
        for name in _PART_LISTS:
            if isinstance(parts := item.get(name), list):
                for number, part in enumerate(parts):
                    param = f"{field}[{index}].{name}[{number}]"
                    refuse_unknown(part, _PART_FIELDS[part["type"]], param, may_be_null=True)


_WITHOUT_STATUS = ("reasoning", "additional_tools", "compaction")


def full_item(item: JsonObject) -> JsonObject:
    """A valid item in its stored form: with type and status, without null fields, a message's text as a part."""
    kind = item_type(item)
    full = {"type": kind} | {name: value for name, value in item.items() if value is not None}
    if kind not in _WITHOUT_STATUS and item.get("status") is None:
        full["status"] = "completed"
    if kind == "message" and isinstance(text := item["content"], str):
        is_answer = item["role"] == "assistant"
        form: JsonObject = {"type": "output_text", "annotations": []} if is_answer else {"type": "input_text"}
        full["content"] = [form | {"text": text}]
    return full
