"""AnswerPlan: how a chat's answer is parsed, and the grammar that makes it parseable: tools and reasoning.

Invariants: without tools and reasoning, the text is not parsed. What the model does not support is refused by name; so
is a grammar that is too large for the model's input, naming the schema that makes it so.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import orjson

from ..conversation.tools import Function, ToolUse
from ..http.errors import JsonObject, OpenAIError
from .call_grammars import (
    calls_or_answer,
    is_marked,
    optional_calls,
    property_path,
    required_calls,
    unenforced_locations,
    written_properties,
)
from .models import Target
from .parsers import ReasoningFormat, ToolCallFormat
from .request import MAX_SAMPLING_JSON_BYTES, STRUCTURED_OUTPUTS, GenerationRequest

_PATH = re.compile(
    "/structural_tag/\\S*?tags/(?P<index>\\d+)(?:/elements/2)?/content"
    "(?:/elements/(?P<element>\\d+))?(?:/content)*/(?:grammar|pattern|json_schema(?P<path>/[^\\s:]*)?)"
)
"""A location in a grammar of calls, as the model names it."""
_LOCATION = re.compile(f"'{STRUCTURED_OUTPUTS}' at (?P<place>{_PATH.pattern})")
CALL_ARGUMENTS: JsonObject = {"whitespace_pattern": "[ ]"}
"""Arguments are on one line, as templates show calls; otherwise a small model may write spaces up to its limit."""


@dataclass(frozen=True)
class AnswerPlan:
    """How all choices of one request are parsed."""

    tool_use: ToolUse | None
    tool_format: ToolCallFormat | None
    """None: calls are not parsed."""
    reasoning_format: ReasoningFormat | None
    includes_reasoning: bool
    shows_special_tokens: bool
    """Whether special tokens other than markers are content."""
    sampling: JsonObject = field(default_factory=dict)
    """Sampling parameters in addition to those of the request."""
    reads_tokens: bool = True
    """False: the answer is plain text, which is not parsed."""
    enforces_all: bool = True
    """Whether a grammar of calls enforces the arguments of all functions, not only of strict ones."""

    def is_about_calls(self, error: OpenAIError) -> bool:
        """Whether a model error is about the grammar of calls, which the client did not send."""
        return error.param == STRUCTURED_OUTPUTS and STRUCTURED_OUTPUTS in self.sampling

    def in_client_fields(self, error: OpenAIError) -> OpenAIError:
        """Rewrites an error about the grammar of calls in terms of the client's tools."""
        found = _LOCATION.search(error.message)
        own = None if found is None else self.client_path(found["place"])
        if found is None or own is None:
            return error
        error.param, _, path = own.partition("#")
        at = f" at {path}" if path else ""
        error.message = error.message.replace(found[0], f"'{error.param}'{at}", 1)
        return error

    def client_path(self, path: str) -> str | None:
        """Rewrites a path in the grammar of calls as `schema of the function#path`; None for any other path."""
        use, found = self.tool_use, _PATH.match(path)
        if use is None or found is None:
            return None
        function = use.functions[int(found["index"])]
        inside = found["path"] or ""
        if found["element"] is not None and function.input_grammar is None:
            inside = property_path(self._parameters[function.param][int(found["element"])]) + inside
        return f"{function.param}#{inside}"

    @functools.cached_property
    def _parameters(self) -> dict[str, list[str]]:
        """Names of tagged parameters in the order of their tags, by `Function.param`."""
        functions = self.tool_use.functions if self.tool_use is not None else ()
        return {function.param: list(written_properties(function.parameters)) for function in functions}

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar, possibly of calls, constrains the answer."""
        return STRUCTURED_OUTPUTS in self.sampling

    @property
    def free_functions(self) -> frozenset[str]:
        """Functions whose arguments no grammar enforces."""
        functions = self.tool_use.functions if self.tool_use is not None else ()
        enforces_all = self.has_grammar and self.enforces_all
        return frozenset(one.name for one in functions if not (enforces_all or (self.has_grammar and one.is_strict)))

    @property
    def not_enforced(self) -> Iterator[str]:
        calls = self.tool_format
        if self.has_grammar and self.tool_use is not None and calls is not None:
            yield from unenforced_locations(self.tool_use, calls.grammar)

    @property
    def schemas(self) -> dict[str, JsonObject]:
        return {function.name: function.parameters for function in self.tool_use.functions} if self.tool_use else {}


TEXT: Final = AnswerPlan(None, None, None, False, False, reads_tokens=False)


def plan_answer(request: GenerationRequest, target: Target) -> AnswerPlan:
    """Raises OpenAIError for what the model does not support."""
    try:
        return _plan(request, target)
    except OpenAIError as error:
        raise request.in_client_fields(error) from None


def _plan(request: GenerationRequest, target: Target) -> AnswerPlan:
    use, formats = request.tool_use, target.model.formats
    shows_special_tokens = request.sampling.get("skip_special_tokens") is False
    if not request.is_chat or (use is None and not _is_about_reasoning(request, target)):
        return replace(TEXT, shows_special_tokens=shows_special_tokens)
    formats.check(target.name)
    if use is not None and formats.tool_calls is None:
        reason = "has no tool-call parser configured, and none was detected from its chat template"
        raise _refused(target, use.field, reason)
    sampling: JsonObject = {}
    wanted = None if use is None else _wanted(request, use)
    if formats.reasoning is not None:
        sampling["reasoning_markers"] = [formats.reasoning.start, formats.reasoning.end]
    if (budget := request.reasoning.budget_tokens) is not None:
        sampling["thinking_token_budget"] = budget
    if use is not None and formats.tool_calls is not None:
        sampling |= _grammar_sampling(use, formats.tool_calls, formats.reasoning, wanted, target)
    return AnswerPlan(
        tool_use=use,
        tool_format=formats.tool_calls if use is not None else None,
        reasoning_format=formats.reasoning,
        includes_reasoning=request.reasoning.is_included,
        shows_special_tokens=shows_special_tokens,
        sampling=sampling,
        enforces_all=wanted is not None or (use is not None and use.is_required),
    )


def _is_about_reasoning(request: GenerationRequest, target: Target) -> bool:
    formats = target.model.formats
    if formats.reasoning is None and request.reasoning.budget_tokens is not None:
        formats.check(target.name)
        reason = "has no reasoning parser configured, and none was detected from its chat template"
        raise _refused(target, "thinking_token_budget", reason)
    return formats.reasoning is not None


def _wanted(request: GenerationRequest, use: ToolUse) -> JsonObject | None:
    """The request's constraint on the answer's text. Raises OpenAIError for one that excludes calls."""
    for name in request.sampling:
        if name.startswith("guided_") or name == "structural_tag":
            raise _excluded(use, name)
    wanted: JsonObject | None = request.sampling.get(STRUCTURED_OUTPUTS)
    return wanted


def _grammar_sampling(
    use: ToolUse, calls: ToolCallFormat, reasoning: ReasoningFormat | None, wanted: JsonObject | None, target: Target
) -> JsonObject:
    """Sampling parameters with the answer's grammar; {} if it has none. wanted: the requested constraint"""
    if not use.needs_grammar and wanted is None:
        return _one_call_sampling(use, calls, reasoning)
    if calls.only_required and not use.is_required:
        reason = f"writes calls in the format '{calls.name}', which a grammar can enforce only if a call is required"
        raise _refused(target, use.field, reason)
    if use.is_required:
        form = required_calls(use, calls.grammar)
    elif wanted is None:
        form = optional_calls(use, calls, reasoning)
    else:
        form = calls_or_answer(use, calls, reasoning, _as_format(wanted, use))
    arguments = CALL_ARGUMENTS if wanted is None else {}
    return {STRUCTURED_OUTPUTS: {"structural_tag": {"type": "structural_tag", "format": form}, **arguments}}


