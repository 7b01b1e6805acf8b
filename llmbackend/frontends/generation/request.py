"""GenerationRequest: a client's request in one form for all APIs.

Invariants: it is valid as far as can be checked without the model, and contains everything that the body asked for;
model errors are translated to the client's fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from llmbackend.core.tensors import Tensor

from ..conversation.tools import ToolUse
from ..http.errors import CONTEXT_LENGTH_EXCEEDED, JsonObject, OpenAIError
from .tensors import (
    INPUT_IDS,
    MESSAGES,
    RETURN_PROMPT_FIRST_TOKEN,
    RETURN_PROMPT_TEXT,
    RETURN_PROMPT_TOKEN_IDS,
    PromptDetails,
    TokenEntries,
)

STRUCTURED_OUTPUTS = "structured_outputs"
"""The sampling parameter for constraints."""
FORMER_FIELDS = (
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
    "structural_tag",
)
STRUCTURE_FIELDS = frozenset((STRUCTURED_OUTPUTS, *FORMER_FIELDS))
"""All sampling parameters that constrain the output."""
MAX_SAMPLING_JSON_BYTES: Final = 256 << 10
"""Limit of all sampling parameters together; the `llm` backend has the same."""
_PATH = re.compile(f"'{STRUCTURED_OUTPUTS}'(?: at /(json_object|json|structural_tag)(?=[/: ])(/[^: ]*)?)?")
"""A location in a constraint, as the model names it."""


def in_structure_field(error: OpenAIError, field: str, schema_field: str) -> OpenAIError:
    """A model error about `structured_outputs`, in terms of the client's field."""

    def renamed(match: re.Match[str]) -> str:
        named = schema_field if match[1] == "json" else field
        return f"'{named}'" + (f" at {match[2]}" if match[2] else "")

    error.param = field
    error.message = _PATH.sub(renamed, error.message, count=1)
    return error


FIRST_RANK = 0
"""The rank of a token that was not predicted."""


@dataclass(frozen=True, slots=True)
class LogprobForm:
    """The logprobs that a client asked for."""

    top: int
    """How many of the most likely tokens are returned, in addition to the chosen one; negative: all."""
    as_token_ids: bool = False
    """Whether tokens are written as `token_id:7` instead of their text."""
    token_ids: tuple[str, ...] = ()
    """Return these tokens instead of the most likely ones."""

    def token(self, token_id: str, entry: dict[str, Any]) -> str:
        if self.as_token_ids:
            return f"token_id:{token_id}"
        return entry["decoded_token"] or ""

    def others(self, entries: TokenEntries) -> list[tuple[str, dict[str, Any]]]:
        """The tokens to report: the chosen one and those of `token_ids`, or else the `top` most likely ones."""
        if self.token_ids:
            ids = dict.fromkeys((next(iter(entries)), *self.token_ids))
            return [(token_id, entries[token_id]) for token_id in ids if token_id in entries]
        ranked = sorted(entries.items(), key=lambda item: int(item[1]["rank"]))
        if self.top < 0:
            return ranked
        return [item for item in ranked if item[1]["rank"] <= self.top][: self.top]


@dataclass(frozen=True, slots=True)
class PromptForm:
    """Which details of the prompts the answer includes."""

    has_text: bool = False
    """`echo` of a prompt that was sent as token ids, or that may be cut."""
    has_echoed_logprobs: bool = False
    """`echo` with logprobs."""
    has_rendered_text: bool = False
    """`return_prompt_text`."""
    has_token_ids: bool = False
    logprobs: int | None = None
    """`prompt_logprobs`."""

    @property
    def is_requested(self) -> bool:
        return self != NO_PROMPT_FORM

    @property
    def inputs(self) -> dict[str, str]:
        """The model's input → the client's field that needs it."""
        wanted = {
            RETURN_PROMPT_TEXT: (
                "echo" if self.has_text else "return_prompt_text",
                self.has_text or self.has_rendered_text,
            ),
            RETURN_PROMPT_FIRST_TOKEN: ("echo", self.has_echoed_logprobs),
            RETURN_PROMPT_TOKEN_IDS: (
                "return_token_ids" if self.has_token_ids else "prompt_logprobs",
                self.has_token_ids or self.has_echoed_logprobs or self.logprobs is not None,
            ),
        }
        return {name: field for name, (field, is_wanted) in wanted.items() if is_wanted}

    def fields(self, prompt: PromptDetails) -> JsonObject:
        """Fields of the answer; in completions, of a choice."""
        fields: JsonObject = {}
        if self.has_rendered_text:
            fields["prompt_text"] = prompt.text
        if self.has_token_ids:
            fields["prompt_token_ids"] = prompt.token_ids
        if self.logprobs is not None:
            # JSON has no minus infinity: the model interface sends null, vLLM's server this number.
            text = prompt.logprobs_json.replace(b'"logprob":null', b'"logprob":-9999.0')
            fields["prompt_logprobs"] = orjson.Fragment(text)
        return fields

    def positions(self, prompt: PromptDetails) -> list[TokenEntries]:
        """The echoed logprobs of the prompt. The first token has none."""
        if not self.has_echoed_logprobs:
            return []
        first = {str(prompt.token_ids[0]): {"logprob": None, "rank": FIRST_RANK, "decoded_token": prompt.first_token}}
        return [first, *(entries for entries in prompt.logprobs[1:] if entries is not None)]


