"""Reads the body of a create-response request, and the history that it refers to, into a ResponsesRequest.

There are two steps, because the history is fetched in between; both take time proportional to the body, so endpoints
run them off the event loop for large bodies. Source: OpenAI's API reference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from pydantic import TypeAdapter

from ...conversation.tools import INPUT, NamedTool
from ...conversation.turns import Turn, Turns, called
from ...generation.request import NO_PROMPT_FORM, WITH_USAGE, GenerationRequest, LogprobForm, PromptForm, ReasoningUse
from ...generation.sealed_reasoning import FIXED_KEY, SealingKey
from ...generation.tensors import messages_tensor
from ...generation.validation import read
from ...http.errors import JsonObject, OpenAIError, missing, refuse
from .items import check_fields, full_item, item_type
from .output_items import ID_PREFIX
from .schema import OUTPUT_LOGPROBS, TEXT_FORMAT, ResponsesBody
from .tools import TOOL_SEARCH, OfferedTools, Tools, called_name, shown_tools


@dataclass(frozen=True, slots=True)
class WantedHistory:
    """What a body needs from the store."""

    previous_response_id: str | None = None
    conversation: str | None = None
    """The id of the conversation."""
    item_ids: tuple[str, ...] = ()
    """The ids in `item_reference` items."""

    @property
    def is_empty(self) -> bool:
        return not (self.previous_response_id or self.conversation or self.item_ids)


@dataclass(frozen=True, slots=True)
class History:
    items: tuple[JsonObject, ...] = ()
    """Input and output of the previous responses, or the conversation; oldest first."""
    by_id: Mapping[str, JsonObject] = field(default_factory=dict)
    """The items that the body refers to."""
    size_bytes: int = 0
    """Size of its JSON."""
    ancestors: tuple[str, ...] = ()
    """Ids of the previous responses."""


NO_HISTORY = History()


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """A client's request."""

    generation: GenerationRequest
    echo: JsonObject
    """The request's fields that the response repeats."""
    input_items: tuple[JsonObject, ...]
    """The body's own items in their stored form, with the ids that were sent."""
    tools: Mapping[str, NamedTool]
    """By the names that the model uses."""
    store: bool
    background: bool
    include: frozenset[str]
    previous_response_id: str | None
    conversation: str | None
    """The id of the conversation."""


_FIELD_NAMES = {
    "logprobs": "include",
    "reasoning_effort": "reasoning.effort",
    "messages": "input",
    **dict.fromkeys(("return_prompt_text", "return_token_ids"), "enable_response_messages"),
}
"""Names used by the model and by chats → the names of this API."""
_TOOLS: TypeAdapter[Any] = TypeAdapter(Tools)
_WITH_PROMPT = PromptForm(has_rendered_text=True, has_token_ids=True)
_LOGGED_CLIENT_METADATA_BYTES = 256
_SYSTEM_JOINT = "\n\n"
_SUMMARY_HEAD = "Summary of our conversation so far:\n\n"


@dataclass(frozen=True, slots=True)
class ReadBody:
    """A body whose fields are valid on their own."""

    fields: ResponsesBody
    body: JsonObject
    wanted: WantedHistory


def read_responses(body: JsonObject) -> ReadBody:
    """The first step. Raises OpenAIError naming the first invalid, unknown or unsupported field."""
    fields = read(ResponsesBody, body)
    fields.check()
    check_fields(items := _items(body))
    references = tuple(item["id"] for item in items if item_type(item) == "item_reference")
    conversation = fields.conversation.id if fields.conversation is not None else None
    return ReadBody(fields, body, WantedHistory(fields.previous_response_id, conversation, references))


def parse_responses(read: ReadBody, history: History = NO_HISTORY, key: SealingKey = FIXED_KEY) -> ResponsesRequest:
    """The second step. Raises OpenAIError naming what is invalid or missing from the store."""
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
    )


def _items(body: JsonObject) -> list[JsonObject]:
    """The items of `input`, if that is a list."""
    items = body.get("input")
    return items if isinstance(items, list) else []


