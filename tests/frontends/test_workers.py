"""Worker processes: what they are asked for comes back, and what becomes of one that ends."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from pickle import PickleBuffer
from typing import Any

import numpy as np
import pytest

from llmbackend.core.errors import ErrorCode, TritonError, invalid_argument
from llmbackend.core.messages import InferenceResponse
from llmbackend.core.tensors import RawTensor, Tensor
from llmbackend.frontends import workers as pool_module
from llmbackend.frontends.workers import WORKERS, WorkerPool
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.slow


def pid_of_worker() -> int:
    return os.getpid()


def refuse(body: bytes) -> None:
    raise invalid_argument(f"{type(body).__name__} of {len(body)}")


def end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def tensors(response: InferenceResponse) -> tuple[Tensor, ...]:
    assert all(isinstance(tensor, Tensor) for tensor in response.outputs)
    return tuple(response.outputs)


def take_memory() -> int:
    return len(bytearray(1 << 60))


@pytest.fixture(autouse=True)
def workers_find_this_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


@pytest.fixture
def run() -> Iterator[Callable[..., Any]]:
    pool = WorkerPool()
    with asyncio.Runner() as runner:

        async def all_of(*calls: tuple[Any, ...]) -> list[Any]:
            return await asyncio.gather(*(pool.run(*call) for call in calls), return_exceptions=True)

        yield lambda *calls: runner.run(all_of(*calls))
        pool.close()


def test_few_processes_are_kept_and_one_that_ended_is_replaced(run: Callable[..., Any]) -> None:
    pids = run(*[(pid_of_worker,)] * 6)
    assert os.getpid() not in pids and 1 <= len(set(pids)) <= WORKERS
    for pid in set(pids):
        os.kill(pid, signal.SIGKILL)
    (again,) = run((pid_of_worker,))
    assert again not in pids


def test_errors_and_tensors_come_back(run: Callable[..., Any]) -> None:
    numbers = Tensor.of("n", np.arange(6, dtype=np.float32).reshape(2, 3))
    response = InferenceResponse("m", 1, "", (numbers, Tensor.text("s", "a", b"\xff\0")))
    refused, back, bug = run((refuse, PickleBuffer(b"12345")), (tensors, response), (refuse, 5))
    assert isinstance(refused, TritonError)
    assert (refused.message, refused.code) == ("bytes of 5", ErrorCode.INVALID_ARG)
    assert back[0].data.dtype == np.float32 and back[0].data.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert back[1] == RawTensor("s", "BYTES", (2,), b"\1\0\0\0a\2\0\0\0\xff\0")
    assert bug.message == "internal error, see the server's log"


def test_a_call_that_ends_its_process_ends_alone(run: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    ended, other = run((end,), (pid_of_worker,))
    assert ended.code is ErrorCode.UNAVAILABLE and "process that decodes large bodies exited" in ended.message
    assert isinstance(other, int)
    assert "a worker process exited while decoding a large body" in caplog.text


def test_a_lack_of_memory_is_an_error_of_its_request(run: Callable[..., Any]) -> None:
    refused, pid = run((take_memory,), (pid_of_worker,))
    assert refused.code is ErrorCode.UNAVAILABLE and "more memory" in refused.message
    assert isinstance(pid, int)


def test_a_call_that_cannot_be_sent_leaves_no_process(run: Callable[..., Any]) -> None:
    (pid,) = run((pid_of_worker,))
    (error,) = run((pid_of_worker, threading.Lock()))
    assert isinstance(error, TypeError) and not os.path.exists(f"/proc/{pid}")


def test_an_idle_pool_has_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "IDLE_S", 0.05)
    pool = WorkerPool()

    async def use_and_wait() -> int:
        pid = await pool.run(pid_of_worker)
        await asyncio.sleep(0.2)
        return pid

    pid = asyncio.run(use_and_wait())
    eventually(lambda: not os.path.exists(f"/proc/{pid}"))
    pool.close()


def test_a_pool_that_is_dropped_leaves_no_process() -> None:
    pid = asyncio.run(WorkerPool().run(pid_of_worker))

    def is_gone() -> bool:
        gc.collect()  # its loop refers to it, and its thread for a moment
        return not os.path.exists(f"/proc/{pid}")

    eventually(is_gone)
