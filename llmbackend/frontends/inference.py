"""One inference as a frontend holds it: the way to submit, to receive and to cancel.

For: HTTP and gRPC handlers on the event loop. Does not know: protocols. Invariant: whoever submits an inference ends
it with `close`, which cancels it unless its FINAL response has been taken; so no way out of a handler leaves work
running unseen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from llmbackend.core.backend_api import ResponseFlag
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import InferenceHandle, InferenceRequest, InferenceResponse, ResponseCallback

from .mailbox import Item, Mailbox, ResponseStream

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class Inference:
    """A submitted request: an async iterator of its responses that can be cancelled."""

    def __init__(self, responses: ResponseStream, handle: InferenceHandle) -> None:
        self._responses = responses
        self._handle = handle
        self._watcher: asyncio.Task[None] | None = None
        self._final = False

    def cancel(self) -> None:
        if not self._final:
            self._handle.cancel()

    def cancel_on_disconnect(self, receive: Receive) -> None:
        """From now until `close`, an ASGI http.disconnect on `receive` cancels. The body must have been read."""
        self._watcher = asyncio.create_task(self._watch(receive))

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.cancel()

    def close(self) -> None:
        """Ends the watching, and cancels what has not come to its end."""
        if self._watcher is not None:
            self._watcher.cancel()
        self.cancel()

    async def next_batch(self) -> list[Item]:
        """Waits for one response, then takes all that are there. Empty after FINAL."""
        try:
            first = await self._responses.next()
        except StopAsyncIteration:
            return []
        batch = [first, *self._responses.pop_ready()]
        self._final = bool(batch[-1][1] & ResponseFlag.FINAL)
        return batch

    async def collect(self) -> list[InferenceResponse]:
        """Every response up to FINAL."""
        responses: list[InferenceResponse] = []
        while batch := await self.next_batch():
            responses += [response for response, _ in batch if response is not None]
        return responses


class InferenceGate:
    """Submits requests to the host. Owns the mailbox of the event loop it is used on."""

    def __init__(self, server: InferenceServer) -> None:
        self.server = server
        self._mailbox: Mailbox | None = None

    def submit(self, build: Callable[[ResponseCallback], InferenceRequest]) -> Inference:
        """Sends the request that `build` makes around the given callback.

        Raises TritonError when the host refuses it.
        """
        if self._mailbox is None:
            self._mailbox = Mailbox(asyncio.get_running_loop())
        responses = ResponseStream(self._mailbox)
        return Inference(responses, self.server.infer_async(build(responses)))
