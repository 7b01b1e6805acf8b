"""The check that runs after every test sees what it is there for (each leak is undone here)."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from tests.helpers import leftovers
from tests.helpers.leftovers import Conservation, Snapshot
from tests.helpers.mock_engine import make_core, make_request

Leaked = TypeVar("Leaked")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "WAIT_S", 0.05)
    monkeypatch.setattr(leftovers, "_has_grpc", lambda: False)  # it may run on from a test before these


def found(leak: Callable[[], Leaked], *, shares_host: bool = False) -> tuple[list[str], Leaked]:
    before = Snapshot.take()
    leaked = leak()
    return leftovers.leftovers(before, shares_host=shares_host), leaked


def test_a_child_process() -> None:
    for shares_host in (False, True):
        leak, process = found(
            lambda: subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE), shares_host=shares_host
        )
        assert isinstance(process, subprocess.Popen)
        with process:
            assert any(text.startswith(f"process {process.pid}: ") for text in leak)


@pytest.mark.parametrize(("name", "shares_host"), [("a pool's", False), ("llm-engine", False), ("llm-engine", True)])
def test_a_thread(name: str, shares_host: bool) -> None:
    over = threading.Event()

    def start() -> threading.Thread:
        thread = threading.Thread(target=over.wait, name=name, daemon=True)
        thread.start()
        return thread

    leak, thread = found(start, shares_host=shares_host)
    over.set()
    assert isinstance(thread, threading.Thread)
    thread.join()
    assert leak == [f"thread {name}"]


def test_a_thread_of_a_shared_server_is_its_own() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait, name="its pool", daemon=True)
    leak, _ = found(thread.start, shares_host=True)
    over.set()
    thread.join()
    assert leak == []


def test_a_file_descriptor_and_an_event_loop() -> None:
    leak, (reader, writer) = found(os.pipe)
    os.close(reader)
    os.close(writer)
    assert [text.split(":")[1] for text in leak] == [" pipe", " pipe"]
    leak, loop = found(asyncio.new_event_loop)
    assert isinstance(loop, asyncio.AbstractEventLoop)
    loop.close()
    assert any("eventpoll" in text for text in leak)


def test_what_goes_by_itself_is_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "WAIT_S", 5.0)
    over = threading.Event()
    thread = threading.Thread(target=over.wait, args=(0.05,), name="llm-engine")
    assert found(thread.start)[0] == []


def test_an_engine_core_that_lost_a_block() -> None:
    core, watch = make_core(num_kv_blocks=8), Conservation()
    core.add(make_request("r"))
    core.step()
    broken: Any = core._kv_cache
    broken._num_free -= 1
    watch.check_core(core)
    broken._num_free += 1
    assert watch.breaches == ["an engine core: KV blocks are lost or held twice: 7 known of 8"]
