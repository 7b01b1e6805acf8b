"""The models in the shape of Anthropic's API, for its clients, which send the header `anthropic-version`.

For: the router. Does not know: the host. Invariant: the same models under the same names as in the OpenAI API.
Source: Anthropic's API reference.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from starlette.requests import Request

from ..openai.errors import JsonObject, refuse

_DEFAULT_LIMIT: Final = 20
_MOST: Final = 1000


def model_info(model: JsonObject) -> JsonObject:
    """model: in OpenAI's shape"""
    length = model["max_model_len"]
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": datetime.fromtimestamp(model["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": length,
        "max_tokens": length,
    }


def model_page(request: Request, models: list[JsonObject]) -> JsonObject:
    """The page of `models` that the query asks for. Raises OpenAIError."""
    infos = [model_info(model) for model in models]
    ids = [info["id"] for info in infos]
    limit = _limit(request.query_params.get("limit"))
    first, end = 0, len(infos)
    if (after := request.query_params.get("after_id")) is not None:
        first = _position(ids, after, "after_id") + 1
    if (before := request.query_params.get("before_id")) is not None:
        end = _position(ids, before, "before_id")
        first = max(first, end - limit)
    page = infos[first:end][:limit]
    is_more = first > 0 if before is not None else first + len(page) < end
    return {
        "data": page,
        "has_more": is_more,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


def _limit(text: str | None) -> int:
    if text is None:
        return _DEFAULT_LIMIT
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and 1 <= int(text) <= _MOST):
        raise refuse("limit", f"an integer from 1 to {_MOST}", text)
    return int(text)


def _position(ids: list[str], id: str, param: str) -> int:
    if id not in ids:
        raise refuse(param, "the id of a model", id)
    return ids.index(id)
