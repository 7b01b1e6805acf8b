"""Listeners of inferences: called once for all responses of a wake-up, in order, whoever else fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from llmbackend.core.backend_api import ResponseFlag
from llmbackend.core.messages import InferenceResponse
from llmbackend.frontends.inference import Backlog, Inference, Item, Mailbox

FINAL = ResponseFlag.FINAL


def answer(text: str) -> InferenceResponse:
    return InferenceResponse("model", 1, text)


class Reader:
    """A listener that pops what it is told of."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def __call__(self, inferences: Sequence[Inference]) -> None:
        self.calls.append([_name(inference.pop()) for inference in inferences])


def _name(item: Item) -> str:
    response, flags = item
    return ("" if response is None else response.request_id) + ("." if flags else "")


async def test_a_listener_is_called_once_for_all_that_arrive_before_the_loop_runs() -> None:
    mailbox, reader, other = Mailbox(asyncio.get_running_loop()), Reader(), Reader()
    first, second = (Inference(mailbox, Backlog(1 << 20), reader) for _ in range(2))
    alone = Inference(mailbox, Backlog(1 << 20), other)
    first(answer("a"), ResponseFlag.NONE)
    second(answer("b"), ResponseFlag.NONE)
    alone(answer("c"), ResponseFlag.NONE)
    thread = threading.Thread(target=first, args=(answer("d"), FINAL))
    thread.start()
    thread.join()
    second(None, FINAL)
    first(answer("dropped"), ResponseFlag.NONE)
    await asyncio.sleep(0)
    assert reader.calls == [["a", "b", "d.", "."]]
    assert other.calls == [["c"]]
    assert not first.has_responses


async def test_a_listener_that_fails_costs_no_other_its_responses(caplog: pytest.LogCaptureFixture) -> None:
    def fail(inferences: Sequence[Inference]) -> None:
        raise RuntimeError("a bug")

    mailbox, reader = Mailbox(asyncio.get_running_loop()), Reader()
    Inference(mailbox, Backlog(1 << 20), fail)(answer("a"), FINAL)
    Inference(mailbox, Backlog(1 << 20), reader)(answer("b"), FINAL)
    await asyncio.sleep(0)
    assert reader.calls == [["b."]]
    assert "the listener of an inference failed" in caplog.text
    caplog.clear()


async def test_a_listener_can_take_over_from_a_task_and_give_back() -> None:
    mailbox, reader = Mailbox(asyncio.get_running_loop()), Reader()
    inference = Inference(mailbox, Backlog(1 << 20))
    inference(answer("a"), ResponseFlag.NONE)
    assert await inference.next() == (answer("a"), ResponseFlag.NONE)
    inference.listener = reader
    inference(answer("b"), ResponseFlag.NONE)
    await asyncio.sleep(0)
    assert reader.calls == [["b"]]
    inference.listener = None
    inference(answer("c"), FINAL)
    assert await inference.next() == (answer("c"), FINAL)
    assert await inference.next() is None
