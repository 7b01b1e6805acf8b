"""Sections of the Operations page: models, requests in flight, API keys, settings.

Used by page.py. Independent of the feed. Invariant: a section sends rows to the browser only if they have changed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from nicegui import ui

from .state import UNKNOWN, ModelVersion, ServerState
from .tables import DataTable, OnAction, Tone, action, column, progress, state

MAX_REQUESTS_SHOWN: Final = 100
MAX_KEYS_SHOWN: Final = 100
_MODEL_TONES: Final[dict[str, Tone]] = {"READY": "ok", "LOADING": "busy", "UNLOADING": "busy", "UNAVAILABLE": "bad"}
_UNLOADED: Final = "unloaded"
"""Triton's reason for a model that was unloaded on request."""


def card(title: str) -> tuple[ui.element, ui.label]:
    """A section with a heading, and a label that is hidden while it is empty."""
    with ui.element("section").classes("ops-card").props(f'aria-label="{title}"') as made:
        with ui.element("h2").classes("ops-card__title"):
            ui.label(title)
        said = ui.label().classes("ops-card__note")
        said.bind_visibility_from(said, "text", bool)
    return made, said


class ModelsSection:
    """`act(model, "load" | "unload")`."""

    def __init__(self, act: OnAction) -> None:
        made, self._note = card("Models")
        columns = [
            column("name", "Model", "code"),
            column("version", "Version"),
            column("state", "State", "state"),
            column("detail", "Detail", "progress"),
            column("instances", "Instances"),
            column("actions", "Actions", "actions"),
        ]
        with made:
            self._table = DataTable("Models", columns, "The repository has no models.", act)

    def show(self, server: ServerState, *, may_load: bool, why_not: str) -> None:
        self._note.text = why_not
        self._table.show([_model_row(row, server, may_load) for row in server.models])


def _model_row(row: ModelVersion, server: ServerState, may_load: bool) -> dict[str, Any]:
    may_load = may_load and row.state != UNKNOWN
    is_unloaded = not row.state or (row.state == "UNAVAILABLE" and row.reason == _UNLOADED)
    is_busy = row.state in ("LOADING", "UNLOADING")
    tone: Tone = "quiet" if is_unloaded else _MODEL_TONES.get(row.state, "quiet")
    stage = server.loads.get(row.name) if row.state == "LOADING" else None
    reason = "" if row.reason == _UNLOADED else row.reason
    detail = progress(stage.text, stage.share, is_busy=True) if stage else progress(reason, is_busy=is_busy)
    word = "not loaded" if is_unloaded else "not known" if row.state == UNKNOWN else row.state.lower()
    load = action("load", "Reload" if row.state == "READY" else "Load", row.name, is_disabled=not may_load or is_busy)
    unload = action("unload", "Unload", row.name, is_disabled=not may_load or is_busy or is_unloaded)
    return {
        "id": f"{row.name}/{row.version}",
        "name": row.name,
        "version": row.version,
        "state": state(word, tone),
        "detail": detail,
        "instances": _instances_text(row, server),
        "actions": [load, unload],
    }


def _instances_text(row: ModelVersion, server: ServerState) -> str:
    texts = []
    for one in server.instances_of(row):
        restarts = f", {one.num_restarts} restart{'s' * (one.num_restarts > 1)}" if one.num_restarts else ""
        process = f", process {one.pid}" if one.pid else ""
        texts.append(f"{one.name}: {one.state}{process}{restarts}")
    return "; ".join(texts)


class RequestsSection:
    """`act(number, "cancel")`."""

    def __init__(self, act: OnAction) -> None:
        made, self._note = card("Requests in flight")
        columns = [
            column("number", "Number"),
            column("client_id", "Client's id", "code"),
            column("model", "Model", "code"),
            column("key", "Key"),
            column("state", "State", "state"),
            column("tokens", "Prompt + output", "progress"),
            column("age", "Age", "number"),
            column("actions", "Actions", "actions"),
        ]
        with made:
            self._table = DataTable("Requests in flight", columns, "No request is in flight.", act)

    def show(self, server: ServerState) -> None:
        rows = sorted(server.requests.values(), key=lambda row: row.number)
        self._note.text = _requests_note(len(rows), server.scope)
        shown = []
        for row in rows[:MAX_REQUESTS_SHOWN]:
            waits = f"waiting: {row.reason}" if row.reason else row.state
            shown.append(
                {
                    "id": str(row.number),
                    "number": row.number,
                    "client_id": row.id,
                    "model": row.model,
                    "key": row.key,
                    "state": state(waits, "ok" if row.state == "running" else "busy"),
                    "tokens": _tokens(row.prompt_tokens, row.output_tokens, row.max_tokens),
                    "age": duration(time.time() - row.received),
                    "actions": [action("cancel", "Cancel", f"request {row.number}")],
                }
            )
        self._table.show(shown)


