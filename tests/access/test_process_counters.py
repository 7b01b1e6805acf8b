"""ProcessCounters: the sum of the counters of running and ended processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter

from llmbackend.frontends.access.process_counters import ProcessCounters, add_ended

PROGRAM = """
import os, sys
from prometheus_client import CollectorRegistry, Counter
counter = Counter("requests", "Requests", ["key"], registry=CollectorRegistry())
counter.labels("a").inc(float(sys.argv[1]))
counter.labels("b").inc()
print(os.getpid())
"""


def count(folder: Path, number: int) -> int:
    """Runs a process that counts. Returns its id."""
    command = [sys.executable, "-c", PROGRAM, str(number)]
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(folder)}
    return int(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)


def test_the_counters_of_ended_processes_stay_and_their_files_do_not(tmp_path: Path) -> None:
    own = CollectorRegistry()
    Counter("requests", "Requests", ["key"], registry=own).labels("a").inc(100)

    def totals() -> dict[str, float]:
        (family,) = ProcessCounters(own, tmp_path).collect()
        return {sample.labels["key"]: sample.value for sample in family.samples}

    processes = [count(tmp_path, number) for number in (1, 2, 4)]
    expected = {"a": 107.0, "b": 3.0}
    assert totals() == expected
    for pid in processes:
        add_ended(tmp_path, pid)
        assert totals() == expected
    assert [path.name for path in tmp_path.iterdir()] == ["counter_ended.db"]
