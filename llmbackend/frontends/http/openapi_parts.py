"""The parts of OpenAPI 3.1 that the descriptions of paths are written with.

For: `kserve/openapi.py`, `openai/openapi.py`. Does not know: any path or field. Invariant: every function returns a
new object that is valid OpenAPI, or JSON Schema 2020-12.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

Json = dict[str, Any]

_MEANING: Final = {
    400: "The request is wrong: the text names what, and what was expected.",
    401: "No API key, or a wrong one; only where the server asks for keys.",
    403: "This API is restricted to those who send a certain header.",
    404: "No such model or version.",
    408: "The request did not arrive in time.",
    415: "The body is not of Content-Type application/json.",
    413: "The body is larger than the server accepts.",
    429: "Too many requests: try again after `Retry-After` seconds.",
    431: "The header is larger than the server accepts.",
    500: "As Triton's code INTERNAL: the body is not the JSON that was expected, or loading or the model failed.",
    501: "Not supported by this server or this model.",
    529: "Not now: as 503 elsewhere.",
    503: "Not now: the model is not ready, its queue is full, or the server is exiting.",
}
_RETRY_AFTER: Final = {"Retry-After": {"description": "Seconds.", "schema": {"type": "string"}}}


def ref(name: str) -> Json:
    """A reference to a schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def array(items: Json, **limits: int) -> Json:
    return {"type": "array", "items": items, **limits}


def closed(properties: Json, required: Sequence[str] | None = None) -> Json:
    """An object with these members and no others; all of them required unless said."""
    return open_object(properties, list(properties) if required is None else required) | {"additionalProperties": False}


def open_object(properties: Json, required: Sequence[str] = ()) -> Json:
    """An object whose other members are ignored."""
    return {"type": "object", "properties": properties} | ({"required": list(required)} if required else {})


def optional(schema: Json) -> Json:
    """`schema`, or null, which means the same as leaving the field out."""
    if "enum" in schema:
        return schema | {"enum": [*schema["enum"], None]}
    if isinstance(schema.get("type"), str):
        return schema | {"type": [schema["type"], "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def body(schema: str, *, required: bool = True) -> Json:
    """A JSON body. Outside of /v1 the server reads it as JSON whichever its Content-Type is."""
    return {"required": required, "content": {"application/json": {"schema": ref(schema)}}}


def json_response(schema: str) -> Json:
    return {"description": "The answer.", "content": {"application/json": {"schema": ref(schema)}}}


def plain_response(description: str, *content_types: str) -> Json:
    return {"description": description, "content": {kind: {} for kind in content_types}}


def refusals(schema: str, *statuses: int, streaming: bool = False) -> Json:
    """The error responses: JSON, which Triton labels text/plain on some paths, and an event where a stream was asked
    for."""
    kinds = ["application/json", "text/plain"] + (["text/event-stream"] if streaming else [])
    content: Json = {kind: {} for kind in kinds} | {"application/json": {"schema": ref(schema)}}
    return {
        str(status): {"description": _MEANING[status], "content": content}
        | ({"headers": _RETRY_AFTER} if status in (429, 503, 529) else {})
        for status in statuses
    }


def operation(
    summary: str, responses: Json, *, body: Json | None = None, parameters: Sequence[Mapping[str, Any]] = ()
) -> Json:
    made: Json = {"summary": summary, "responses": responses}
    if parameters:
        made["parameters"] = list(parameters)
    if body is not None:
        made["requestBody"] = body
    return made
