"""The screen of `llmbackend top`: a table of instances, and a table of as many requests as fit.

Invariants: nothing exceeds the terminal: the least important columns are dropped first; texts from clients are shown
without control characters.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..terminal_text import bar, harmless_line
from .feed_state import FeedState, Figures, Key, Request, figures

_STATE_STYLES = {"ready": "green", "recovering": "bold yellow", "starting": "yellow", "failed": "bold red"}
_BAR_WIDTH = 8
_FRAME_LINES = 6
"""Lines around the requests: title, notice, heads of two tables, a line between them, one at the bottom."""


@dataclass(frozen=True, slots=True)
class View:
    url: str
    width: int
    height: int
    now_s: float
    notice: str = ""
    """What is wrong with the connection."""


def render(state: FeedState, view: View) -> RenderableType:
    rows = figures(state, view.now_s)
    parts: list[RenderableType] = [_title(state, rows, view)]
    if view.notice:
        parts.append(Text(harmless_line(view.notice), "bold yellow", no_wrap=True, overflow="ellipsis"))
    parts.append(_instances(rows, view.width))
    parts += [
        Text(harmless_line(f"{row.instance}: {row.reason}"), "yellow", no_wrap=True, overflow="ellipsis")
        for row in rows
        if row.reason
    ]
    room = view.height - _FRAME_LINES - len(rows) - sum(bool(row.reason) for row in rows)
    if room > 0:
        parts += ["", _requests(state, view, room)]
    return Group(*parts)


def _title(state: FeedState, rows: list[Figures], view: View) -> Text:
    server = f"{state.server.get('name', '')} {state.server.get('version', '')}".strip()
    clock = time.strftime("  %H:%M:%S", time.localtime(state.server_time(view.now_s))) if state.has_snapshot else ""
    rate = sum(row.output_tokens_per_s for row in rows)
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{rate:,.0f} tokens/s", "bold")
    text.append(f"  {sum(row.num_running for row in rows)} running, {sum(row.num_waiting for row in rows)} waiting  ")
    text.append(harmless_line(f"{server} at {view.url}{clock}"), "dim")
    if state.scope == "own":
        text.append("  requests of this key", "dim")
    if state.num_dropped:
        text.append(f"  {state.num_dropped} events missed", "dim")
    return text


# --- instances --------------------------------------------------------------------------------------------------------


def _instances(rows: list[Figures], width: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    columns = _columns(width)
    for name in columns:
        table.add_column(name, no_wrap=True, overflow="ellipsis", justify="left" if name in _LEFT else "right")
    for row in rows:
        cells = _cells(row)
        table.add_row(*(cells[name] for name in columns))
    return table


_LEFT = frozenset({"instance", "state", "rows", "KV memory"})
_WIDTHS = (
    ("instance", 0), ("state", 0), ("running", 0), ("waiting", 0), ("tokens/s", 0), ("step ms", 62),
    ("KV memory", 76), ("prompt/s", 90), ("restarts", 100), ("steps/s", 110), ("model", 128), ("pid", 138),
)  # fmt: skip
"""Columns, and the terminal width from which on they are shown."""


def _columns(width: int) -> list[str]:
    return [name for name, from_width in _WIDTHS if width >= from_width]


def _cells(row: Figures) -> dict[str, Text]:
    state = row.loading or row.state
    running = f"{row.num_running}/{row.max_num_seqs}" if row.max_num_seqs else str(row.num_running)
    return {
        "instance": Text(harmless_line(row.instance)),
        "state": Text(harmless_line(state), _STATE_STYLES.get(row.state, "")),
        "running": Text(running),
        "waiting": Text(str(row.num_waiting), "yellow" if row.num_waiting else ""),
        "tokens/s": Text(f"{row.output_tokens_per_s:,.0f}", "bold"),
        "step ms": Text("–" if row.step_ms is None else f"{row.step_ms:.1f}"),
        "KV memory": _blocks(row),
        "prompt/s": Text(f"{row.prompt_tokens_per_s:,.0f}"),
        "restarts": _restarts(row),
        "steps/s": Text(f"{row.steps_per_s:,.0f}"),
        "model": Text(harmless_line(f"{row.model} {row.version}")),
        "pid": Text("–" if row.pid is None else str(row.pid)),
    }


def _blocks(row: Figures) -> Text:
    if not row.num_blocks:
        return Text("–")
    share = row.used_blocks / row.num_blocks
    style = "red" if share > 0.95 else "yellow" if share > 0.8 else "cyan"
    return Text.assemble((bar(share, _BAR_WIDTH), style), f" {share:4.0%}")


def _restarts(row: Figures) -> Text:
    if not row.num_restarts:
        return Text("0")
    took = f" ({row.recovery_ms:.0f} ms)" if row.recovery_ms is not None else ""
    return Text(f"{row.num_restarts}{took}", "yellow")


# --- requests ---------------------------------------------------------------------------------------------------------


def _requests(state: FeedState, view: View, room: int) -> RenderableType:
    found = list(_ordered(state))
    live = sum(not request.ended for _, request in found)
    shown = found[: max(room - 1, 0) if len(found) > room else room]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    narrow = view.width < 76
    names = ["request", "state", "age s", "prompt", "output"] if narrow else [
        "request", "id", "instance", "state", "age s", "prompt", "output", "progress",
    ]  # fmt: skip
    for name in names:
        left = name in ("id", "instance", "state", "progress")
        table.add_column(name, no_wrap=True, overflow="ellipsis", justify="left" if left else "right",
                         max_width=max(view.width - 80, 12) if name == "id" else None)  # fmt: skip
    for key, request in shown:
        cells = _request_cells(key, request, state.server_time(view.now_s))
        table.add_row(*(cells[name] for name in names), style="dim" if request.ended else "")
    if not found:
        return Text("no requests", "dim")
    if len(found) > len(shown):
        return Group(table, Text(f"and {len(found) - len(shown)} more ({live} live)", "dim"))
    return table


def _ordered(state: FeedState) -> Iterator[tuple[Key, Request]]:
    """Running ones, then waiting ones, by age; then finished ones, newest first."""
    live = [(key, request) for key, instance in state.instances.items() for request in instance.requests.values()]
    yield from sorted(live, key=lambda each: (each[1].state != "running", each[1].number))
    yield from reversed(state.ended)


def _request_cells(key: Key, request: Request, server_time: float) -> dict[str, Text]:
    age_s = max((request.ended or server_time) - request.received, 0.0)
    output = str(request.output_tokens) + (f"/{request.max_tokens}" if request.max_tokens else "")
    state = f"{request.state}: {request.reason}" if request.reason else request.state
    if request.num_preemptions:
        state += f" (preempted {request.num_preemptions})"
    share = request.output_tokens / request.max_tokens if request.max_tokens else 0.0
    return {
        "request": Text(str(request.number)),
        "id": Text(harmless_line(request.id or request.key_name)),
        "instance": Text(harmless_line(key[2])),
        "state": Text(
            harmless_line(state), "" if request.ended else "green" if request.state == "running" else "yellow"
        ),
        "age s": Text(f"{age_s:.1f}"),
        "prompt": Text("–" if request.prompt_tokens is None else str(request.prompt_tokens)),
        "output": Text(output),
        "progress": Text(bar(share, _BAR_WIDTH), "cyan") if request.max_tokens and not request.ended else Text(""),
    }
