"""An engine outlives whoever started it: its record names its latest process, and the next keeper finds it there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from llmbackend.cluster import processes
from llmbackend.cluster.processes import EngineKeeper, Launch, end_engines
from llmbackend.engine.process.served.served_order import EngineRecord, ServedEngineNews, read_record, write_record
from llmbackend.links.secrets import ClusterSecrets
from tests.cluster.keeper_process import NAME, launch
from tests.helpers.server_process import ROOT
from tests.helpers.waiting import eventually


def is_there(pid: int) -> bool:
    """Whether it runs: nobody's child may stay a zombie for a while."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A run folder, beside the secrets. No engine of it is left."""
    ClusterSecrets.create(tmp_path / "secrets")
    yield tmp_path / "run"
    end_engines(tmp_path / "run")


def record_in(folder: Path) -> EngineRecord | None:
    return read_record(folder / f"{NAME}.json")


def begun_by_one_that_dies(folder: Path) -> EngineRecord:
    """The record of an engine whose first keeper was killed."""
    command = [sys.executable, "-m", "tests.cluster.keeper_process", str(folder), str(folder.parent / "secrets")]
    actor = subprocess.Popen(command, cwd=ROOT)
    eventually(lambda: record_in(folder) is not None, 60)
    actor.kill()
    actor.wait()
    record = record_in(folder)
    assert record is not None and is_there(record.pid) and is_there(record.news.pid)
    return record


@pytest.mark.slow
def test_the_record_of_an_engine_whose_actor_died_names_its_latest_process(folder: Path) -> None:
    first = begun_by_one_that_dies(folder)
    os.kill(first.news.pid, signal.SIGKILL)
    eventually(lambda: record_in(folder) not in (first, None), 60)
    second = record_in(folder)
    assert second is not None and second.pid == first.pid
    assert second.news.pid != first.news.pid and is_there(second.news.pid)
    assert second.news.port == first.news.port and second.news.incarnation > first.news.incarnation

    heard: list[ServedEngineNews] = []
    keeper = EngineKeeper(lambda: launch(str(folder.parent / "secrets")), folder, NAME, heard.append)
    keeper.start()
    eventually(lambda: heard == [second.news])
    keeper.end()
    eventually(lambda: not is_there(second.pid) and not is_there(second.news.pid))
    assert not list(folder.iterdir())


def test_the_record_of_a_command_that_has_ended_is_none(tmp_path: Path) -> None:
    file, news = tmp_path / "run" / "engine-0.json", ServedEngineNews(port=1, incarnation=2, pid=3)
    assert read_record(file) is None
    write_record(file, news)
    record = read_record(file)
    assert record is not None and (record.pid, record.news) == (os.getpid(), news)
    file.write_bytes(file.read_bytes().replace(f'"start":{record.start}'.encode(), b'"start":1'))
    assert read_record(file) is None, "its process id is another process's by now"
    file.write_text("{")
    assert read_record(file) is None


def test_an_engine_that_is_ended_while_its_files_are_copied_is_never_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_END_TIMEOUT_S", 0.01)
    monkeypatch.setattr(processes, "_signal", lambda *call: pytest.fail(f"signals {call}"))
    copies, is_copied = threading.Event(), threading.Event()

    def prepare() -> Launch:
        copies.set()
        assert is_copied.wait(60)
        return launch(str(tmp_path / "secrets"))

    heard: list[ServedEngineNews] = []
    keeper = EngineKeeper(prepare, tmp_path, NAME, heard.append)
    keeper.start()
    assert copies.wait(60)
    keeper.end()
    is_copied.set()
    eventually(lambda: not [one for one in threading.enumerate() if one.name == "engine-keeper"])
    assert not heard


def test_a_keeper_that_was_never_started_can_be_ended(tmp_path: Path) -> None:
    EngineKeeper(lambda: None, tmp_path, NAME, lambda news: None).end()
