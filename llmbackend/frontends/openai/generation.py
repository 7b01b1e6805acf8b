"""Runs a request on the host: one inference per choice, their responses merged in order of arrival.

For: the endpoints. Does not know: JSON or HTTP. Invariant: whoever starts a Generation calls `cancel` in the end,
however it ends; that frees what the model still holds, and does nothing to inferences that are over. Only the event
loop touches a Generation; responses reach it through the mailbox, which wakes the loop once per engine step.
"""

from __future__ import annotations

import asyncio
from collections import deque

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import InferenceHandle, InferenceRequest
from llmbackend.frontends.mailbox import Item, Mailbox, ResponseStream

from .requests import GenerationRequest
from .tensors import Delta, generation_inputs, read_delta

Arrival = tuple[int, Delta]
"""(choice index, what it got)"""


class Generation:
    """The choices of one request. `request_id` is the response's id; choice i's inference carries it too."""

    def __init__(self, server: InferenceServer, mailbox: Mailbox, request: GenerationRequest, request_id: str) -> None:
        self._ready: deque[tuple[int, Item]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._open = len(request.prompts)
        self._handles: list[InferenceHandle] = []
        try:
            for index in range(len(request.prompts)):
                self._handles.append(server.infer_async(self._inference(mailbox, request, request_id, index)))
        except BaseException:
            self.cancel()
            raise

    def _inference(self, mailbox: Mailbox, request: GenerationRequest, request_id: str, index: int) -> InferenceRequest:
        return InferenceRequest(
            model_name=request.model,
            response_callback=_ChoiceStream(mailbox, self, index),
            id=request_id,
            inputs=generation_inputs(
                request.prompts[index],
                request.sampling,
                stream=request.stream is not None,
                logprobs=request.top_logprobs is not None,
                usage=request.stream is None or request.stream.include_usage,
            ),
        )

    @property
    def is_over(self) -> bool:
        """Every choice has ended and all its deltas were taken."""
        return self._open == 0 and not self._ready

    def deliver(self, index: int, item: Item) -> None:
        self._ready.append((index, item))
        if self._waiter is not None:
            _wake(self._waiter)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Until a delta is here; False when `timeout_s` passed without one."""
        if self._ready:
            return True
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        # An alarm of its own costs a fifth of asyncio.timeout, and this is awaited once per token.
        alarm = None if timeout_s is None else loop.call_later(timeout_s, _wake, self._waiter)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if alarm is not None:
                alarm.cancel()
        return bool(self._ready)

    def pop(self) -> Arrival | None:
        """The next delta, None when none is here. Raises TritonError when the inference it belongs to failed."""
        if not self._ready:
            return None
        index, (response, flags) = self._ready.popleft()
        delta = read_delta(response, flags)
        if delta.is_final:
            self._open -= 1
        return index, delta

    async def next(self) -> Arrival:
        """The next delta, as `pop`."""
        while (arrival := self.pop()) is None:
            await self.wait()
        return arrival

    def cancel(self) -> None:
        for handle in self._handles:
            handle.cancel()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class _ChoiceStream(ResponseStream):
    """The mailbox's view of one choice: hands every response on to its generation."""

    def __init__(self, mailbox: Mailbox, generation: Generation, index: int) -> None:
        super().__init__(mailbox)
        self._generation = generation
        self._index = index

    def deliver(self, item: Item) -> None:
        self._generation.deliver(self._index, item)
