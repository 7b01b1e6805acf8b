"""ServerState: the server's state as known to the Operations page, from its endpoints and feed.

Used by page.py, which reads the feed, and by the sections, which show it. Independent of how anything is shown.
Invariants: unknown events change nothing; a snapshot replaces the effects of earlier events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec
from msgspec.structs import replace as replaced

UNKNOWN: Final = "UNKNOWN"
"""State of a model whose server is unreachable."""


class RequestInFlight(msgspec.Struct, frozen=True, kw_only=True, rename={"number": "request"}):
    """A request of the feed.

    id        set by the client; "" = none
    key       name of its API key; "" = none
    reason    why it waits; "" = it does not wait
    received  Unix seconds
    """

    number: int
    id: str = ""
    key: str = ""
    model: str
    state: str = ""
    reason: str = ""
    received: float
    prompt_tokens: int | None = None
    output_tokens: int = 0
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Instance:
    model: str
    version: str
    name: str
    state: str
    reason: str = ""
    pid: int | None = None
    num_restarts: int = 0


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """One row of the repository index; empty version and state: never loaded."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LoadStage:
    text: str
    done: int = 0
    total: int = 0
    """0 = unknown."""

    @property
    def share(self) -> float | None:
        return self.done / self.total if self.total > 0 else None


@dataclass
class ServerState:
    """The state of the server for one open page."""

    models: list[ModelVersion] = field(default_factory=list)
    instances: dict[tuple[str, str, str], Instance] = field(default_factory=dict)
    """By model, version and instance name."""
    loads: dict[str, LoadStage] = field(default_factory=dict)
    """By model, while one of its versions is loading."""
    requests: dict[int, RequestInFlight] = field(default_factory=dict)
    scope: str = ""
    """Whose requests the feed shows: "all" or "own"; "" = there is no feed yet."""

    def take_index(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Applies a response of /v2/repository/index."""
        self.models = msgspec.convert(rows, list[ModelVersion])
        loading = {row.name for row in self.models if row.state == "LOADING"}
        self.loads = {name: stage for name, stage in self.loads.items() if name in loading}

    def lose(self) -> None:
        """The server is unreachable: its state is unknown until the next index and snapshot."""
        self.models = [replace(row, state=UNKNOWN, reason="") for row in self.models]
        self.loads, self.instances, self.requests = {}, {}, {}

    def instances_of(self, model: ModelVersion) -> list[Instance]:
        return [one for one in self.instances.values() if (one.model, one.version) == (model.name, model.version)]

    def apply(self, event: str, data: Mapping[str, Any]) -> None:
        """Applies an event of the feed."""
        handler = getattr(self, f"_on_{event}", None)
        if handler is not None:
            handler(data)

    def _on_snapshot(self, data: Mapping[str, Any]) -> None:
        self.scope = data["scope"]
        self.instances, self.requests = {}, {}
        for instance in data["instances"]:
            self._on_engine(instance)
            self._on_requests(instance | {"received": instance.get("requests", ())})

    def _on_engine(self, data: Mapping[str, Any]) -> None:
        key = (data["model"], str(data["version"]), data["instance"])
        if data["state"] == "stopped":
            self.instances.pop(key, None)
            return
        self.instances[key] = Instance(
            *key, data["state"], data.get("reason") or "", data.get("pid"), data.get("num_restarts") or 0
        )

    def _on_requests(self, data: Mapping[str, Any]) -> None:
        for row in data.get("received", ()):
            self.requests[row["request"]] = msgspec.convert(row | {"model": data["model"]}, RequestInFlight)
        for row in data.get("ended", ()):
            self.requests.pop(row["request"], None)

    def _on_steps(self, data: Mapping[str, Any]) -> None:
        """Counts tokens, and updates which requests are running and which are waiting."""
        gained: dict[int, int] = {}
        for step in data["steps"]:
            for number, _, _, _, num_tokens in step["rows"]:
                gained[number] = gained.get(number, 0) + num_tokens
        for number, num_tokens in gained.items():
            if (before := self.requests.get(number)) is not None:
                output_tokens = before.output_tokens + num_tokens
                self.requests[number] = replaced(before, state="running", reason="", output_tokens=output_tokens)
        for number, reason in data["steps"][-1]["waiting"] if data["steps"] else ():
            if (before := self.requests.get(number)) is not None:
                self.requests[number] = replaced(before, state="waiting", reason=reason)

    def _on_load(self, data: Mapping[str, Any]) -> None:
        self.loads[data["model"]] = LoadStage(data["stage"], data.get("done") or 0, data.get("total") or 0)

    def _on_model(self, data: Mapping[str, Any]) -> None:
        changed = ModelVersion(data["model"], str(data["version"]), data["state"], data.get("reason") or "")
        same = [(row.name, row.version) for row in self.models]
        if (changed.name, changed.version) in same:
            self.models[same.index((changed.name, changed.version))] = changed
        elif (changed.name, "") in same:
            self.models[same.index((changed.name, ""))] = changed
        else:
            self.models = sorted([*self.models, changed], key=lambda row: (row.name, row.version))
        if changed.state != "LOADING":
            self.loads.pop(changed.name, None)
