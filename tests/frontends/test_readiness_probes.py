"""Many probes of one slow answer cost one thread, and no probe gets an answer that is older than its question."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any, cast

from llmbackend.core.inference_server import InferenceServer
from llmbackend.frontends.readiness_probes import ReadinessProbes


class SlowServer:
    """Answers what `ready` was when it was asked, after `go`."""

    def __init__(self) -> None:
        self.ready = False
        self.asked = 0
        self.go = threading.Event()
        self.asking = threading.Semaphore(0)

    def model_is_ready(self, name: str, version: int) -> bool:
        self.asked += 1
        answer = self.ready
        self.asking.release()
        assert self.go.wait(20)
        return answer


def probes_of(server: SlowServer) -> contextlib.closing[ReadinessProbes]:
    return contextlib.closing(ReadinessProbes(cast(InferenceServer, server)))


def test_probes_share_a_question_and_never_get_an_answer_older_than_their_own() -> None:
    server = SlowServer()

    async def probe() -> list[Any]:
        with probes_of(server) as probes:
            first = asyncio.ensure_future(probes.model_is_ready("m", 1))
            await asyncio.to_thread(server.asking.acquire)
            server.ready = True  # the question that is under way was asked before
            storm = [asyncio.ensure_future(probes.model_is_ready("m", 1)) for _ in range(200)]
            storm[0].cancel()  # a client that leaves does not take the answer from the others
            await asyncio.sleep(0)
            server.go.set()
            return [await first, *await asyncio.gather(*storm[1:]), await probes.model_is_ready("m", 1)]

    first, *others = asyncio.run(probe())
    assert first is False and others == [True] * 200
    assert server.asked == 3


async def test_a_question_about_another_model_does_not_wait() -> None:
    server = SlowServer()
    with probes_of(server) as probes:
        questions = [asyncio.ensure_future(probes.model_is_ready("m", version)) for version in range(3)]
        for _ in questions:
            await asyncio.to_thread(server.asking.acquire)
        server.go.set()
        assert await asyncio.gather(*questions) == [False] * 3
