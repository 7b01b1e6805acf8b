"""Ids of the items of responses: each says which response it is of, so that an item is found by its id alone.

For: the builder of outputs, the store's items, references to items. Does not know: what an item says. Invariant: a
function of the response's id and the item's place in it.
"""

from __future__ import annotations

import re
from typing import Literal

ID_PREFIX = "resp_"
"""Of responses."""
Side = Literal["i", "o"]
"""An item of a response's input, or of its output."""
_ID = re.compile(r"[a-z]+_([0-9a-f]{32})[io]\d+")
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
}


def item_id(kind: str, response_id: str, side: Side, index: int) -> str:
    """kind: the item's `type`"""
    return f"{_PREFIXES.get(kind, 'item')}_{response_id.removeprefix(ID_PREFIX)}{side}{index}"


def response_of(id: str) -> str | None:
    """The id of the response that the item is of; None for an id that was not made here."""
    found = _ID.fullmatch(id)
    return None if found is None else ID_PREFIX + found[1]
