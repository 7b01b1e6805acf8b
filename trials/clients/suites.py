"""The suites, how each is run, and how its report is read.

Used by the command. Independent of the server and of expected failures. Invariant: a suite whose report is missing or
contains no test counts as failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.helpers.server_process import ROOT

from .conftest import URL_VARIABLE
from .environment import AGENTS_DIRECTORY, HERE, NODE_DIRECTORY, OPENAI3_PYTHON, PYTHON

SUITE_TIMEOUT_S = 900.0


Place = Literal["project", "clients", "openai3", "node", "agents"]


@dataclass(frozen=True)
class Suite:
    """`package`: whose version is told. `file`: from this folder. `runs_in`: the project's environment; the clients',
    with openai 2 or with openai 3; Node; or the project's, with agents of npm and servers of the suite's own.
    `select`: which tests of the file, in pytest's words."""

    name: str
    package: str
    file: str
    runs_in: Place = "clients"
    select: str = ""


SUITES = (
    Suite("openai", "openai", "../../tests/trials/clients/test_openai_client.py", "project"),
    Suite("openai-2", "openai", "../../tests/trials/clients/test_openai_client.py"),
    Suite("responses", "openai", "suite_openai_responses.py", "project"),
    Suite("responses-2", "openai", "suite_openai_responses.py"),
    Suite("anthropic", "anthropic", "suite_anthropic.py", "openai3"),
    Suite("anthropic-0", "anthropic", "suite_anthropic.py"),
    Suite("agents-sdk", "openai-agents", "suite_openai_agents.py", "openai3"),
    Suite("langchain", "langchain-openai", "suite_langchain.py", select="TestChatOpenAI"),
    Suite("langchain-functions", "langchain-openai", "suite_langchain.py", select="TestFunctionCalling and structured"),
    Suite("langchain-responses", "langchain-openai", "suite_langchain.py", select="TestResponses"),
    Suite("langchain-anthropic", "langchain-anthropic", "suite_langchain.py", select="TestChatAnthropic"),
    Suite("litellm", "litellm", "suite_litellm.py"),
    Suite("llamaindex", "llama-index-core", "suite_llamaindex.py"),
    Suite("instructor", "instructor", "suite_instructor.py"),
    Suite("node", "openai", "openai_suite.mjs", "node"),
    Suite("node-responses", "openai", "responses_suite.mjs", "node"),
    Suite("node-anthropic", "@anthropic-ai/sdk", "anthropic_suite.mjs", "node"),
    Suite("codex", "@openai/codex", "suite_agents.py", "agents", select="codex"),
    Suite("claude-code", "@anthropic-ai/claude-code", "suite_agents.py", "agents", select="claude"),
)
_PYTHONS = {"clients": PYTHON, "openai3": OPENAI3_PYTHON}


@dataclass(frozen=True)
class Result:
    """`failures`: what each failed test said, by its name; `skipped`: how many for each reason."""

    suite: Suite
    version: str
    passed: int
    failures: dict[str, str]
    skipped: dict[str, int]

    @property
    def line(self) -> str:
        reasons = "; ".join(f"{count} × {reason}" if count > 1 else reason for reason, count in self.skipped.items())
        why = f" ({reasons})" if reasons else ""
        counts = f"{self.passed} passed, {len(self.failures)} failed, {sum(self.skipped.values())} skipped{why}"
        return f"{self.suite.package} {self.version} [{self.suite.name}]: {counts}"


def run_suite(suite: Suite, url: str, directory: Path, arguments: Sequence[str] = ()) -> Result:
    """`arguments`: for pytest."""
    report = directory / f"{suite.name}.xml"
    log = directory / f"{suite.name}.log"
    environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    environment |= {URL_VARIABLE: url, "PYTHONPATH": str(ROOT), "OPENAI_API_KEY": "none", "NO_COLOR": "1"}
    environment |= {"DO_NOT_TRACK": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
    with log.open("w") as output:
        subprocess.run(
            _command(suite, report, arguments),
            cwd=NODE_DIRECTORY if suite.runs_in == "node" else ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=SUITE_TIMEOUT_S,
            check=False,
        )
    if not report.exists():
        return Result(suite, _version(suite), 0, {"the suite itself": log.read_text()[-2000:]}, {})
    return read_report(suite, _version(suite), report)


def _command(suite: Suite, report: Path, arguments: Sequence[str]) -> list[str]:
    if suite.runs_in == "node":
        reporter = ["--test-reporter=junit", f"--test-reporter-destination={report}"]
        return ["node", "--test", *reporter, str(NODE_DIRECTORY / suite.file)]
    python = str(_PYTHONS.get(suite.runs_in, sys.executable))
    file = (HERE / suite.file).resolve()
    # The tests' own conftest.py needs packages that the clients' environments lack.
    settings = [
        "-c",
        str(HERE / "suites.ini"),
        f"--rootdir={ROOT}",
        f"--confcutdir={file.parent}",
        f"--junitxml={report}",
    ]
    if suite.runs_in not in _PYTHONS:
        settings += ["-o", "addopts=-ra -p no:cacheprovider -p no:schemathesis"]
    if suite.select:
        settings += ["-k", suite.select]
    return [python, "-m", "pytest", *settings, *arguments, str(file)]


def _version(suite: Suite) -> str:
    if suite.runs_in in ("node", "agents"):
        folder = NODE_DIRECTORY if suite.runs_in == "node" else AGENTS_DIRECTORY
        package = json.loads((folder / "node_modules" / suite.package / "package.json").read_text())
        return f"{package['version']} (npm)"
    python = str(_PYTHONS.get(suite.runs_in, sys.executable))
    return _output([python, "-c", f"import importlib.metadata as m; print(m.version('{suite.package}'))"], ROOT)


def _output(command: list[str], directory: Path) -> str:
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True).stdout.strip()


def read_report(suite: Suite, version: str, report: Path) -> Result:
    """From JUnit's XML."""
    failures: dict[str, str] = {}
    skipped: Counter[str] = Counter()
    passed = 0
    for case in ElementTree.parse(report).iter("testcase"):
        broken = case.find("failure") if case.find("failure") is not None else case.find("error")
        missing = case.find("skipped")
        if broken is not None:
            failures[case.get("name", "?")] = _message(broken)
        elif missing is not None:
            skipped[missing.get("message", "no reason").strip().rstrip(".")] += 1
        else:
            passed += 1
    if not passed and not failures:
        failures["the suite itself"] = "its report holds no test"
    return Result(suite, version, passed, failures, dict(skipped))


def _message(broken: ElementTree.Element) -> str:
    return (broken.get("message") or broken.text or "no message").strip()
