"""This release reads what each earlier one has left (tests/upgrades/data), and continues it."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import openai
import pytest

import llmbackend
from llmbackend.cli.chat.commands import _read
from llmbackend.core.caching import pack, unpack
from llmbackend.core.messages import InferenceResponse
from llmbackend.core.tensors import Tensor
from llmbackend.engine.process.served.remote_messages import Hello, refusal
from llmbackend.pages.chat.conversation import Chat
from llmbackend.remote import wire
from tests.helpers.scripted_text import MODEL, SAY
from tests.helpers.waiting import eventually
from tests.upgrades.write_data import BACKGROUND, DATA, ENGINE, answers, serving
from trials.chaos.cluster.shared_store import shared_store

RELEASES = sorted(path.name for path in DATA.iterdir())
MAX_BYTES = 200_000


@pytest.fixture(scope="module", params=RELEASES)
def data(request: pytest.FixtureRequest) -> Path:
    return DATA / cast(str, request.param)


@pytest.fixture(scope="module", params=["sqlite", "redis"])
def store(request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """(a client of a server with a copy of the store, what the earlier release said of it)"""
    scratch = tmp_path_factory.mktemp("store")
    if request.param == "sqlite":
        (scratch / "store").write_bytes(gzip.decompress((data / "responses.sqlite.gz").read_bytes()))
        with serving(f"sqlite:{scratch}/store", scratch) as client:
            yield client, json.loads((data / "responses.json").read_text())
        return
    redis = pytest.importorskip("redis")
    with shared_store(scratch) as url:
        with redis.Redis.from_url(url) as filled:
            for key, value in json.loads(gzip.decompress((data / "redis.json.gz").read_bytes())).items():
                filled.restore(key, 0, base64.b64decode(value))
        with serving(url, scratch) as client:
            yield client, json.loads((data / "redis_responses.json").read_text())


def test_what_was_stored_is_answered_as_before(store: tuple[openai.OpenAI, dict[str, Any]]) -> None:
    client, before = store
    responses = [each["id"] for each in before["responses"]]
    now = answers(client, responses, before["conversation"]["id"], before["chat"]["id"])
    assert now == {name: before[name] for name in now}


def test_an_interrupted_response_is_completed(store: tuple[openai.OpenAI, dict[str, Any]]) -> None:
    client, before = store
    id = before["background"]
    eventually(lambda: client.responses.retrieve(id).status not in ("queued", "in_progress"))
    made = client.responses.retrieve(id)
    assert (made.status, made.error) == ("completed", None)
    assert made.output_text == BACKGROUND.partition("</think>")[2]
    numbers = [event.sequence_number for event in client.responses.retrieve(id, stream=True, starting_after=0)]
    assert numbers == list(range(1, len(numbers) + 1))


def test_stored_and_sealed_items_are_taken_as_input(store: tuple[openai.OpenAI, dict[str, Any]]) -> None:
    client, before = store
    first = before["responses"][0]
    again = client.responses.create(model=MODEL, input=SAY + "More.", previous_response_id=first["id"], temperature=0)
    assert again.output_text == "More."
    sealed = [item for item in first["output"] if item["type"] == "reasoning"]
    assert sealed[0]["encrypted_content"]
    carried: Any = [*first["output"], {"role": "user", "content": SAY + "Sealed."}]
    assert client.responses.create(model=MODEL, input=carried, store=False, temperature=0).output_text == "Sealed."


def test_saved_chats_are_read(data: Path) -> None:
    chat = Chat.of_json((data / "page_chat.json").read_text())
    assert [turn.content for turn in chat.turns] == ["What is Triton?", "A server."]
    system, messages = _read(data / "terminal_chat.json")
    assert (system, messages) == ("Be short.", [{"role": "user", "content": "Hello"}])


def test_the_first_messages_of_links_are_read(data: Path) -> None:
    """Of any release, so that a mixed cluster is refused by name. Of a release that differs nothing else is read."""
    said = {name: base64.b64decode(text) for name, text in json.loads((data / "cluster.json").read_text()).items()}
    host = msgspec.msgpack.decode(said["engine_hello"], type=Hello)
    frontend = msgspec.msgpack.decode(said["frontend_hello"], type=wire.Hello)
    refused = msgspec.msgpack.decode(said["frontend_refused"], type=wire.Refused)
    assert {host.release, frontend.release, refused.release} == {data.name}
    assert (frontend.name, refused.reason) == ("web 1", "no")
    if data.name != llmbackend.__version__:
        assert f"host 'host-1' runs llmbackend {data.name}" in refusal(host, ENGINE, "")


def test_the_data_are_small() -> None:
    files = [path for path in DATA.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MAX_BYTES


def test_an_entry_of_the_response_cache_has_the_form_of_its_format() -> None:
    """A change of these bytes needs another _ENTRY_FORMAT."""
    entry = pack(InferenceResponse("m", 1, "", [Tensor.text("OUT", "abc")], parameters={"a": 1}))
    assert entry.hex() == "929194a34f5554a542595445539101c4070300000061626381a16101"
    outputs, parameters = unpack(entry)
    assert ([tensor.name for tensor in outputs], dict(parameters)) == (["OUT"], {"a": 1})
