"""From the body of a create-response request, and what it refers to, to one frozen message.

For: the router. Does not know: the host, how the store keeps items, how responses are written. Invariant: as of
requests.py: the request holds everything that the body asked for. It is read in two steps, since the history must be
fetched in between; both are in proportion to the body, so the router takes large ones off the event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import TypeAdapter

from ..errors import JsonObject, OpenAIError, missing
from ..logprobs import LogprobForm
from ..reasoning import ReasoningUse
from ..requests import GenerationRequest
from ..schema import StreamOptions
from ..sealed_reasoning import FIXED_KEY, SealingKey
from ..tensors import messages_tensor
from ..validation import read
from .conversation import Conversation, is_unfinished, without_former_reasoning
from .item_ids import ID_PREFIX
from .items import check_fields, full_item, item_type
from .request import NO_HISTORY, OUTPUT_LOGPROBS, History, ResponsesRequest, WantedHistory
from .schema import TEXT_FORMAT, ResponsesBody
from .tool_fields import Tools
from .tools import OfferedTools, shown_tools

_FIELD_NAMES = {
    "logprobs": "include",
    "reasoning_effort": "reasoning.effort",
    "messages": "input",
}
"""What the model and the rest of this frontend call what has another name here."""
_TOOLS: TypeAdapter[Any] = TypeAdapter(Tools)
_WITH_USAGE = StreamOptions.model_construct(include_usage=True)
_LOGGED_CLIENT_METADATA_BYTES = 256


@dataclass(frozen=True, slots=True)
class ReadBody:
    """A body whose fields are valid each by itself."""

    fields: ResponsesBody
    body: JsonObject
    wanted: WantedHistory
    """To be fetched before the next step."""


def read_responses(body: JsonObject) -> ReadBody:
    """The first step. Raises OpenAIError naming the first wrong, unknown or unsupported field."""
    fields = read(ResponsesBody, body)
    fields.check()
    check_fields(items := _items(body))
    references = tuple(item["id"] for item in items if item_type(item) == "item_reference")
    conversation = fields.conversation.id if fields.conversation is not None else None
    return ReadBody(fields, body, WantedHistory(fields.previous_response_id, conversation, references))


def parse_responses(read: ReadBody, history: History = NO_HISTORY, key: SealingKey = FIXED_KEY) -> ResponsesRequest:
    """The second step. history: what was fetched; key: seals reasoning. Raises OpenAIError naming what is wrong, or
    what the store does not have."""
    fields, wanted = read.fields, read.wanted
    own = _own_items(read, history)
    tools = _tools(fields, history)
    return ResponsesRequest(
        generation=_generation(read, history, own, tools, key),
        echo=_echo(fields, read.body),
        input_items=tuple(own),
        tools=tools.named,
        store=fields.store is not False,
        background=bool(fields.background),
        include=frozenset(fields.include or ()),
        previous_response_id=wanted.previous_response_id,
        conversation=wanted.conversation,
        max_tool_calls=fields.max_tool_calls,
    )


def _items(body: JsonObject) -> list[JsonObject]:
    """Of `input`, where it is a list."""
    items = body.get("input")
    return items if isinstance(items, list) else []


def _own_items(read: ReadBody, history: History) -> list[JsonObject]:
    """What the body brought, complete: items that it refers to in their place. Raises OpenAIError for one that is not
    there."""
    text = read.body.get("input")
    if isinstance(text, str):
        return [full_item({"role": "user", "content": text})]
    own: list[JsonObject] = []
    for index, item in enumerate(_items(read.body)):
        kind = item_type(item)
        if kind != "item_reference":
            own.append(full_item(item))
        elif (found := history.by_id.get(item["id"])) is not None:
            own.append(found)
        else:
            param = f"input[{index}].id"
            message = f"'{param}': no item with the id '{item['id'][:80]}' is stored"
            raise OpenAIError(message, param=param, status=404, code="not_found")
    return own


def _tools(fields: ResponsesBody, history: History) -> OfferedTools:
    tools = OfferedTools()
    tools.add_own(fields.tools or ())
    for item in history.items:
        if found := item.get("tools"):
            tools.add_found(_TOOLS.validate_python(found), "tools")
    read: Iterable[Any] = fields.input if isinstance(fields.input, list) else ()
    for index, item in enumerate(read):
        if found := item.get("tools"):
            tools.add_found(found, f"input[{index}].tools")
    return tools


def _messages(read: ReadBody, history: History, own: list[JsonObject], key: SealingKey) -> list[JsonObject]:
    fields, conversation = read.fields, Conversation(key)
    if fields.instructions:
        conversation.add_system(fields.instructions)
    before = "conversation" if fields.conversation is not None else "previous_response_id"
    for item in history.items:
        conversation.add(item, before)
    for index, item in enumerate(own):
        conversation.add(item, f"input[{index}]")
    messages = conversation.messages()
    if not messages or (not own and read.wanted.is_empty):
        if fields.input is None:
            raise missing("input")
        text = "'input' is empty, expected a text or a list of at least one item"
        raise OpenAIError(text, param="input", code="missing_required_parameter")
    if fields.reasoning is not None and fields.reasoning.context == "current_turn":
        return without_former_reasoning(messages)
    return messages


def _template_options(fields: ResponsesBody, items: Sequence[JsonObject]) -> JsonObject:
    options: JsonObject = {}
    kwargs = dict(fields.chat_template_kwargs or {})
    if fields.text is not None and fields.text.verbosity is not None:
        kwargs.setdefault("verbosity", fields.text.verbosity)
    if kwargs:
        options["chat_template_kwargs"] = kwargs
    if fields.reasoning is not None and fields.reasoning.effort is not None:
        options |= {"reasoning_effort": fields.reasoning.effort, "reasoning_effort_is_hint": True}
    if is_unfinished(items):
        options["continue_final_message"] = True
    return options


def _generation(
    read: ReadBody, history: History, own: list[JsonObject], tools: OfferedTools, key: SealingKey
) -> GenerationRequest:
    fields = read.fields
    use = tools.use(fields.tool_choice, _max_calls(fields))
    options = _template_options(fields, own or history.items)
    messages = _messages(read, history, own, key)
    if any(message["role"] == "system" for message in messages[1:]):
        options["system_is_anywhere"] = True
    if use is not None:
        options["tools"] = use.tools
    structure, structure_field = fields.chosen_structure()
    sampling = fields.chosen_sampling() | structure
    names = dict(_FIELD_NAMES)
    if fields.truncation == "auto":
        sampling["truncate_prompt_tokens"] = -1
        names["truncate_prompt_tokens"] = "truncation"
    sent = (*sampling, *(("max_tokens",) if fields.max_output_tokens is not None else ()))
    sampling["max_tokens"] = fields.max_output_tokens
    logprobs = _logprobs(fields)
    if logprobs is not None:
        sampling["logprobs"] = logprobs.top
    return GenerationRequest(
        model=fields.model,
        prompts=(messages_tensor(messages, options),),
        id_prefix=ID_PREFIX,
        prompt_field="input",
        sampling=sampling,
        stream=_WITH_USAGE if fields.stream else None,
        logprobs=logprobs,
        labels=_labels(fields),
        sent_fields=sent,
        max_tokens_field="max_output_tokens" if fields.max_output_tokens is not None else "",
        structure_field=structure_field,
        schema_field=f"{TEXT_FORMAT}.schema",
        field_names=names,
        tool_use=use,
        reasoning=ReasoningUse(budget_tokens=fields.thinking_token_budget),
    )


def _max_calls(fields: ResponsesBody) -> int | None:
    return 1 if fields.parallel_tool_calls is False else fields.max_tool_calls


def _logprobs(fields: ResponsesBody) -> LogprobForm | None:
    if OUTPUT_LOGPROBS not in (fields.include or ()):
        return None
    return LogprobForm(fields.top_logprobs or 0, token_ids=tuple(map(str, fields.logprob_token_ids or ())))


def _labels(fields: ResponsesBody) -> dict[str, Any]:
    labels = fields.sent_labels()
    if fields.client_metadata:
        labels["client_metadata"] = orjson.dumps(fields.client_metadata)[:_LOGGED_CLIENT_METADATA_BYTES].decode(
            errors="replace"
        )
    return labels


def _echo(fields: ResponsesBody, body: JsonObject) -> JsonObject:
    """The body's own fields in the response, with OpenAI's defaults for those that were not sent. `temperature` and
    `top_p`, whose defaults are the model's, are told by `effective_sampling`."""
    return {
        "background": bool(fields.background),
        "conversation": None if fields.conversation is None else {"id": fields.conversation.id},
        "frequency_penalty": fields.frequency_penalty or 0.0,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": fields.max_tool_calls,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "presence_penalty": fields.presence_penalty or 0.0,
        "previous_response_id": fields.previous_response_id,
        "prompt_cache_key": fields.prompt_cache_key,
        "prompt_cache_retention": fields.prompt_cache_retention,
        "reasoning": _shown_reasoning(body.get("reasoning") or {}),
        "safety_identifier": fields.safety_identifier,
        "service_tier": "default",
        "store": fields.store is not False,
        "text": _shown_text(body.get("text") or {}),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": shown_tools(body.get("tools") or ()),
        "top_logprobs": fields.top_logprobs or 0,
        "truncation": fields.truncation or "disabled",
        "user": fields.user,
    }


def effective_sampling(asked: Mapping[str, Any], defaults: Mapping[str, float]) -> JsonObject:
    """asked: a request's sampling parameters; defaults: its model's own"""
    return {name: asked.get(name, defaults.get(name, 1.0)) for name in ("temperature", "top_p")}


def _shown_reasoning(sent: Mapping[str, Any]) -> JsonObject:
    return {"effort": sent.get("effort"), "summary": None}


def _shown_text(sent: Mapping[str, Any]) -> JsonObject:
    form = {name: value for name, value in (sent.get("format") or {}).items() if value is not None}
    if form.get("type") == "json_schema":
        form = {"description": None, "strict": False} | form
    return {"format": form or {"type": "text"}, "verbosity": sent.get("verbosity") or "medium"}