NO_PROMPT_FORM = PromptForm()


@dataclass(frozen=True, slots=True)
class ReasoningUse:
    is_included: bool = True
    budget_tokens: int | None = None
    """None: no limit."""


@dataclass(frozen=True, slots=True)
class StoredParts:
    """JSON parts of a chat whose answer will be stored."""

    messages: bytes
    """A list, as the client sent it."""
    fields: bytes
    """An object: fields that the stored answer repeats."""


@dataclass(frozen=True, slots=True)
class StreamForm:
    """What the client requested for a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Whether each chunk has the usage so far."""
    interval_tokens: int = 1
    """How many tokens of a choice are sent together."""


WITH_USAGE: Final = StreamForm(include_usage=True)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A client's request."""

    model: str
    """"": the server's only model."""
    prompts: tuple[Tensor, ...]
    """Tensors of one kind: `messages`, `text_input` or `input_ids`."""
    id_prefix: str
    """Prefix of the answer's id."""
    prompt_field: str
    """The client's field with the prompts."""
    sampling: dict[str, Any]
    """Sampling parameters under vLLM's names."""
    n: int = 1
    """Choices of each prompt; those of the first prompt come first."""
    num_generations: int = 1
    """Generations for all prompts: as many as choices, or more with `best_of`."""
    stream: StreamForm | None = None
    """None: a whole answer."""
    logprobs: LogprobForm | None = None
    """None: no logprobs."""
    return_token_ids: bool = False
    """Whether the answer includes its token ids."""
    include_metrics: bool = False
    """Whether the answer includes its timings; only with one choice."""
    prompt_form: PromptForm = NO_PROMPT_FORM
    labels: dict[str, Any] = field(default_factory=dict)
    """Labels for the access log."""
    echo: tuple[str, ...] = ("",)
    """The text before each choice's own, by prompt; "" for none, or if the model must provide it."""
    sent_fields: tuple[str, ...] = ()
    """The sampling fields that the client sent."""
    max_tokens_field: str = ""
    """The field that limits the answer; "" for none."""
    structure_field: str = STRUCTURED_OUTPUTS
    """The field that sets `structured_outputs`."""
    schema_field: str = ""
    """The path of its JSON schema."""
    field_names: Mapping[str, str] = field(default_factory=dict)
    """Names of chat's fields and of sampling parameters → the client's names."""
    request_id: str = ""
    """The client's id; "" for none."""
    tool_use: ToolUse | None = None
    """None: no tool may be called."""
    reasoning: ReasoningUse = ReasoningUse()
    stored: StoredParts | None = None
    """Set for a chat with `store`."""
    prior_output_ids: tuple[int, ...] = ()
    """Tokens already sent by an interrupted generation of the same request; generation continues after them. Requires
    one choice, and a seed unless the temperature is 0."""

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def is_chat(self) -> bool:
        return self.prompts[0].name == MESSAGES

    def in_client_fields(self, error: OpenAIError) -> OpenAIError:
        """A model error with the request's field names."""
        if error.param == "max_tokens" and self.max_tokens_field:
            error.param = self.max_tokens_field
            error.message = error.message.replace("'max_tokens'", f"'{self.max_tokens_field}'")
        elif error.param == STRUCTURED_OUTPUTS and self.structure_field != STRUCTURED_OUTPUTS:
            return in_structure_field(error, self.structure_field, self.schema_field)
        elif error.code == CONTEXT_LENGTH_EXCEEDED and error.param is None:
            error.param = self.prompt_field
            if self.prompt_field != MESSAGES:
                error.message = error.message.replace(f"input '{MESSAGES}'", f"'{self.prompt_field}'")
        elif error.param is None and error.status == 400 and f"input '{INPUT_IDS}'" in error.message:
            error.param = self.prompt_field
            error.message = error.message.replace(f"input '{INPUT_IDS}'", f"'{self.prompt_field}'")
        elif error.param is not None and (own := self.field_names.get(error.param)) is not None:
            error.message = error.message.replace(f"'{error.param}'", f"'{own}'")
            error.param = own
        return error