def _requests_note(count: int, scope: str) -> str:
    beyond = f"{count} requests; showing the first {MAX_REQUESTS_SHOWN}." if count > MAX_REQUESTS_SHOWN else ""
    own = "Only requests of your key are shown." if scope == "own" else ""
    return f"{beyond} {own}".strip()


def _tokens(prompt: int | None, output: int, most: int | None) -> dict[str, Any]:
    if most is None:
        return progress("not counted")
    before = "" if prompt is None else f"{prompt} + "
    return progress(f"{before}{output} of {most}", min(output / most, 1.0) if most else None)


def duration(seconds: float) -> str:
    """`4 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`."""
    whole = max(int(seconds), 0)
    minutes, s = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {s} s" if minutes else f"{s} s"


class KeysSection:
    def __init__(self) -> None:
        made, self._note = card("API keys")
        columns = [
            column("name", "Key", "code"),
            column("role", "Role"),
            column("concurrent", "At once", "number"),
            column("requests", "Requests left", "progress"),
            column("tokens", "Tokens left", "progress"),
            column("accepted", "Accepted", "number"),
            column("refused", "Refused", "number"),
            column("used", "Tokens used", "number"),
        ]
        with made:
            self._table = DataTable("API keys", columns, "")

    def show(self, report: Mapping[str, Any]) -> None:
        if not report["needs_key"]:
            self.refuse("This server requires no API keys: anyone who can reach it can use it.")
            return
        keys = report["keys"][:MAX_KEYS_SHOWN]
        beyond = report["num_keys"] > len(keys)
        self._note.text = f"{report['num_keys']} keys; showing the first {len(keys)}." if beyond else ""
        self._table.set_visibility(True)
        self._table.show([_key_row(row) for row in keys])

    def refuse(self, why: str) -> None:
        self._note.text = why
        self._table.show([])
        self._table.set_visibility(False)


def _key_row(row: Mapping[str, Any]) -> dict[str, Any]:
    limits, left, total = row["limits"], row["left"], row["total"]
    most = limits["concurrent_requests"]
    refused = total["rate_limited"] + total["forbidden"] + total["restricted"]
    return {
        "id": row["name"],
        "name": row["name"],
        "role": row["role"],
        "concurrent": f"{row['concurrent_requests']} of {most}" if most else str(row["concurrent_requests"]),
        "requests": _left(left["requests"], limits["requests_per_minute"]),
        "tokens": _left(left["tokens"], limits["tokens_per_minute"]),
        "accepted": f"{total['accepted']:,}",
        "refused": f"{refused:,}",
        "used": f"{total['prompt_tokens'] + total['generated_tokens']:,}",
    }


def _left(left: int | None, per_minute: int | None) -> dict[str, Any]:
    if left is None or per_minute is None:
        return progress("no limit")
    return progress(f"{left:,} of {per_minute:,} per minute", min(max(left / per_minute, 0.0), 1.0))


class SettingsSection:
    """The server's version, start and flags."""

    def __init__(self) -> None:
        made, self._note = card("Version and settings")
        columns = [column("flag", "Flag", "code"), column("value", "Value", "code")]
        with made:
            self._facts = ui.element("dl").classes("ops-facts")
            self._table = DataTable("Settings", columns, "All flags have default values.").classes("ops-table--pairs")

    def show(self, report: Mapping[str, Any]) -> None:
        facts = {
            "Server": report["name"],
            "Version": report["version"],
            "Process": str(report["pid"]),
            "Running since": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(report["started"])),
            "Loading by request": _allowed(report["allows_load"], "--model-control-mode=explicit"),
            "Killing engines": _allowed(report["allows_kill"], "--allow-fault-injection"),
        }
        self._note.text = ""
        self._facts.clear()
        with self._facts:
            for name, value in facts.items():
                with ui.element("div"):
                    with ui.element("dt"):
                        ui.label(name)
                    with ui.element("dd"):
                        ui.label(value)
        self._table.set_visibility(True)
        self._table.show([{"id": row["flag"], **row} for row in report["flags"]])

    def refuse(self, why: str) -> None:
        self._note.text = why
        self._facts.clear()
        self._table.show([])
        self._table.set_visibility(False)


def _allowed(is_allowed: bool, flag: str) -> str:
    return "allowed" if is_allowed else f"not allowed (needs {flag})"
