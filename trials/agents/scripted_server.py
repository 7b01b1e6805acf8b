"""A real `llmbackend serve` with a scripted model, whose engine can be killed at a given token.

Used by tests of agents. Independent of what the agents do. Invariant: the server is started by its own command, and its
engine is a separate process, ended with SIGKILL.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.helpers.server_process import ROOT, ServerProcess, start_server, stop_server
from tests.helpers.waiting import eventually

from .scripts import CHAT_TEMPLATE, SCRIPT_VARIABLE, CallFormat, Turn, write_script

ENGINE = {
    "model": "mock",
    "max_model_len": 262144,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16384,
    "num_kv_blocks": 40000,
    "mock_step_ms": 1.0,
    "chat_template": CHAT_TEMPLATE,
    "reasoning_parser": "qwen3",
}
"""Agents send prompts of 80 000 bytes, each of them a token of this model."""

_TOKENS = "vllm:generation_tokens_total"


@contextlib.contextmanager
def scripted_server(folder: Path, model: str, form: CallFormat, turns: Sequence[Turn]) -> Iterator[ServerProcess]:
    write_script(folder / "script.json", turns)
    version = folder / "models" / model / "1"
    version.mkdir(parents=True)
    (version / "model.json").write_text(json.dumps(ENGINE | {"tool_call_parser": form.parser}))
    (version.parent / "config.pbtxt").write_text('backend: "llm"\n')
    log_path = folder / "server.log"
    with log_path.open("w") as log, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT / "trials/agents/in_engine"), str(ROOT))))
        patch.setenv(SCRIPT_VARIABLE, str(folder / "script.json"))
        server = start_server("--model-repository", str(folder / "models"), log=log)
    try:
        yield server
    except BaseException:
        print(log_path.read_text(errors="replace")[-4000:])
        raise
    finally:
        stop_server(server)


@contextlib.contextmanager
def engine_dies(server: ServerProcess, model: str, at_tokens: Sequence[int]) -> Iterator[None]:
    """SIGKILLs the model's engine when it has made so many more tokens, each of `at_tokens` in its turn."""
    over = threading.Event()
    done: list[int] = []
    begun = server.metric(_TOKENS, model)

    def watch() -> None:
        for count in at_tokens:
            while server.metric(_TOKENS, model) < begun + count:
                if over.wait(0.01):
                    return
            os.kill(engine_pid(server), signal.SIGKILL)
            done.append(count)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert done == list(at_tokens), f"the engine died at {done} of {list(at_tokens)} tokens"
    assert server.metric("llmbackend:engine_restarts_total", model) == len(at_tokens)


def engine_pid(server: ServerProcess) -> int:
    """The grandchild of the server: its fork server's child."""
    found: list[int] = []

    def find() -> bool:
        found[:] = [engine for fork_server in _children(server.process.pid) for engine in _children(fork_server)]
        return bool(found)

    eventually(find)
    return found[0]


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]
