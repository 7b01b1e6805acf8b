"""`python -m tests.upgrades.write_data`: tests/upgrades/data/VERSION/, what this release leaves for later ones.

For: whoever makes a release, before the version is raised; the files are committed and never changed. A server with a
store in a file, and one with a store in Redis, get the same requests and end while a background response is generated.
Beside that: a saved chat of the web page and of `llmbackend chat`, and the first messages of the links of a cluster.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import openai

import llmbackend
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.process.served.remote_messages import hello
from llmbackend.frontends.journals import redis_storage
from llmbackend.frontends.journals.store_settings import StoreSettings
from llmbackend.pages.chat.conversation import Chat, Turn
from llmbackend.remote import wire
from tests.helpers.openai_live_server import serve_openai
from tests.helpers.scripted_text import MODEL, SAY, host_of_scripts
from trials.chaos.cluster.shared_store import shared_store

DATA: Final = Path(__file__).with_name("data")
TTL_S: Final = 1e10
"""Nothing expires before a test reads it."""
SCRIPT: Final = "<think>hm, é</think>Here you are."
BACKGROUND: Final = "<think>a long thought</think>" + "The words of a long answer. " * 20
ENGINE: Final = EngineConfig(model="mock")


def ask(client: Any) -> dict[str, Any]:
    """Stored objects of each kind: what the API answers about them, and the id of a response that is interrupted."""
    first = client.responses.create(
        model=MODEL, input=SAY + SCRIPT, include=["reasoning.encrypted_content"], temperature=0, metadata={"a": "b"}
    )
    second = client.responses.create(model=MODEL, input=SAY + "Again.", previous_response_id=first.id, temperature=0)
    conversation = client.conversations.create(items=[{"type": "message", "role": "user", "content": "Hello"}])
    client.responses.create(model=MODEL, input=SAY + "Hi.", conversation=conversation.id, temperature=0)
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": SAY + SCRIPT}],
        store=True,
        metadata={"c": "d"},
        temperature=0,
    )
    with client.responses.create(
        model=MODEL, input=SAY + BACKGROUND, background=True, stream=True, temperature=0
    ) as stream:
        seen = [event for event, _ in zip(stream, range(60), strict=False)]
    return answers(client, [first.id, second.id], conversation.id, chat.id) | {"background": seen[0].response.id}


def answers(client: openai.OpenAI, responses: list[str], conversation: str, chat: str) -> dict[str, Any]:
    def get(path: str) -> Any:
        return client.get(path, cast_to=httpx.Response).json()

    return {
        "responses": [get(f"/responses/{id}") for id in responses],
        "input items": [get(f"/responses/{id}/input_items") for id in responses],
        "conversation": get(f"/conversations/{conversation}"),
        "items": get(f"/conversations/{conversation}/items"),
        "chat": get(f"/chat/completions/{chat}"),
        "messages": get(f"/chat/completions/{chat}/messages"),
        "chats": get("/chat/completions"),
    }


@contextmanager
def serving(url: str, folder: Path, *, step_ms: int = 0) -> Iterator[openai.OpenAI]:
    """A client of a server with that response store."""
    store = StoreSettings(url=url, ttl_s=TTL_S).open()
    with (
        host_of_scripts(folder / "repository", mock_step_ms=step_ms) as host,
        serve_openai(host, store=store, takes_over=True) as base,
        openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def leave(url: str, folder: str, expected: str) -> None:
    """In a process of its own, which ends in the middle of a response."""
    redis_storage._machine = lambda: "machine-1/pid:[1]"
    with serving(url, Path(folder), step_ms=3) as client:
        Path(expected).write_text(json.dumps(ask(client), indent=1) + "\n")
        os.kill(os.getpid(), signal.SIGKILL)


def _write_stores(target: Path, scratch: Path) -> None:
    _leave(f"sqlite:{scratch}/store", scratch / "first", target / "responses.json")
    with sqlite3.connect(scratch / "store") as store:
        store.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store.close()
    (target / "responses.sqlite.gz").write_bytes(gzip.compress((scratch / "store").read_bytes(), mtime=0))
    with shared_store(scratch) as url:
        _leave(url, scratch / "second", target / "redis_responses.json")
        (target / "redis.json.gz").write_bytes(gzip.compress(json.dumps(redis_contents(url)).encode(), mtime=0))


def _leave(url: str, folder: Path, expected: Path) -> None:
    program = f"from {__spec__.name} import leave; leave(*{(url, str(folder), str(expected))!r})"
    ended = subprocess.run([sys.executable, "-c", program], check=False).returncode
    assert ended == -signal.SIGKILL, ended


def redis_contents(url: str) -> dict[str, str]:
    """Serialised values by key, without leases."""
    import redis

    with redis.Redis.from_url(url) as client:
        keys = [key for key in client.keys("*") if b":instance:" not in key]
        return {key.decode(): base64.b64encode(client.dump(key)).decode() for key in sorted(keys)}


def _write_messages(target: Path) -> None:
    """The messages by which two releases of a cluster notice each other."""
    messages = {
        "engine_hello": msgspec.msgpack.encode(hello("host-1", ENGINE)),
        "frontend_hello": msgspec.msgpack.encode(wire.Hello(wire.PROTOCOL, llmbackend.__version__, "web 1", ("nv_",))),
        "frontend_refused": msgspec.msgpack.encode(wire.Refused("no", llmbackend.__version__)),
    }
    texts = {name: base64.b64encode(message).decode() for name, message in messages.items()}
    (target / "cluster.json").write_text(json.dumps(texts, indent=1) + "\n")


def _write_chats(target: Path) -> None:
    turns = [Turn(role="user", content="What is Triton?"), Turn(role="assistant", content="A server.", reasoning="hm")]
    (target / "page_chat.json").write_text(Chat(id="chat-1", turns=turns).to_json() + "\n")
    saved = {"model": "demo", "system": "Be short.", "messages": [{"role": "user", "content": "Hello"}]}
    (target / "terminal_chat.json").write_text(json.dumps(saved, indent=1) + "\n")


def main() -> None:
    target = DATA / llmbackend.__version__
    target.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        _write_stores(target, Path(scratch))
    _write_messages(target)
    _write_chats(target)
    print(f"{target}: {sum(path.stat().st_size for path in target.iterdir())} bytes")


if __name__ == "__main__":
    main()
