"""Fields that ask for the form of an answer: OpenAI's `response_format`, vLLM's `structured_outputs` and older ones.

For: schema.py, whose models have these fields, and requests.py. Does not know: which constraints there are in detail:
the model checks them, and names the path of what is wrong. Invariant: a request asks in one field, and an error of the
model names that one.
Source: OpenAI's API reference; vLLM's protocol.py.
"""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from .errors import JsonObject, OpenAIError, missing
from .validation import AnyObject, ClosedObject, Expected, Flag, Items, NonEmpty

STRUCTURED_OUTPUTS = "structured_outputs"
"""The sampling parameter that constraints become."""
RESPONSE_FORMAT = "response_format"
_FORMER_FIELDS = (
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
    "structural_tag",
)
STRUCTURE_FIELDS = frozenset((STRUCTURED_OUTPUTS, *_FORMER_FIELDS))
"""The sampling parameters that ask for a form."""
_Schema = Annotated[AnyObject | str, Expected("a JSON schema: an object, or its JSON text")]
_Choices = Annotated[list[str], Items(1)]


class NamedSchema(ClosedObject):
    """A schema in OpenAI's envelope. It is enforced whether or not `strict` is true, which refuses a keyword that
    cannot be; `name` and `description` are labels."""

    field_aliases: ClassVar[frozenset[str]] = frozenset(("schema",))
    name: NonEmpty
    description: str | None = None
    schema_: Annotated[AnyObject | None, Field(alias="schema")] = None
    strict: Flag | None = None


class ResponseFormat(ClosedObject):
    """What an answer must be: any text, a JSON object, JSON of a schema, or text with tags in it."""

    field_aliases: ClassVar[frozenset[str]] = frozenset(("schema",))
    type: Annotated[
        Literal["text", "json_object", "json_schema", "structural_tag"],
        Expected("one of text, json_object, json_schema, structural_tag"),
    ]
    json_schema: NamedSchema | None = Field(None, description="With the type json_schema.")
    schema_: Annotated[
        AnyObject | None,
        Field(alias="schema", description="With the type json_object: its schema, as llama.cpp and Together have it."),
    ] = None
    format: AnyObject | None = Field(None, description="With the type structural_tag, in XGrammar's form.")
    structures: Annotated[list[AnyObject], Items(1)] | None = Field(
        None, description="With the type structural_tag, in vLLM's former form, with triggers."
    )
    triggers: Annotated[list[NonEmpty], Items(1)] | None = None

    def constraint(self) -> JsonObject | None:
        """As vLLM's `structured_outputs`. Raises OpenAIError for a field that belongs to another type."""
        fields = {name: value for name, value in self.__dict__.items() if value is not None and name != "type"}
        for name in fields:
            if name not in _FIELDS_OF_TYPE[self.type]:
                param = f"{RESPONSE_FORMAT}.{name.rstrip('_')}"
                raise OpenAIError(f"'{param}' belongs to another type than '{self.type}'", param=param)
        if self.type == "json_schema":
            if self.json_schema is None:
                raise missing(f"{RESPONSE_FORMAT}.json_schema")
            if self.json_schema.schema_ is None:
                raise missing(f"{RESPONSE_FORMAT}.json_schema.schema")
            return constraint_of(self.json_schema.schema_, self.json_schema.strict)
        if self.type == "structural_tag":
            return {"structural_tag": {"type": self.type, **fields}}
        if self.schema_ is not None:
            return constraint_of(self.schema_)
        return {"json_object": True} if self.type == "json_object" else None


def constraint_of(schema: JsonObject, strict: bool | None = None) -> JsonObject:
    """As vLLM's `structured_outputs`. strict: whether a keyword that cannot be enforced is refused."""
    return {"json": schema, "strict": True} if strict else {"json": schema}


_FIELDS_OF_TYPE: dict[str, tuple[str, ...]] = {
    "text": (),
    "json_object": ("schema_",),
    "json_schema": ("json_schema",),
    "structural_tag": ("format", "structures", "triggers"),
}
_PATH = re.compile(f"'{STRUCTURED_OUTPUTS}'(?: at /(json_object|json|structural_tag)(?=[/: ])(/[^: ]*)?)?")
"""Where in a constraint something is wrong, as the model says it."""


class StructuredOutputFields(ClosedObject):
    """Of both endpoints."""

    response_format: ResponseFormat | None = None
    structured_outputs: AnyObject | None = Field(
        None, description="One of json, regex, choice, grammar, json_object, structural_tag (a vLLM extra)."
    )
    guided_json: _Schema | None = Field(None, description="As structured_outputs.json.")
    guided_regex: NonEmpty | None = Field(None, description="As structured_outputs.regex.")
    guided_choice: _Choices | None = Field(None, description="As structured_outputs.choice.")
    guided_grammar: NonEmpty | None = Field(None, description="As structured_outputs.grammar.")
    structural_tag: NonEmpty | None = Field(None, description="As structured_outputs.structural_tag, as JSON text.")
    guided_decoding_backend: Annotated[Literal["auto", "guidance"], Expected("auto or guidance")] | None = None
    guided_whitespace_pattern: NonEmpty | None = Field(
        None, description="A regular expression of what may stand between the parts of JSON."
    )

    def chosen_structure(self) -> JsonObject:
        """Sampling parameters; empty where any text will do. Raises OpenAIError."""
        sent = {name: self.__dict__[name] for name in (STRUCTURED_OUTPUTS, *_FORMER_FIELDS)}
        chosen = {name: value for name, value in sent.items() if value is not None}
        constraint = self.response_format.constraint() if self.response_format else None
        if constraint is None:
            return chosen
        if chosen:
            name = next(iter(chosen))
            raise OpenAIError(f"'{RESPONSE_FORMAT}' and '{name}' exclude each other", param=name)
        return {STRUCTURED_OUTPUTS: constraint}

    @property
    def structure_field(self) -> str:
        """The client's field that `structured_outputs` of the sampling parameters comes from."""
        return RESPONSE_FORMAT if self.response_format is not None else STRUCTURED_OUTPUTS

    @property
    def schema_field(self) -> str:
        """Where in it a schema stands."""
        is_bare = self.response_format is not None and self.response_format.type == "json_object"
        return f"{RESPONSE_FORMAT}.schema" if is_bare else f"{RESPONSE_FORMAT}.json_schema.schema"


def in_structure_field(error: OpenAIError, field: str, schema_field: str) -> OpenAIError:
    """An error of the model about `structured_outputs`, in the words of the client's field."""

    def renamed(match: re.Match[str]) -> str:
        named = schema_field if match[1] == "json" else field
        return f"'{named}'" + (f" at {match[2]}" if match[2] else "")

    error.param = field
    error.message = _PATH.sub(renamed, error.message, count=1)
    return error
