"""schemathesis on the server's own OpenAPI document: valid and invalid data for every operation.

Part of `make fuzz`. Independent of what is generated. Invariants: under /v1, what the document permits is accepted and
what it forbids is refused; every answer is described by the document. Other operations depend on what a model accepts,
so only their answers are judged.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from llmbackend.frontends.operations.engine_events import PATH as EVENTS
from tests.helpers.server_process import ROOT

from .fuzzed_server import FuzzedServer
from .http_inputs import DECOUPLED
from .tally import Finding, Tally

_CHECKS = ("allowed_answer", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
           "response_headers_conformance")  # fmt: skip
_CHECKS_OF_DATA = ("negative_data_rejection", "positive_data_acceptance")


def _config() -> str:
    hooks = Path(__file__).with_name("schemathesis_hooks.py")
    # An endless stream has no answer that could be judged.
    return f"""
hooks = "{hooks}"
[parameters]
name = "{DECOUPLED}"
model = "{DECOUPLED}"
version = "1"
repository = "r"
[checks]
enabled = false
{_switched_on(_CHECKS)}
[[operations]]
include-path-regex = "load"
parameters = {{ name = "scratch" }}
[[operations]]
include-path = "{EVENTS}"
enabled = false
[[operations]]
include-path-regex = "^/v1"
[operations.checks]
{_switched_on(_CHECKS_OF_DATA)}
"""


def _switched_on(checks: tuple[str, ...]) -> str:
    return "\n".join(f"{check}.enabled = true" for check in checks)


def run_schemathesis(fuzzed: FuzzedServer, directory: Path, seconds: float, seed: int) -> Tally:
    """For about `seconds`; the run's own report is left in `directory`."""
    config, report = directory / "schemathesis.toml", directory / "schemathesis.json"
    config.write_text(_config())
    command = [str(Path(sys.executable).with_name("schemathesis")), "--config-file", str(config), "run"]
    command += [f"http://{fuzzed.address.http}/openapi.json", "--continue-on-failure"]
    command += ["--phases", "examples,coverage,fuzzing", "--max-time", str(max(1, int(seconds))), "--seed", str(seed)]
    command += [
        "--request-timeout",
        "20",
        "--report",
        "json",
        "--report-json-path",
        str(report),
        "--output-sanitize",
        "false",
    ]
    environment = os.environ | {"NO_COLOR": "1", "PYTHONPATH": str(ROOT)}  # the hooks import this package
    with (directory / "schemathesis.txt").open("w") as output:
        subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False, env=environment)
    tally = Tally("OpenAPI, schemathesis")
    found = json.loads(report.read_text())
    tally.inputs = found["test_cases"]["generated"]
    for failure in [*found["failures"], *found["errors"]]:
        tally.add(Finding("violation", json.dumps(failure)), f"see {directory / 'schemathesis.txt'}")
    try:
        fuzzed.check()
    except Finding as finding:
        tally.add(finding, "schemathesis")
    return tally