def _own_items(read: ReadBody, history: History) -> list[JsonObject]:
    """The body's items, with references replaced. Raises OpenAIError for an unknown one."""
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


def _conversation(read: ReadBody, history: History, own: list[JsonObject], key: SealingKey) -> Turns:
    fields, conversation = read.fields, _Conversation(key)
    if fields.instructions:
        conversation.add_system(fields.instructions)
    before = "conversation" if fields.conversation is not None else "previous_response_id"
    for item in history.items:
        conversation.add_item(item, before)
    for index, item in enumerate(own):
        conversation.add_item(item, f"input[{index}]")
    if not conversation.all or (not own and read.wanted.is_empty):
        if fields.input is None:
            raise missing("input")
        text = "'input' is empty, expected a string or a list of at least one item"
        raise OpenAIError(text, param="input", code="missing_required_parameter")
    if fields.reasoning is not None and fields.reasoning.context == "current_turn":
        _without_former_reasoning(conversation.all)
    return conversation


def _template_options(fields: ResponsesBody, items: Sequence[JsonObject]) -> JsonObject:
    options: JsonObject = {}
    kwargs = dict(fields.chat_template_kwargs or {})
    if fields.text is not None and fields.text.verbosity is not None:
        kwargs.setdefault("verbosity", fields.text.verbosity)
    if kwargs:
        options["chat_template_kwargs"] = kwargs
    if fields.reasoning is not None and fields.reasoning.effort is not None:
        options["reasoning_effort"] = fields.reasoning.effort
    if _is_unfinished(items):
        options["continue_final_message"] = True
    return options


def _generation(
    read: ReadBody, history: History, own: list[JsonObject], tools: OfferedTools, key: SealingKey
) -> GenerationRequest:
    fields = read.fields
    use = tools.use(fields.tool_choice, 1 if fields.parallel_tool_calls is False else fields.max_tool_calls)
    options = _template_options(fields, own or history.items)
    conversation = _conversation(read, history, own, key)
    if conversation.has_later_system:
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
        model=fields.model or "",
        prompts=(messages_tensor(conversation.messages(), options),),
        id_prefix=ID_PREFIX,
        prompt_field="input",
        sampling=sampling,
        stream=WITH_USAGE if fields.stream else None,
        logprobs=logprobs,
        return_token_ids=bool(fields.enable_response_messages),
        prompt_form=_WITH_PROMPT if fields.enable_response_messages else NO_PROMPT_FORM,
        labels=_labels(fields),
        sent_fields=sent,
        max_tokens_field="max_output_tokens" if fields.max_output_tokens is not None else "",
        structure_field=structure_field,
        schema_field=f"{TEXT_FORMAT}.schema",
        field_names=names,
        tool_use=use,
        reasoning=ReasoningUse(budget_tokens=fields.thinking_token_budget),
    )


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
    """The request's fields that the response repeats, with OpenAI's defaults; for `temperature` and `top_p`, whose
    defaults are the model's, see `effective_sampling`."""
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
        "reasoning": {"effort": (body.get("reasoning") or {}).get("effort"), "summary": None},
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
    """asked: the request's values. defaults: the model's"""
    return {name: asked.get(name, defaults.get(name, 1.0)) for name in ("temperature", "top_p")}


def _shown_text(sent: Mapping[str, Any]) -> JsonObject:
    form = {name: value for name, value in (sent.get("format") or {}).items() if value is not None}
    if form.get("type") == "json_schema":
        form = {"description": None, "strict": False} | form
    return {"format": form or {"type": "text"}, "verbosity": sent.get("verbosity") or "medium"}


