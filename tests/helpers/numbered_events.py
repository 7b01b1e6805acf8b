"""The events of a resumable stream, with their ids."""

from __future__ import annotations

from typing import Any

import httpx

Event = tuple[str, str]
"""Its id and its data."""


def read_events(
    client: httpx.Client, path: str, body: Any, headers: dict[str, str], at_most: int = 1 << 30
) -> list[Event]:
    """Of the answer to a POST; leaves after `at_most` of them."""
    found: list[Event] = []
    content: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body}
    with client.stream("POST", path, **content, headers=headers) as response:
        assert response.status_code == 200, response.read()
        id = ""
        for line in response.iter_lines():
            name, _, value = line.partition(": ")
            if name == "id":
                id = value
            elif name == "data":
                found.append((id, value))
                if len(found) == at_most:
                    break
    return found
