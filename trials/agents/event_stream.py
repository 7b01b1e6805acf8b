"""Posts a JSON body and reads the response's server-sent events, as agents do.

Used by replayed sessions. Independent of APIs. Invariant: every event's name is the `type` in its data.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any


def post_stream(address: str, path: str, body: Any, headers: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    with closing(http.client.HTTPConnection(address, timeout=60)) as connection:
        sent = {"content-type": "application/json", "accept": "text/event-stream", **headers}
        connection.request("POST", path, json.dumps(body).encode(), sent)
        answer = connection.getresponse()
        if answer.status != 200:
            raise AssertionError(f"{answer.status}: {answer.read().decode()}")
        name = ""
        for line in answer:
            key, _, value = line.decode().rstrip("\n").partition(": ")
            if key == "event":
                name = value
            elif key == "data":
                event = json.loads(value)
                assert event["type"] == name, f"event {name} has type {event['type']}"
                yield event
