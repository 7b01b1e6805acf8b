"""`python -m tools.grafana_board --write`: deploy/grafana/llmbackend.json, the Grafana board, from grafana_panels.py.

Used by the board. Independent of what it shows. Invariant: panels fill their rows from the left, in their order.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from tools.grafana_panels import OF_MODEL, ROWS, Panel

BOARD = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "llmbackend.json"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24
"""Of Grafana's grid."""


def board() -> dict[str, Any]:
    """The board as Grafana imports it (schema of version 10 and later)."""
    return {
        "uid": "llmbackend",
        "title": "llmbackend",
        "description": "Language models served by llmbackend: traffic, latency, batch, KV cache, recoveries, host.",
        "tags": ["llmbackend", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": list(_variables())},
        "annotations": {"list": [_restarts()]},
        "panels": list(_panels()),
    }


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    for name, label, query in (
        ("instance", "Server", "label_values(process_start_time_seconds, instance)"),
        ("model", "Model", 'label_values(llmbackend:model_ready{instance=~"$instance"}, model)'),
    ):
        yield {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": DATASOURCE,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }


def _restarts() -> dict[str, Any]:
    """A vertical line in every graph where an engine was replaced."""
    return {
        "name": "Engine restarts",
        "datasource": DATASOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": f"sum by (model, cause) (increase(llmbackend:engine_restarts_total{OF_MODEL}[1m])) > 0",
        "titleFormat": "engine of {{model}} lost: {{cause}}",
    }


def _panels() -> Iterator[dict[str, Any]]:
    ids, top = count(1), 0
    for row in ROWS:
        position = {"h": 1, "w": COLUMNS, "x": 0, "y": top}
        yield {
            "id": next(ids),
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "gridPos": position,
            "panels": [],
        }
        top, left, height = top + 1, 0, 8
        for panel in row.panels:
            height = 4 if panel.is_stat else 8
            if left + panel.width > COLUMNS:
                top, left = top + height, 0
            position = {"h": height, "w": panel.width, "x": left, "y": top}
            yield _panel(panel) | {"id": next(ids), "gridPos": position}
            left += panel.width
        top += height


def _panel(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    if not panel.is_stat:
        defaults["custom"] = {"fillOpacity": 10, "showPoints": "never", "spanNulls": False}
    legend = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
    options: dict[str, Any] = {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
    return {
        "type": "stat" if panel.is_stat else "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"reduceOptions": {"calcs": ["lastNotNull"]}} if panel.is_stat else options,
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": DATASOURCE, "expr": expression, "legendFormat": legend}
            for place, (legend, expression) in enumerate(panel.queries)
        ],
    }


def text() -> str:
    return json.dumps(board(), indent=2) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        BOARD.write_text(text())
    else:
        print(text(), end="")
