"""Runs a request on the host: one inference per choice, their responses merged in order of arrival.

For: the endpoints. Does not know: JSON or HTTP. Invariant: whoever starts a Generation calls `close` in the end,
however it ends; that frees what the model still holds, and does nothing to inferences that are over. Only the event
loop touches a Generation; responses reach it through the mailbox, which wakes the loop once per engine step. The
choices share one backlog: what waits for their one client is bounded together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

from llmbackend.core.messages import InferenceRequest, ResponseCallback
from llmbackend.core.tracing.trace import RequestTrace
from llmbackend.frontends.inference import Inference, InferenceGate

from .catalog import Target
from .requests import GenerationRequest
from .tensors import RETURN_NUM_CACHED_TOKENS, Delta, generation_inputs, read_delta

Arrival = tuple[int, Delta]
"""(choice index, what it got)"""


class Generation:
    """The choices of one request. `request_id` is the response's id; choice i's inference carries it too."""

    def __init__(
        self,
        gate: InferenceGate,
        request: GenerationRequest,
        target: Target,
        request_id: str,
        *,
        trace: RequestTrace | None = None,
    ) -> None:
        """In `trace`, further choices are children of the first."""
        self._arrived: deque[int] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._open = len(request.prompts)
        self._choices: list[Inference] = []
        backlog = gate.new_backlog()
        gate.admit(len(request.prompts))
        try:
            for index in range(len(request.prompts)):
                part = trace.child() if trace is not None and index else trace
                build = _builder(request, target, request_id, index, part)
                self._choices.append(gate.submit(build, backlog, partial(self._on_response, index)))
        except BaseException:
            self.close()
            raise

    @property
    def is_over(self) -> bool:
        """Every choice has ended and all its deltas were taken."""
        return self._open == 0 and not self._arrived

    def _on_response(self, index: int) -> None:
        self._arrived.append(index)
        if self._waiter is not None:
            _wake(self._waiter)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Until a delta is here; False when `timeout_s` passed without one."""
        if self._arrived:
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
        return bool(self._arrived)

    def pop(self) -> Arrival | None:
        """The next delta, None when none is here. Raises TritonError when the inference it belongs to failed."""
        if not self._arrived:
            return None
        index = self._arrived.popleft()
        delta = read_delta(*self._choices[index].pop())
        if delta.is_final:
            self._open -= 1
        return index, delta

    async def next(self) -> Arrival:
        """The next delta, as `pop`."""
        while (arrival := self.pop()) is None:
            await self.wait()
        return arrival

    def close(self) -> None:
        """Cancels what is not over. Idempotent."""
        for choice in self._choices:
            choice.close()


def _builder(
    request: GenerationRequest, target: Target, request_id: str, index: int, trace: RequestTrace | None
) -> Callable[[ResponseCallback], InferenceRequest]:
    usage = request.stream is None or request.stream.include_usage
    adapter = {"lora_name": target.lora_name} if target.lora_name else {}
    return lambda callback: InferenceRequest(
        model_name=target.name,
        response_callback=callback,
        id=request_id,
        trace=trace,
        inputs=generation_inputs(
            request.prompts[index],
            request.sampling | adapter,
            stream=request.stream is not None,
            logprobs=request.top_logprobs is not None,
            usage=usage,
            cached_usage=usage and RETURN_NUM_CACHED_TOKENS in target.inputs,
        ),
    )


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
