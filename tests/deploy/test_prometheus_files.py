"""The Grafana board and the alerts: their queries on a real Prometheus that scrapes a real server under load."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from llmbackend.core.host_services import LEAKS_METRIC
from tests.helpers.prometheus import SCRAPE_INTERVAL_MS, Prometheus, prometheus, tool
from tests.helpers.server_process import ROOT, ServerProcess, running_server, write_mock_model
from tests.helpers.waiting import eventually
from tools import grafana_board

pytestmark = pytest.mark.slow

ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
HEADERS = {"authorization": "Bearer sk-board"}
OURS = re.compile(r"\b(?:vllm:|llmbackend:|nv_|process_)\w+")
SUFFIXES = ("_bucket", "_sum", "_count")


def board() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(grafana_board.BOARD.read_text())
    return found


def queries() -> list[tuple[str, str]]:
    """Panel and expression, with Grafana's variables filled in."""
    filled = {"$instance": ".*", "$model": ".*", "$__rate_interval": "1m"}
    targets = [(panel["title"], expression) for panel in board()["panels"] for expression in exprs(panel)]
    targets += [(line["name"], line["expr"]) for line in board()["annotations"]["list"]]
    for name, value in filled.items():
        targets = [(title, expression.replace(name, value)) for title, expression in targets]
    return targets


def alert_expressions() -> dict[str, str]:
    """By name; read as text, since a parser of YAML would be one more dependency."""
    rules = re.split(r"- alert: ", ALERTS.read_text())[1:]
    found = {rule.split()[0]: re.search(r"expr: (?:>-)?(.*?)\n\s+(?:for|labels):", rule, re.DOTALL) for rule in rules}
    return {name: " ".join(match[1].split()) for name, match in found.items() if match}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """With a key, and a model that speculates."""
    models = tmp_path_factory.mktemp("board") / "models"
    write_mock_model(models, mock_step_ms=2, speculative_config={"method": "ngram"})
    with running_server("--model-repository", str(models), "--api-key", "sk-board") as server:
        yield server


@pytest.fixture(scope="module")
def scraping(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that saw requests of the server, one of which outlived its engine."""
    with prometheus(tmp_path_factory.mktemp("prometheus"), server.metrics, ALERTS) as scraping:
        eventually(lambda: scraping.values("llmbackend:model_ready"))
        for kills in (True, False):
            generate(server, kills)
        yield scraping


def generate(server: ServerProcess, kills: bool) -> None:
    """A stream; kills: its engine dies when the first tokens are there."""
    body = {"model": "mock", "prompt": "a b " * 40, "max_tokens": 120, "allowed_token_ids": [97]}
    url = f"http://{server.http}/v1/completions"
    with httpx.stream("POST", url, json=body | {"stream": True}, headers=HEADERS, timeout=60) as stream:
        assert stream.status_code == 200
        for number, _ in enumerate(stream.iter_lines()):
            if kills and number == 4:
                (fork_server,) = psutil.Process(server.process.pid).children()
                os.kill(fork_server.children()[0].pid, signal.SIGKILL)


def test_every_query_of_the_board_finds_data(server: ServerProcess, scraping: Prometheus) -> None:
    def without_data() -> list[tuple[str, str]]:
        reported = [one for one in queries() if LEAKS_METRIC not in one[1]]  # created on the first leak
        return [(title, expression) for title, expression in reported if not scraping.values(expression)]

    deadline_s = time.monotonic() + 10  # the last scrape is behind the load
    while (missing := without_data()) and time.monotonic() < deadline_s:
        time.sleep(SCRAPE_INTERVAL_MS / 1000)
    assert not missing
    assert scraping.label_values("llmbackend:model_ready", "model") == ["mock"]
    assert scraping.label_values("process_start_time_seconds", "instance") == [server.metrics]


def test_prometheus_raises_the_alert_of_the_killed_engine_and_no_other(scraping: Prometheus) -> None:
    def in_state(*states: str) -> set[str]:
        return {rule["name"] for rule in scraping.rules() if rule["state"] in states}

    eventually(lambda: "LlmEngineRestarted" in in_state("firing"))
    of_the_machine = {"LlmMemoryNearlyUsed", "LlmEventLoopSlow"}
    assert in_state("firing", "pending") - of_the_machine == {"LlmEngineRestarted"}
    assert in_state("firing", "pending", "inactive") == set(alert_expressions())
    assert {rule["health"] for rule in scraping.rules()} == {"ok"}


def test_every_metric_of_board_and_alerts_is_one_that_the_server_exports(server: ServerProcess) -> None:
    generate(server, kills=False)  # metrics of keys have their names from the first request on
    exported = set(re.findall(r"^# TYPE (\S+)", httpx.get(f"http://{server.metrics}/metrics").text, re.MULTILINE))
    named = set(OURS.findall(" ".join([*alert_expressions().values(), *(expression for _, expression in queries())])))
    exported.add(LEAKS_METRIC)  # created on the first leak
    unknown = {name for name in named if name not in exported and name.removesuffix(suffix_of(name)) not in exported}
    assert not unknown and len(named) > 30


def suffix_of(name: str) -> str:
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")


def test_each_alert_fires_and_is_silent_when_it_should() -> None:
    folder = ALERTS.parent
    for command in (["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run([tool("promtool"), *command], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    tested = set(re.findall(r"alertname: (\w+)\s*exp_alerts:\s*- exp_labels", (folder / "alerts_test.yml").read_text()))
    assert tested == set(alert_expressions())


def test_the_board_is_what_its_table_says() -> None:
    assert grafana_board.BOARD.read_text() == grafana_board.text(), "python -m tools.grafana_board --write"
    boxes = [panel["gridPos"] for panel in board()["panels"]]
    cells = [(box["x"] + x, box["y"] + y) for box in boxes for x in range(box["w"]) for y in range(box["h"])]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) == 23
    assert all(re.search(r'instance=~"\$instance"', expr) for p in board()["panels"] for expr in exprs(p))


def exprs(panel: dict[str, Any]) -> list[str]:
    return [target["expr"] for target in panel.get("targets", ())]