class _Conversation(Turns):
    """Turns of items. The items of one answer, which are those between two inputs, become one assistant message, as in
    a chat's history. A message directly after a message continues it if that is unfinished, else it belongs to another
    answer."""

    def __init__(self, key: SealingKey) -> None:
        super().__init__()
        self._key = key
        self._is_unfinished = False
        """Whether the last item is an unfinished answer."""

    def add_system(self, text: str) -> None:
        """System messages at the beginning are joined into one, because many templates accept only one."""
        is_first = not self.all or (len(self.all) == 1 and self.all[0].role == "system")
        turn = self.of("system") if is_first else self.add(Turn("system"))
        turn.joint = _SYSTEM_JOINT
        turn.texts.append(text)

    def add_item(self, item: Mapping[str, Any], param: str) -> None:
        """Adds a valid item, at `param`. Raises OpenAIError for text that was not sealed here."""
        match item_type(item):
            case "message":
                self._add_message(item)
            case "reasoning":
                self._add_to_answer("reasoning").reasoning.append(_reasoning(item, param, self._key))
            case "function_call":
                self._add_call(item, item["name"], item["arguments"])
            case "custom_tool_call":
                self._add_call(item, item["name"], orjson.dumps({INPUT: item["input"]}).decode())
            case "tool_search_call":
                self._add_call(item, TOOL_SEARCH, orjson.dumps(item["arguments"]).decode())
            case "function_call_output" | "custom_tool_call_output":
                self._add_output(item, _text(item["output"]))
            case "tool_search_output":
                self._add_output(item, orjson.dumps(item["tools"]).decode())
            case "compaction":
                self._add_summary(_unsealed(item["encrypted_content"], f"{param}.encrypted_content", self._key))
        self._is_unfinished = _is_unfinished((item,))

    def _add_message(self, item: Mapping[str, Any]) -> None:
        text = _text(item["content"])
        if item["role"] == "assistant":
            last = self.all[-1] if self.all else Turn("")
            is_another = last.role == "assistant" and last.last_kind == "text" and not self._is_unfinished
            turn = self.add(Turn("assistant")) if is_another else self._add_to_answer("text")
            turn.texts.append(text)
        elif item["role"] in ("system", "developer"):
            self.add_system(text)
        else:
            self.add(Turn("user", [text]))

    def _add_call(self, item: Mapping[str, Any], name: str, arguments: str) -> None:
        call = called(item["call_id"], called_name(name, item.get("namespace")), arguments)
        self._add_to_answer("call").calls.append(call)

    def _add_output(self, item: Mapping[str, Any], text: str) -> None:
        self.add(Turn("tool", [text], fields={"tool_call_id": item["call_id"]}))

    def _add_summary(self, text: str) -> None:
        """Adds the summary as an assistant message. The user's messages before it, whose answers are gone, become one
        message, because many templates require alternating roles."""
        while len(self.all) > 1 and self.all[-1].role == self.all[-2].role == "user":
            last = self.all.pop()
            self.all[-1].texts += last.texts
        self.add(Turn("assistant", [_SUMMARY_HEAD + text]))

    def _add_to_answer(self, kind: str) -> Turn:
        turn = self.of("assistant")
        turn.last_kind = kind
        return turn


def _without_former_reasoning(turns: Sequence[Turn]) -> None:
    """Drops the reasoning before the user's last message."""
    last = max((index for index, turn in enumerate(turns) if turn.role == "user"), default=0)
    for turn in turns[:last]:
        turn.reasoning = []


def _is_unfinished(items: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last item is an unfinished answer with text, which the model continues, as in vLLM."""
    last = items[-1] if items else {}
    is_answer = last.get("role") == "assistant" and item_type(last) == "message"
    return is_answer and last.get("status") in ("in_progress", "incomplete") and bool(_text(last["content"]).strip())


def _reasoning(item: Mapping[str, Any], param: str, key: SealingKey) -> str:
    content, sealed = item.get("content"), item.get("encrypted_content")
    if sealed is not None:
        try:
            return _unsealed(sealed, f"{param}.encrypted_content", key)
        except OpenAIError:
            if not content:
                raise
    return _joined(content or item.get("summary") or ())


def _unsealed(sealed: str, param: str, key: SealingKey) -> str:
    try:
        return key.unseal(sealed)
    except ValueError as error:
        raise refuse(param, f"text that this server sealed ({error})", sealed) from None


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    return content if isinstance(content, str) else _joined(content)


def _joined(parts: Iterable[Mapping[str, Any]]) -> str:
    return "\n".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in parts)
