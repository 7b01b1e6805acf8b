"""A viewer of /v2/engine/events on its own thread: stores all events received and the state that they describe."""

from __future__ import annotations

import http.client
import json
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.helpers.waiting import eventually

PATH = "/v2/engine/events"
WAIT_S = 20.0


@dataclass(frozen=True)
class Event:
    name: str
    id: str
    data: Any


class EventsViewer:
    """Reads until the server ends the stream, or `close`."""

    def __init__(self, address: str, query: str = "interval_ms=50", key: str = "") -> None:
        """address: host and port. Returns when the snapshot is there."""
        self.events: list[Event] = []
        self._connection = http.client.HTTPConnection(address, timeout=60)
        self._connection.connect()
        self._socket = self._connection.sock
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._connection.request("GET", f"{PATH}?{query}", headers=headers)
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200, self._answer.read()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        eventually(lambda: self.events)

    def _read(self) -> None:
        fields: dict[str, str] = {}
        try:
            for line in self._answer:
                name, _, value = line.decode().rstrip("\n").partition(": ")
                fields[name] = value
                if name == "data":
                    self.events.append(Event(fields["event"], fields["id"], json.loads(value)))
        except (OSError, ValueError, http.client.HTTPException):
            pass  # closed

    def close(self) -> None:
        self._connection.sock = None
        self._socket.shutdown(2)
        self._thread.join(WAIT_S)
        self._answer.close()
        self._socket.close()
        assert not self._thread.is_alive()

    def wait_until_over(self) -> None:
        """The server ends the stream."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the stream goes on"
        self.close()

    def wait_for(self, condition: Callable[[], object]) -> None:
        eventually(condition, WAIT_S)

    @property
    def snapshot(self) -> Any:
        return self.events[0].data

    def of(self, *names: str) -> list[Any]:
        return [event.data for event in list(self.events) if event.name in names]

    @property
    def received(self) -> dict[int, Any]:
        """Requests by number, as they were told first."""
        found: dict[int, Any] = {}
        for data in self.of("requests"):
            for request in data["received"]:
                found.setdefault(request["request"], request)
        return found

    @property
    def ended(self) -> dict[int, Any]:
        return {end["request"]: end for data in self.of("requests") for end in data["ended"]}

    @property
    def steps(self) -> list[Any]:
        return [step for data in self.of("steps") for step in data["steps"]]

    @property
    def output_tokens(self) -> Counter[int]:
        """By request, as the steps say."""
        found: Counter[int] = Counter()
        for step in self.steps:
            for request, _, _, _, num_tokens in step["rows"]:
                found[request] += num_tokens
        return found

    def numbers(self) -> set[int]:
        """Every number of a request in any event."""
        found = {
            request["request"]
            for data in self.of("snapshot")
            for one in data["instances"]
            for request in one["requests"]
        }
        found |= self.received.keys() | self.ended.keys()
        for step in self.steps:
            found |= {row[0] for row in step["rows"]} | set(step["preempted"]) | {one[0] for one in step["waiting"]}
        for data in self.of("blocks"):
            found |= {run[3] for run in data["runs"] if run[3] is not None}
        return found
