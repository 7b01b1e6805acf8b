"""What the choice of an engine costs: its parts alone, and in a real host with it and without it, in turns.

For: `python -m benchmarks.prefix_routing --cost`. Does not know: how well it chooses. Invariants: CPU time is counted,
never time; both kinds of rounds go to the same two engine processes.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import tempfile
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np

from llmbackend.adapter.model_state import ModelState
from llmbackend.adapter.tasks.placement import Placement, PrefixIndex
from llmbackend.adapter.tasks.prefix_routing import PrefixRouting
from llmbackend.adapter.tasks.task_map import EngineAssignment, TaskMap
from llmbackend.core.backend_api import ResponseFlag, Tensor
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import InferenceRequest, InferenceResponse
from llmbackend.core.repository.model_files import ModelIdentifier
from llmbackend.core.server_options import ServerOptions
from llmbackend.engine.memory.prefix_cache import BlockJournal, PrefixCache, prefix_hashes
from llmbackend.engine.messages import BlockChanges, InferRequest, SamplingParams
from llmbackend.waiting.queue_policy import QueuePolicies

from .policies import QueuedTask

BLOCK_SIZE = 32
MODEL = "mock_llm"
REPEATS = 7


def _least_us(work: Callable[[], object], count: int) -> float:
    """CPU microseconds of one of `count` in `work`, in its fastest run."""
    times = []
    for _ in range(REPEATS):
        begin_ns = time.process_time_ns()
        work()
        times.append((time.process_time_ns() - begin_ns) / 1e3 / count)
    return min(times)


def parts() -> str:
    """In Markdown."""
    draw = random.Random(0)
    rows = {
        f"hashes of a prompt of {count} tokens, a token": f"{_hashing_us(draw, count):.3f} µs"
        for count in (128, 1024, 8192)
    }
    rows |= {
        f"choice among {engines} engines, a request of 2048 tokens": f"{_choice_us(draw, engines):.1f} µs"
        for engines in (1, 2, 4, 8, 100)
    }
    journal_us, index_us = _block_us(draw)
    rows["engine: a block is stored and evicted, a token"] = f"{journal_us / BLOCK_SIZE:.3f} µs"
    rows["host: its entry comes and goes, a token"] = f"{index_us / BLOCK_SIZE:.3f} µs"
    return "\n".join(["| | CPU |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _hashing_us(draw: random.Random, count: int) -> float:
    prompt = tuple(draw.randbytes(count))
    return _least_us(lambda: [prefix_hashes(("t", "", ""), prompt, BLOCK_SIZE) for _ in range(20)], 20 * count)


def _choice_us(draw: random.Random, num_engines: int, num_requests: int = 200) -> float:
    """Until each request is taken: it is offered to engines in turn."""
    index = PrefixIndex()
    placement = Placement(index)
    placement.block_size = BLOCK_SIZE
    tasks = TaskMap(QueuePolicies(), 1 << 30, placement)
    engines = [EngineAssignment(lambda: None, lambda: 64, 1 << i) for i in range(num_engines)]
    texts = [array("Q", draw.randbytes(8 * 64)) for _ in range(num_requests)]
    for text in texts:
        index.apply(1 << draw.randrange(num_engines), BlockChanges(text.tobytes()))

    def work() -> None:
        for number, text in enumerate(texts):
            request = InferRequest(request_id=str(number), prompt_token_ids=(1,), sampling=SamplingParams())
            task: Any = QueuedTask(request, text)
            tasks.admit(task)
            tasks.enqueue(task)
            for engine in engines:
                if not tasks.num_queued:
                    break
                tasks.take(engine, 64, engines, 1)
            tasks.pop(task.request_id)

    return _least_us(work, num_requests)


def _block_us(draw: random.Random, count: int = 20_000) -> tuple[float, float]:
    tokens = [draw.randbytes(4 * BLOCK_SIZE) for _ in range(count)]
    told: list[BlockChanges] = []

    def engine(is_told: bool) -> None:
        cache, journal = PrefixCache(count), BlockJournal()
        cache.tell(journal if is_told else None)
        parent: Any = ("t", "", "")
        for block, token_bytes in enumerate(tokens):
            parent = cache.register(parent, token_bytes, block)
        told[:] = [changes for changes in (journal.take(),) if changes is not None]
        for block in reversed(range(count)):
            cache.forget(block)
        told.extend(changes for changes in (journal.take(),) if changes is not None)

    without_us = _least_us(lambda: engine(False), count)
    with_us = _least_us(lambda: engine(True), count)
    index = PrefixIndex()

    def host() -> None:
        for changes in told:
            index.apply(1, changes)

    return with_us - without_us, _least_us(host, count)


# --- a real host ------------------------------------------------------------------------------------------------------


@contextmanager
def _two_engines() -> Iterator[InferenceServer]:
    with tempfile.TemporaryDirectory() as folder:
        version = Path(folder) / MODEL / "1"
        version.mkdir(parents=True)
        arguments = {"model": "mock", "max_model_len": 4096, "block_size": BLOCK_SIZE, "num_kv_blocks": 4096}
        (version / "model.json").write_text(json.dumps(arguments))
        (version.parent / "config.pbtxt").write_text('backend: "llm"\ninstance_group [ { kind: KIND_CPU, count: 2 } ]')
        server = InferenceServer(ServerOptions(model_repositories=(Path(folder),), model_control_mode="none"))
        server.start()
        try:
            yield server
        finally:
            server.stop(20)


def _state(server: InferenceServer) -> ModelState:
    state = server._versions.get(ModelIdentifier(MODEL), -1).state
    assert isinstance(state, ModelState)
    return state


def _cpu_us(server: InferenceServer, prompts: list[str], max_tokens: int) -> float:
    """CPU microseconds of the host for one of these requests, 16 of which are under way at a time."""
    free, left = threading.Semaphore(16), threading.Semaphore(0)
    errors: list[object] = []

    def on_response(response: InferenceResponse | None, flags: ResponseFlag) -> None:
        if response is not None and response.error is not None:
            errors.append(response.error)
        if flags & ResponseFlag.FINAL:
            free.release()
            left.release()

    sampling = json.dumps({"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True})
    gc.collect()
    begin_ns = time.process_time_ns()
    for prompt in prompts:
        free.acquire()
        inputs = (
            Tensor.text("text_input", prompt),
            Tensor.text("sampling_parameters", sampling),
            Tensor.of("stream", np.array([True])),
        )
        server.infer_async(InferenceRequest(MODEL, inputs=inputs), on_response)
    for _ in prompts:
        left.acquire()
    assert not errors, errors[0]
    return (time.process_time_ns() - begin_ns) / 1e3 / len(prompts)


_ITS_OWN: Final = ((PrefixRouting, "place"), (PrefixIndex, "apply"), (TaskMap, "take"), (TaskMap, "record_outputs"))
"""What a request and the messages of engines pass through because of prefixes. The last two are passed in any case: of
them only the difference counts."""


@contextmanager
def _spent_in(functions: Sequence[tuple[type, str]]) -> Iterator[Counter[str]]:
    """CPU nanoseconds in each function, by its name, in all threads."""
    spent: Counter[str] = Counter()

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin_ns = time.thread_time_ns()
            try:
                return function(*args, **kwargs)
            finally:
                spent[function.__name__] += time.thread_time_ns() - begin_ns

        return call

    with ExitStack() as stack:
        for owner, name in functions:
            stack.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name))))
        yield spent


def host(rounds: int = 8, num_requests: int = 200, max_tokens: int = 4) -> str:
    """In Markdown."""
    draw = random.Random(0)
    lines = [
        "| prompt | hashes | messages of engines | choice, without and with | together | of all CPU for it |",
        "|---|---|---|---|---|---|",
    ]
    with _two_engines() as server, _spent_in(_ITS_OWN) as spent:
        state = _state(server)
        for prompt_tokens in (64, 512, 2048):
            found: dict[bool, list[Counter[str]]] = {True: [], False: []}
            for number in range(2 * rounds):
                is_on = number % 2 == 0
                state.prefixes._is_enabled = is_on
                state.prefixes.follow(state._engines)
                prompts = ["".join(draw.choices("abcdefgh", k=prompt_tokens)) for _ in range(num_requests)]
                spent.clear()
                whole_us = _cpu_us(server, prompts, max_tokens)
                each = Counter({name: round(ns / num_requests) for name, ns in spent.items()})
                found[is_on].append(each + Counter({"whole": round(whole_us * 1e3)}))
            lines.append(_row(prompt_tokens, found))
    return "\n".join(lines)


def _row(prompt_tokens: int, found: dict[bool, list[Counter[str]]]) -> str:
    def us(is_on: bool, *names: str) -> float:
        return statistics.median(sum(one[name] for name in names) for one in found[is_on]) / 1e3

    choice = "take", "record_outputs"
    without, with_it = us(False, *choice), us(True, *choice)
    together = us(True, "place", "apply") - us(False, "place", "apply") + with_it - without
    return (
        f"| {prompt_tokens} tokens | {us(True, 'place'):.1f} µs | {us(True, 'apply'):.1f} µs | {without:.1f} µs, "
        f"{with_it:.1f} µs | {together:.1f} µs | {us(True, 'whole'):.0f} µs |"
    )
