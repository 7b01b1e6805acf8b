"""The bundled model in two stages behind the `llm` backend: streams have the same tokens again, also where a stage is
killed under them."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.gpu.split_engines import children_of
from tests.helpers.llm_host import LlmHost, llm_host
from tests.helpers.waiting import eventually

DEMO = Path(__file__).parents[2] / "model_repository" / "demo" / "1"
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 60}}, "required": ["name"]}
REQUESTS: tuple[dict[str, Any], ...] = (
    {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True},
    {"max_tokens": 40, "temperature": 0.8, "seed": 3, "ignore_eos": True},
    {"max_tokens": 40, "temperature": 1.0, "seed": 4, "structured_outputs": {"json": SCHEMA}},
)


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended since
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *descendants(child)]
    return found


def stage_of(before: set[int]) -> int:
    """The last stage: the child of the engine, which is the child of its fork server."""
    new = [pid for pid in descendants(os.getpid()) if pid not in before]
    return next(pid for pid in reversed(new) if not children_of(pid))


def texts(host: LlmHost, kill_in: set[int] | None = None) -> list[str]:
    calls = [host.start(text_input="Count from 1 to 100", stream=True, sampling=one) for one in REQUESTS]
    if kill_in is not None:
        eventually(lambda: all(len(call.responses) > 5 for call in calls), 60)
        os.kill(stage_of(kill_in), signal.SIGKILL)
    eventually(lambda: all(call.num_finals for call in calls), 120)
    return [call.text for call in calls]


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_stage_that_is_killed_under_streams_costs_no_token(is_killed: bool, tmp_path: Path) -> None:
    before = set(descendants(os.getpid()))
    arguments: dict[str, Any] = {
        "model": str(DEMO),
        "transport": "process",
        "pipeline_parallel_size": 2,
        "num_threads": 1,
        "max_num_seqs": 4,
    }
    with llm_host(tmp_path, **arguments) as host:
        expected = texts(host)
        assert all(expected)
        assert texts(host, kill_in=before if is_killed else None) == expected
        assert (host.metric("llmbackend:engine_restarts_total", cause="exit") or 0) == is_killed
