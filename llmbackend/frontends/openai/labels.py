"""Labels: fields by which a client marks its requests, and which ask nothing of the model.

For: the models of schema.py, which have these fields; the router, which puts them into the line that the access log has
of the request. Does not know: how that log is written. Invariant: a label changes no response, and what is logged of it
is bounded.
Source: OpenAI's API reference for `metadata`'s limits.
"""

import json
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from .errors import JsonObject, refuse
from .validation import AnyObject, ClosedObject

_MAX_PAIRS, _MAX_KEY_CHARS, _MAX_VALUE_CHARS = 16, 64, 512
_LOGGED_CHARS = 64
"""Of each label, after escaping."""


def _check_metadata(value: object) -> object:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise refuse("metadata", "an object", value)
    if len(value) > _MAX_PAIRS:
        raise refuse("metadata", f"at most {_MAX_PAIRS} pairs", value)
    for key, text in value.items():
        if len(key) > _MAX_KEY_CHARS:
            raise refuse("metadata", f"keys of at most {_MAX_KEY_CHARS} characters", key)
        if not isinstance(text, str) or len(text) > _MAX_VALUE_CHARS:
            raise refuse(f"metadata.{key}", f"a string of at most {_MAX_VALUE_CHARS} characters", text)
    return value


_JSON_SCHEMA: JsonObject = {
    "maxProperties": _MAX_PAIRS,
    "propertyNames": {"maxLength": _MAX_KEY_CHARS},
    "additionalProperties": {"type": "string", "maxLength": _MAX_VALUE_CHARS},
}
Metadata = Annotated[
    Annotated[AnyObject, Field(json_schema_extra=_JSON_SCHEMA)] | None, BeforeValidator(_check_metadata)
]


class Labels(ClosedObject):
    """A label of a request."""

    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    session_id: str | None = None
    metadata: Metadata = None

    def sent_labels(self) -> dict[str, Any]:
        fields = self.__dict__
        return {name: fields[name] for name in Labels.__pydantic_fields__ if fields[name] is not None}


def logged(labels: dict[str, Any]) -> str:
    """` name="value"` for each label: one line of ASCII, whatever the client sent."""
    return "".join(f" {name}={_quoted(value)}" for name, value in labels.items())


def _quoted(value: Any) -> str:
    text = json.dumps(value[:_LOGGED_CHARS] if isinstance(value, str) else value)
    return text if len(text) <= _LOGGED_CHARS else f"{text[:_LOGGED_CHARS]}..."
