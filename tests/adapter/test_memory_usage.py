"""memory_usage in the statistics: what each instance holds, as its process and its engine say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmbackend.frontends.kserve.control_http import statistics_to_json
from tests.helpers.core_host import version_of
from tests.helpers.llm_host import ENGINE, MODEL, LlmHost, llm_host

TWO = "instance_group [ { kind: KIND_CPU, count: 2 } ]"
KV_BYTES = ENGINE["num_kv_blocks"] * ENGINE["block_size"] * 4
"""The mock keeps an int32 in each slot."""


def rows_of(host: LlmHost) -> list[dict[str, Any]]:
    """As HTTP shows them; they are equal to those of gRPC's message."""
    statistics = host.server.model_statistics(MODEL)
    (shown,) = statistics_to_json(statistics)["model_stats"]
    rows: list[dict[str, Any]] = shown["memory_usage"]
    message = [{"type": row.type, "id": row.id, "byte_size": row.byte_size} for row in statistics[0].memory_usage]
    assert rows == message
    return rows


def resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) * 1024


def test_each_instance_says_what_its_engine_holds(tmp_path: Path) -> None:
    with llm_host(tmp_path, TWO, transport="process") as host:
        rows = rows_of(host)
        assert [row["type"] for row in rows] == ["CPU", "CPU_KV_CACHE"] * 2
        assert [row["byte_size"] for row in rows if row["type"] == "CPU_KV_CACHE"] == [KV_BYTES] * 2
        pids = [instance.describe().pid or 0 for instance in version_of(host.server, MODEL).instances]
        resident = [row["byte_size"] for row in rows if row["type"] == "CPU"]
        assert resident == pytest.approx([resident_bytes(pid) for pid in pids], rel=0.2)


def test_an_engine_without_a_process_of_its_own_has_no_resident_memory(tmp_path: Path) -> None:
    with llm_host(tmp_path) as host:
        assert rows_of(host) == [{"type": "CPU_KV_CACHE", "id": 0, "byte_size": KV_BYTES}]
