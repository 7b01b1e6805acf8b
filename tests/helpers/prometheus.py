"""A real Prometheus that scrapes a server of a test."""

from __future__ import annotations

import json
import math
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.waiting import eventually

SCRAPE_INTERVAL_MS = 200


class Prometheus:
    def __init__(self, address: str) -> None:
        self._url = f"http://{address}"

    def is_ready(self) -> bool:
        try:
            return bool(self._get("/-/ready"))
        except OSError:
            return False

    def values(self, expression: str) -> list[float]:
        """The values of an instant query, those that are not a number left out. Raises on a query that is wrong."""
        answer = json.loads(self._get(f"/api/v1/query?{urllib.parse.urlencode({'query': expression})}"))
        values = [float(row["value"][1]) for row in answer["data"]["result"]]
        return [value for value in values if not math.isnan(value)]

    def rules(self) -> list[dict[str, Any]]:
        """The rules with their health and state."""
        return [rule for group in json.loads(self._get("/api/v1/rules"))["data"]["groups"] for rule in group["rules"]]

    def label_values(self, metric: str, label: str) -> list[str]:
        parameters = urllib.parse.urlencode({"match[]": metric})
        return list(json.loads(self._get(f"/api/v1/label/{label}/values?{parameters}"))["data"])

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(self._url + path, timeout=20) as answer:
            return bytes(answer.read())


def tool(name: str) -> str:
    """The path of a program of Prometheus; the test is skipped where it is not installed."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed (Debian's package prometheus)")
    return path


@contextmanager
def prometheus(folder: Path, target: str, rules: Path) -> Iterator[Prometheus]:
    """One that scrapes the metrics port `target`, under the job name of deploy/prometheus, and evaluates `rules`."""
    interval = f"{SCRAPE_INTERVAL_MS}ms"
    settings = {
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "llmbackend", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(settings))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    paths = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [tool("prometheus"), *paths, f"--web.listen-address={address}", "--log.level=warn"], stdout=log, stderr=log
        )
    try:
        server = Prometheus(address)
        eventually(server.is_ready)
        yield server
    finally:
        process.terminate()
        process.wait(20)
