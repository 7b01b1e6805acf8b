"""Engine: a model in this program, without ports.

For programs that generate text in Python. It is a host with one model of the `llm` backend, so parameters, defaults and
errors are those of a server. The model runs in a separate process; if that dies, another one continues after the last
token. Invariant: `close` leaves no process, thread or file behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar, Final
from weakref import WeakKeyDictionary, ref

from llmbackend.core.errors import StartupError, internal
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import InferenceResponse, ResponseFlag, is_final, wake_receiver
from llmbackend.core.server_options import ServerOptions

from ..server.settings import SingleModel
from .generation import MODEL, Completion, Generation, Prompt, completion_of, generation_of, request_of
from .sampling_params import SamplingParams

STOP_TIMEOUT_S: Final = 30.0
"""How long `close` waits for running generations."""
MAX_WAITING: Final = 512
"""Concurrent outputs of one call; fewer than the model's queue holds."""
_DEFAULTS: Final = SamplingParams()
_Response = tuple[InferenceResponse | None, ResponseFlag]


class Engine:
    """One loaded model. May be used from any thread, and as a context manager."""

    def __init__(self, model: str | Path, **arguments: Any) -> None:
        """Returns once the model is loaded.

        model      a checkpoint's directory, a GGUF file, or a hub id
        arguments  engine arguments with vLLM's names (docs/llm_backend.md): dtype="bfloat16", max_model_len=4096, …

        Raises TritonError naming the argument and what was expected, or why the model cannot be loaded.
        """
        single = SingleModel.checked(str(model), (MODEL,), arguments)
        self._max_waiting = min(MAX_WAITING, int(single.parameters.get("max_queue_size", MAX_WAITING)))
        with tempfile.TemporaryDirectory(prefix="llmbackend-engine-") as folder:
            single.write_into(Path(folder))
            self._host = InferenceServer(ServerOptions(model_repositories=(Path(folder),)))
            try:
                self._host.start()
            except StartupError as error:
                raise internal(error.reasons.get(MODEL, error.message)) from None

    def generate(self, prompts: Iterable[Prompt], sampling: SamplingParams = _DEFAULTS) -> list[Generation]:
        """All outputs of the prompts, in order; the prompts are computed together.

        Raises TritonError if a prompt or parameter is refused, and cancels the other prompts.
        """
        room = self._max_concurrent(prompts, sampling)
        found: list[Generation] = []
        running: deque[_Call] = deque()
        try:
            for prompt in prompts:
                if len(running) >= room:
                    found.append(generation_of(running.popleft()))
                running.append(_Call(self._host, prompt, sampling, stream=False))
            while running:
                found.append(generation_of(running.popleft()))
        finally:
            for call in running:
                call.cancel()
        return found

    def stream(self, prompt: Prompt, sampling: SamplingParams = _DEFAULTS) -> Iterator[Completion]:
        """Yields the new parts of the output as they are generated. Closing the iterator ends the generation. Raises
        TritonError."""
        yield from _Call(self._host, prompt, sampling, stream=True)

    async def generate_async(self, prompts: Iterable[Prompt], sampling: SamplingParams = _DEFAULTS) -> list[Generation]:
        """`generate` for an event loop. Cancelling the task ends its generations."""
        room = self._max_concurrent(prompts, sampling)
        found: list[Generation] = []
        running: deque[_AsyncCall] = deque()
        try:
            for prompt in prompts:
                if len(running) >= room:
                    found.append(generation_of([one async for one in running.popleft()]))
                running.append(_AsyncCall(self._host, prompt, sampling, stream=False))
            while running:
                found.append(generation_of([one async for one in running.popleft()]))
        finally:
            for call in running:
                call.cancel()
        return found

    async def stream_async(self, prompt: Prompt, sampling: SamplingParams = _DEFAULTS) -> AsyncIterator[Completion]:
        """`stream` for an event loop."""
        async with contextlib.aclosing(aiter(_AsyncCall(self._host, prompt, sampling, stream=True))) as completions:
            async for completion in completions:
                yield completion

    def _max_concurrent(self, prompts: object, sampling: SamplingParams) -> int:
        """How many of the prompts to compute at the same time. Raises TypeError for a single prompt."""
        if isinstance(prompts, str | Mapping):
            kind = "text" if isinstance(prompts, str) else "object"
            raise TypeError(f"'prompts' is a single {kind}, expected a list of prompts")
        return max(self._max_waiting // max(sampling.n or 1, sampling.best_of or 1), 1)

    def close(self) -> None:
        """Waits for running generations, then ends the model's process. Idempotent."""
        self._host.stop(STOP_TIMEOUT_S)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Call:
    """A request whose responses a thread waits for."""

    def __init__(self, host: InferenceServer, prompt: Prompt, sampling: SamplingParams, *, stream: bool) -> None:
        self._responses: SimpleQueue[_Response] = SimpleQueue()
        self._handle = host.infer_async(
            request_of(prompt, sampling, stream=stream), lambda response, flags: self._responses.put((response, flags))
        )

    def cancel(self) -> None:
        self._handle.cancel()

    def __iter__(self) -> Iterator[Completion]:
        try:
            while True:
                response, flags = self._responses.get()
                if response is not None:
                    yield completion_of(response)
                if is_final(flags):
                    return
        finally:
            self.cancel()


class _Arrivals:
    """Carries responses to an event loop, which an engine's step wakes once for all of them."""

    _of_loops: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, _Arrivals]] = WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)
        self._arrived: deque[tuple[asyncio.Queue[_Response], _Response]] = deque()
        self._is_woken = False
        """As in the frontends' Mailbox: at worst the loop is woken once too often."""

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> _Arrivals:
        """Called on the loop."""
        found = cls._of_loops.get(loop)
        if found is None:
            found = cls._of_loops[loop] = cls(loop)
        return found

    def put(self, queue: asyncio.Queue[_Response], response: _Response) -> None:
        """Thread-safe."""
        self._arrived.append((queue, response))
        if not self._is_woken:
            self._is_woken = True
            wake_receiver(self._wake)

    def _wake(self) -> None:
        if (loop := self._loop()) is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_woken = False
        for _ in range(len(self._arrived)):
            queue, response = self._arrived.popleft()
            queue.put_nowait(response)


class _AsyncCall:
    """A request whose responses a task of an event loop waits for."""

    def __init__(self, host: InferenceServer, prompt: Prompt, sampling: SamplingParams, *, stream: bool) -> None:
        self._arrivals = _Arrivals.of(asyncio.get_running_loop())
        self._responses: asyncio.Queue[_Response] = asyncio.Queue()
        self._handle = host.infer_async(request_of(prompt, sampling, stream=stream), self._deliver)

    def _deliver(self, response: InferenceResponse | None, flags: ResponseFlag) -> None:
        self._arrivals.put(self._responses, (response, flags))

    def cancel(self) -> None:
        self._handle.cancel()

    async def __aiter__(self) -> AsyncGenerator[Completion, None]:
        try:
            while True:
                response, flags = await self._responses.get()
                if response is not None:
                    yield completion_of(response)
                if is_final(flags):
                    return
        finally:
            self.cancel()
