"""Checks of the fields that determine the form of an answer."""

from __future__ import annotations

import json
import re
from typing import Any

from .asking import Endpoint
from .table import Done, Row, promise

_WORDS: dict[str, Any] = {"enum": ["yes", "no"]}
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
_GRAMMAR = 'start: "yes" | "no"'


@promise("the answer is JSON, following the schema if given")
def _response_format(api: Endpoint) -> None:
    text = api.ask(response_format={"type": "text"}).text
    assert text == api.ask().text and not text.startswith("{")
    form = {"type": "json_schema", "json_schema": {"name": "one", "schema": _WORDS}}
    assert json.loads(api.ask(response_format=form).text) in ("yes", "no")
    assert api.ask(response_format={"type": "json_object"}, max_tokens=1).text[:1] == "{"


@promise("the answer follows the constraint")
def _structured_outputs(api: Endpoint) -> None:
    for texts in (["yes", "no"], ["left"]):
        assert api.ask(structured_outputs={"choice": texts}).text in texts
    assert re.fullmatch(r"\d\d", api.ask(structured_outputs={"regex": r"\d\d"}).text)


def _form(field: str, value: Any, pattern: str) -> Done:
    def check(api: Endpoint) -> None:
        assert not re.fullmatch(pattern, api.ask(max_tokens=32).text)
        assert re.fullmatch(pattern, api.ask(max_tokens=32, **{field: value}).text)

    return Done("the answer follows the constraint", check)


@promise("the white space between JSON tokens")
def _guided_whitespace_pattern(api: Endpoint) -> None:
    asked: dict[str, Any] = {"guided_json": _SCHEMA, "max_tokens": 48}
    texts = [api.ask(**asked, guided_whitespace_pattern=pattern).text for pattern in (" ", "\t")]
    assert re.fullmatch(r'\{ ?"a" ?: ?(true|false) ?\}', texts[0]) and " " in texts[0]
    assert re.fullmatch(r'\{\t?"a"\t?:\t?(true|false)\t?\}', texts[1])


@promise("this server's backend is accepted, others are refused")
def _guided_decoding_backend(api: Endpoint) -> None:
    assert api.ask(guided_regex="yes", guided_decoding_backend="guidance").text == "yes"
    assert api.refusal(guided_regex="yes", guided_decoding_backend="outlines")["param"] == "guided_decoding_backend"


_TAG = json.dumps({"type": "structural_tag", "format": {"type": "const_string", "value": "yes"}})
STRUCTURE: dict[str, Row] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _form("guided_json", _WORDS, '"(yes|no)"'),
    "guided_regex": _form("guided_regex", "[0-9]{3}", "[0-9]{3}"),
    "guided_choice": _form("guided_choice", ["yes", "no"], "yes|no"),
    "guided_grammar": _form("guided_grammar", _GRAMMAR, "yes|no"),
    "structural_tag": _form("structural_tag", _TAG, "yes"),
    "guided_whitespace_pattern": _guided_whitespace_pattern,
    "guided_decoding_backend": _guided_decoding_backend,
}
