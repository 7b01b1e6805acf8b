"""A pytest plugin that records each test's outcome as soon as it is known.

Used by kernel_tests.py, whose time may run out before all tests have run. Independent of which tests. Invariant: a line
is written once, even if several processes run the tests.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FILE = "LLMBACKEND_TEST_OUTCOMES"
"""The variable that names the file."""


def pytest_runtest_logreport(report: Any) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.outcome == "passed"):
        return
    with Path(os.environ[FILE]).open("a") as file:
        file.write(json.dumps({"test": report.nodeid, "outcome": report.outcome}) + "\n")