def _one_call_sampling(use: ToolUse, calls: ToolCallFormat, reasoning: ReasoningFormat | None) -> JsonObject:
    """If at most one call is allowed, ends the answer after it, to avoid generating useless tokens. Formats without
    JSON arguments, or without a marker before a call, drop later calls instead, as vLLM does."""
    if use.max_calls != 1 or calls.grammar.key_end or not is_marked(calls):
        return {}
    form = optional_calls(use, calls, reasoning)
    return {STRUCTURED_OUTPUTS: {"structural_tag": {"type": "structural_tag", "format": form}}}


def _as_format(wanted: JsonObject, use: ToolUse) -> JsonObject:
    if (schema := wanted.get("json")) is not None:
        return {"type": "json_schema", "json_schema": schema, "strict": bool(wanted.get("strict"))}
    if wanted.get("json_object"):
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    raise _excluded(use, STRUCTURED_OUTPUTS)


def _excluded(use: ToolUse, name: str) -> OpenAIError:
    message = f"'{name}' cannot be combined with '{use.field}': with tool calls, only a JSON schema is supported"
    return OpenAIError(message, param=name, code="unsupported_parameter")


def _refused(target: Target, field: str, reason: str) -> OpenAIError:
    message = f"'{field}' is not supported: the model '{target.name}' {reason}"
    return OpenAIError(message, param=field, code="unsupported_parameter")


def check_grammar_size(num_bytes: int, sampling: JsonObject, request: GenerationRequest, plan: AnswerPlan) -> None:
    """num_bytes: size of `sampling` as JSON. Raises OpenAIError if there are too many bytes and most of them are a
    grammar. Other large parameters are left to the model to refuse."""
    if num_bytes <= MAX_SAMPLING_JSON_BYTES or STRUCTURED_OUTPUTS not in sampling:
        return
    of_grammar = len(orjson.dumps(sampling[STRUCTURED_OUTPUTS]))
    if 2 * of_grammar < num_bytes:
        return
    size, field, of_all = max(_parts(request, plan), default=(of_grammar, request.structure_field, "has"))
    raise OpenAIError(
        f"'{field}' has {size} bytes, and {of_all} {of_grammar} bytes of JSON as a grammar, expected at most "
        f"{MAX_SAMPLING_JSON_BYTES} for all sampling parameters together",
        param=field,
    )


def _parts(request: GenerationRequest, plan: AnswerPlan) -> Iterator[tuple[int, str, str]]:
    """(bytes, field, subject and verb of the error message)"""
    if (wanted := request.sampling.get(STRUCTURED_OUTPUTS)) is not None:
        yield len(orjson.dumps(wanted)), request.structure_field, "has"
    if plan.tool_use is not None and STRUCTURED_OUTPUTS in plan.sampling:
        for function in plan.tool_use.functions:
            yield _size(function), function.param, "all tools have"


def _size(function: Function) -> int:
    grammar = function.input_grammar
    return len(orjson.dumps(function.parameters)) if grammar is None else len(grammar.definition.encode())
