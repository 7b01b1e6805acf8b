"""Resumable streams that are copied to a second host: it makes them again, event by event, wherever they are cut."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from llmbackend.core.errors import unavailable
from llmbackend.frontends.access.access_control import AccessControl
from llmbackend.frontends.access.settings import AccessSettings
from llmbackend.frontends.journals import resumable_streams, stream_copies
from llmbackend.frontends.journals.journal import StreamHead, StreamRecord
from llmbackend.frontends.journals.resumable_streams import ResumableStream, ResumableStreams
from llmbackend.frontends.journals.stream_copies import (
    HeldRecords,
    StreamCopies,
    _Batch,
    _Begin,
    _decode_call,
    _encode,
    _End,
    _Refused,
    _Step,
)
from tests.helpers.held_answers import num_streams
from tests.helpers.linked_hosts import Hosts
from tests.helpers.mock_llm_host import MODEL
from tests.helpers.numbered_events import Event, read_events
from tests.helpers.waiting import eventually, eventually_async

GENERATE = f"/v2/models/{MODEL}/generate_stream"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASK = {"X-Resumable-Stream": "true"}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}},
                                             "required": ["x"], "additionalProperties": False}},
}  # fmt: skip
SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3}


def chat(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "one"}], "stream": True, "max_tokens": 40, **more}


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": (GENERATE, {
        "text_input": "one two", "stream": True,
        "sampling_parameters": json.dumps({"temperature": 1, "max_tokens": 20, "ignore_eos": True}),
    }),
    "chat": (CHAT, chat(temperature=1, stream_options={"include_usage": True}, logprobs=True)),
    "choices": (CHAT, chat(temperature=1, n=3, max_tokens=12)),
    "schema": (CHAT, chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}})),
    "tool": (CHAT, chat(request_id="mine", tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f"}})),
    "prompts": (COMPLETIONS, {"model": MODEL, "prompt": ["one", "two", "three"], "stream": True, "max_tokens": 8,
                              "temperature": 1, "echo": True, "seed": 5, "stream_options": {"include_usage": True}}),
}  # fmt: skip
ENGINE: dict[str, Any] = {
    "mock_step_ms": 2,
    "max_model_len": 512,
    "chat_template": "{{ tools }}{% for message in messages %}{{ message.content }}{% endfor %}",
    "tool_call_parser": "hermes",
}


def generation(max_tokens: int) -> tuple[str, dict[str, Any]]:
    sampling = json.dumps({"temperature": 1, "max_tokens": max_tokens, "ignore_eos": True})
    return GENERATE, REQUESTS["generate"][1] | {"sampling_parameters": sampling}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    hosts = Hosts(tmp_path_factory.mktemp("hosts"), **ENGINE)
    for name in hosts.all:  # starts the threads that compute masks
        with hosts.client(name) as client:
            client.post(CHAT, json=REQUESTS["schema"][1])
    yield hosts
    hosts.stop()


@pytest.fixture(autouse=True)
def everything_is_up(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(stream_copies, "_RETRY_INTERVAL_S", 0.0)
    yield
    hosts.reset()


def told(events: list[Event]) -> dict[str, Any]:
    """What a client knows after them, however they are cut: identity, texts, calls, logprobs, reasons, usage."""
    found: dict[str, Any] = {"is over": events[-1][1] == "[DONE]"}
    for _, data in events:
        event = {} if data == "[DONE]" else json.loads(data)
        for choice in event.pop("choices", []):
            _join(found.setdefault(f"choice {choice.pop('index')}", {}), choice)
        found["text_output"] = found.get("text_output", "") + event.pop("text_output", "")
        found |= {name: value for name, value in event.items() if value is not None}
    return found


def _join(known: dict[str, Any], new: dict[str, Any]) -> None:
    """Adds a chunk's part of a choice to those before it."""
    for name, value in new.items():
        if isinstance(value, dict):
            _join(known.setdefault(name, {}), value)
        elif isinstance(value, list) and name == "tool_calls":
            for call in value:
                _join(known.setdefault(f"call {call.pop('index')}", {}), call)
        elif isinstance(value, str | list) and name not in ("role", "finish_reason"):
            known[name] = known.get(name, type(value)()) + value
        elif value is not None:
            known[name] = value


def holders_of_a(hosts: Hosts) -> tuple[str, str]:
    """The host that has the copies of a's streams, and the other one."""
    eventually(lambda: hosts.copies("a").are_active)
    holder = hosts.copies("a").holder
    assert holder is not None
    return holder, "c" if holder == "b" else "b"


@pytest.mark.parametrize("name", REQUESTS)
def test_a_stream_is_made_again_where_its_client_comes_back(hosts: Hosts, name: str) -> None:
    """Its host is cut off and continues with it, and so does the other one. The events that the client has are the same
    on both; the later ones tell the same, in chunks that may be cut otherwise."""
    path, body = REQUESTS[name]
    for cut in (1, 2, 5, 9):
        with hosts.client("a") as first, hosts.client("c") as other:
            begun = read_events(first, path, body, ASK, cut)
            hosts.network.down.add("a")
            rest = read_events(other, path, {}, {"Last-Event-ID": begun[-1][0]})
            stream = {"Last-Event-ID": begun[0][0].partition(":")[0]}
            of_first, of_other = (read_events(host, path, {}, stream) for host in (first, other))
        assert of_other == begun + rest and of_first[:cut] == begun
        assert told(of_other) == told(of_first)
        for events in (of_first, of_other):
            assert [id for id, _ in events] == [f"{stream['Last-Event-ID']}:{number}" for number in range(len(events))]
        assert num_streams(hosts.all["c"].streams) >= 1
        hosts.network.down.clear()


def test_a_stream_of_a_compressed_request_is_made_again(hosts: Hosts) -> None:
    path, body = REQUESTS["chat"]
    packed = gzip.compress(json.dumps(body).encode())
    headers = ASK | {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    with hosts.client("a") as first, hosts.client("c") as other:
        begun = read_events(first, path, packed, headers, 5)
        hosts.network.down.add("a")
        rest = read_events(other, path, {}, {"Last-Event-ID": begun[-1][0]})
        whole = read_events(other, path, {}, {"Last-Event-ID": begun[0][0].partition(":")[0]})
    assert whole == begun + rest and whole[-1][1] == "[DONE]"


def test_an_ended_stream_whose_last_events_were_lost_is_made_again(hosts: Hosts) -> None:
    path, body = REQUESTS["choices"]
    with hosts.client("a") as first, hosts.client("b") as other:
        whole = read_events(first, path, body, ASK)
        hosts.network.down.add("a")
        for cut in (len(whole) - 1, 3):
            assert read_events(other, path, {}, {"Last-Event-ID": whole[cut - 1][0]}) == whole[cut:]


def test_a_stream_moves_while_its_host_lives_and_ends_there(hosts: Hosts) -> None:
    path, body = generation(100)
    with hosts.client("a") as first, hosts.client("c") as other:
        begun = read_events(first, path, body, ASK, 4)
        moved = read_events(other, path, {}, {"Last-Event-ID": begun[-1][0]}, 5)
        eventually(lambda: not hosts.all["a"].gate.open_inferences)
        assert not num_streams(hosts.all["a"].streams)
        back = read_events(first, path, {}, {"Last-Event-ID": moved[-1][0]})
        eventually(lambda: not num_streams(hosts.all["c"].streams))
    ids = [int(id.partition(":")[2]) for id, _ in begun + moved + back]
    assert ids == list(range(len(ids))) and len(ids) > 20


def test_a_host_that_was_cut_off_is_refused_and_ends_its_stream(hosts: Hosts) -> None:
    path, body = generation(2000)  # longer than the cut
    holder, another = holders_of_a(hosts)
    with hosts.client("a") as first, hosts.client(holder) as other:
        before = hosts.copies("b").num_held + hosts.copies("c").num_held
        begun = read_events(first, path, body, ASK, 2)
        assert hosts.copies("b").num_held + hosts.copies("c").num_held == before + 1
        hosts.network.down.update({"a", another})
        read_events(other, path, {}, {"Last-Event-ID": begun[-1][0]}, 3)
        assert num_streams(hosts.all["a"].streams) == 1
        hosts.network.down.clear()
        eventually(lambda: not num_streams(hosts.all["a"].streams))
        eventually(lambda: not hosts.all["a"].gate.open_inferences)


def test_a_host_that_copies_elsewhere_after_a_cut_is_told_by_the_copies_of_its_streams(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """a chooses b, because c has just failed; c, which took the stream over, chooses a."""
    path, body = generation(2000)  # longer than the cut
    hosts.network.down.add("b")
    hosts.network.tell()
    eventually(lambda: hosts.copies("a").holder == "c")
    with hosts.client("a") as first, hosts.client("c") as other:
        begun = read_events(first, path, body, ASK, 2)
        hosts.network.down.add("a")
        read_events(other, path, {}, {"Last-Event-ID": begun[-1][0]}, 3)
        monkeypatch.setattr(stream_copies, "_RETRY_INTERVAL_S", 60.0)
        eventually(lambda: hosts.copies("a")._flushing is None)  # c is not being asked
        hosts.network.down.clear()
        eventually(lambda: not num_streams(hosts.all["a"].streams))
        eventually(lambda: not hosts.all["a"].gate.open_inferences)


def test_a_record_that_lacks_events_of_the_client_is_not_continued(hosts: Hosts) -> None:
    """A host that is cut off goes on without copies. Another host, which has an older record, makes no other events in
    place of those that the client has."""
    path, body = REQUESTS["choices"]
    holders_of_a(hosts)
    with hosts.client("a") as first, hosts.client("b") as other:
        begun = read_events(first, path, body, ASK, 2)
        hosts.network.down.add("a")
        begun += read_events(first, path, {}, {"Last-Event-ID": begun[-1][0]}, 20)
        assert other.post(path, json={}, headers={"Last-Event-ID": begun[-1][0]}).status_code == 503
        hosts.network.down.clear()
        rest = read_events(other, path, {}, {"Last-Event-ID": begun[-1][0]})
        whole = read_events(other, path, {}, {"Last-Event-ID": begun[0][0].partition(":")[0]})
    assert whole == begun + rest


def test_when_the_host_with_the_copies_ends_another_one_gets_them(hosts: Hosts) -> None:
    path, body = generation(150)
    holder, another = holders_of_a(hosts)
    with hosts.client("a") as first, hosts.client(another) as other:
        before = hosts.copies(another).num_held
        begun = read_events(first, path, body, ASK, 2)
        hosts.network.down.add(holder)
        begun += read_events(first, path, {}, {"Last-Event-ID": begun[-1][0]}, 10)
        eventually(lambda: hosts.copies(another).num_held == before + 1)
        hosts.network.down.add("a")
        rest = read_events(other, path, {}, {"Last-Event-ID": begun[-1][0]})
        assert begun + rest == read_events(first, path, {}, {"Last-Event-ID": begun[0][0].partition(":")[0]})


def test_a_stream_outlives_the_host_that_was_about_to_take_it_up(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host that had it has ended it by then."""
    path, parameters = GENERATE, {"max_tokens": 100, "ignore_eos": True}
    body = REQUESTS["generate"][1] | {"sampling_parameters": json.dumps(parameters)}
    holder, another = holders_of_a(hosts)

    async def end(record: StreamRecord) -> None:
        hosts.network.down.add(another)
        raise unavailable("this host ends")

    with hosts.client("a") as first, hosts.client(holder) as other, hosts.client(another) as lost:
        begun = read_events(first, path, body, ASK, 4)
        monkeypatch.setattr(hosts.copies(another), "regenerate", end)
        assert lost.post(path, json={}, headers={"Last-Event-ID": begun[-1][0]}).status_code == 503
        eventually(lambda: not num_streams(hosts.all["a"].streams))
        rest = read_events(other, path, {}, {"Last-Event-ID": begun[-1][0]})
    ids = [int(id.partition(":")[2]) for id, _ in begun + rest]
    assert ids == list(range(len(ids))) and len(ids) > 20


def test_a_client_comes_back_later_while_a_host_that_may_have_its_stream_cannot_be_asked(hosts: Hosts) -> None:
    path, body = REQUESTS["generate"]
    holder, another = holders_of_a(hosts)
    with hosts.client("a") as first, hosts.client(another) as other:
        begun = read_events(first, path, body, ASK, 2)
        back = {"Last-Event-ID": begun[-1][0]}
        hosts.network.down.update({"a", holder})
        answer = other.post(path, json={}, headers=back)
        assert answer.status_code == 503 and "cannot be reached; try" in answer.text
        hosts.network.down.remove(holder)
        assert begun + read_events(other, path, {}, back)
        hosts.network.down.clear()
        unknown = {"Last-Event-ID": "0" * 32}
        assert other.post(path, json={}, headers=unknown).status_code == 404, "all were asked"


def test_streams_of_a_host_that_is_about_to_end_go_on_elsewhere(hosts: Hosts) -> None:
    running = hosts.all["a"]
    copies = running.streams.copies

    async def leave() -> None:
        running.streams.leave()

    path, body = generation(100)
    with hosts.client("a") as first, hosts.client("b") as other:
        begun = read_events(first, path, body, ASK, 5)
        running.call(leave())
        eventually(lambda: not running.gate.open_inferences)
        rest = read_events(other, path, {}, {"Last-Event-ID": begun[-1][0]})
    running.streams.copies = copies
    ids = [int(id.partition(":")[2]) for id, _ in begun + rest]
    assert ids == list(range(len(ids))) and len(ids) > 20


def test_streams_go_on_without_other_hosts(hosts: Hosts) -> None:
    hosts.network.down.update({"b", "c"})
    with hosts.client("a") as client:
        whole = read_events(client, *REQUESTS["chat"], ASK)
        assert whole[-1][1] == "[DONE]"


def test_nothing_is_held_of_streams_that_nobody_may_come_back_to(hosts: Hosts) -> None:
    def num_held() -> int:
        return sum(hosts.copies(name).num_held for name in hosts.all)

    before, running = num_held(), hosts.all["a"]
    with hosts.client("a") as client:
        read_events(client, *REQUESTS["generate"], ASK)
    assert num_held() == before + 1
    running.call(running.streams.close())
    eventually(lambda: num_held() == before)


def test_a_stream_of_another_key_is_not_given(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one:sk-one\ntwo:sk-two\n")
    hosts = Hosts(tmp_path, AccessControl(AccessSettings(api_key_file=tmp_path / "keys")))
    one, two = ({"Authorization": f"Bearer sk-{name}"} for name in ("one", "two"))
    try:
        with hosts.client("a") as first, hosts.client("b") as other:
            begun = read_events(first, *REQUESTS["generate"], ASK | one, 3)
            back = {"Last-Event-ID": begun[-1][0]}
            assert other.post(GENERATE, json={}, headers=back | two).status_code == 404
            assert other.post(CHAT, json={}, headers=back | one).status_code == 404
            hosts.network.down.add("a")
            rest = read_events(other, GENERATE, {}, back | one)
            assert begun + rest == read_events(first, GENERATE, {}, {"Last-Event-ID": begun[0][0][:32]} | one)
    finally:
        hosts.stop()


def test_a_key_at_its_limit_gets_the_rest_of_its_stream_elsewhere(tmp_path: Path) -> None:
    """It is charged no second time, and the hosts have the same accounts here."""
    (tmp_path / "keys").write_text("one:sk-one tpm=5 rpm=3\n")
    hosts = Hosts(tmp_path, AccessControl(AccessSettings(api_key_file=tmp_path / "keys")), **ENGINE)
    (path, body), one = REQUESTS["choices"], {"Authorization": "Bearer sk-one"}
    try:
        with hosts.client("a") as first, hosts.client("b") as other:
            whole = read_events(first, path, body, ASK | one)
            assert other.post(path, json=body, headers=one).status_code == 429
            hosts.network.down.add("a")
            assert read_events(other, path, {}, {"Last-Event-ID": whole[2][0]} | one) == whole[3:]
    finally:
        hosts.stop()


def test_the_memory_of_requests_counts_and_large_ones_are_not_copied(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, body = REQUESTS["generate"]
    running = hosts.all["a"]
    kept = running.streams._kept
    before = sum(hosts.copies(name).num_held for name in hosts.all)
    with hosts.client("a") as client:
        read_events(client, path, body, ASK)
        (copied,) = kept.all(ResumableStream)
        assert kept.held_bytes == copied.journal.held_bytes + len(copied.head.request) > copied.journal.held_bytes
        monkeypatch.setattr(resumable_streams, "MAX_REQUEST_BYTES", 20)
        begun = read_events(client, path, body, ASK, 3)
        assert sum(hosts.copies(name).num_held for name in hosts.all) == before + 1
        assert len(begun + read_events(client, path, {}, {"Last-Event-ID": begun[-1][0]})) > len(begun)
        _, other = kept.all(ResumableStream)
        assert not other.head.request and other.recording is None
    running.call(running.streams.close())
    assert not kept.held_bytes


def record(key: str, epoch: int = 0, *deltas: bytes) -> StreamRecord:
    return StreamRecord(StreamHead(key=key, epoch=epoch, path="/p", owner="o"), tuple((0, one) for one in deltas))


def test_what_is_held_for_others() -> None:
    now_s = 0.0
    held = HeldRecords(max_bytes=10, clock_s=lambda: now_s)
    assert not held.add([_Begin(record("k", 0, b"a"))]).unknown
    assert held.add([_Step("k", 0, 1, ((0, b"b"),), 2), _Step("k", 0, 1, ((0, b"b"), (0, b"c")), 3)]) == held.add([])
    assert held.add([_Step("k", 0, 7, ((0, b"x"),), 8), _Step("z", 0, 0, (), 0)]).unknown == ("k", "z")
    assert held.take("k", "another", "/p", -1) is None is held.take("k", "o", "/q", -1)
    assert held.take("k", "o", "/p", 3) is None, "its client has an event that the record lacks"
    taken = held.take("k", "o", "/p", -1)
    assert taken is not None and taken.deltas == ((0, b"a"), (0, b"b"), (0, b"c"))
    assert held.add([_Step("k", 0, 3, ((0, b"d"),), 4), _Begin(record("k"))]).superseded == ("k",)
    assert held.add([_Begin(record("k", 1))]) == held.add([]) and len(held) == 1
    held.add([_End("k")])
    assert not len(held)
    held.add([_Begin(record("1", 0, b"123456")), _Begin(record("2", 0, b"123456"))])
    assert held.take("1", "o", "/p", -1) is None and len(held) == 1
    now_s = 1000.0
    held.add([])
    assert not len(held)


def test_a_record_can_be_taken_again_while_its_taker_may_have_ended() -> None:
    now_s = 0.0
    held = HeldRecords(clock_s=lambda: now_s)
    held.add([_Begin(record("k", 3, b"a"))])
    taken = [held.take("k", "o", "/p", -1) for _ in range(2)]
    assert [(one.head.epoch, one.deltas) for one in taken if one is not None] == [(3, ((0, b"a"),)), (4, ((0, b"a"),))]
    assert held.add([_Begin(record("k", 4))]).superseded == ("k",), "the first taker is older than the second"
    now_s = 31.0
    held.add([])
    assert held.take("k", "o", "/p", -1) is None


def test_an_old_record_is_not_taken() -> None:
    now_s = 0.0
    held = HeldRecords(clock_s=lambda: now_s)
    held.add([_Begin(record("k", 0, b"a"))])
    now_s = 601.0
    assert held.take("k", "o", "/p", -1) is None and not len(held)


async def test_old_records_are_forgotten_without_further_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_copies, "_RETENTION_S", 0.1)
    monkeypatch.setattr(stream_copies, "_FORGET_INTERVAL_S", 0.01)
    copies = StreamCopies(NoPeers(), {}, ResumableStreams().hand_over)
    await copies._answer("other", _encode(_Batch((_Begin(record("k", 0, b"prompt")),))))
    assert copies.num_held == 1
    await eventually_async(lambda: copies.num_held == 0)
    assert copies._forgetting is None


class NoPeers:
    """Peers of a host that is alone."""

    def live(self) -> Sequence[str]:
        return ()

    def are_all_live(self) -> bool:
        return True

    def on_change(self, callback: Callable[[], None]) -> None: ...

    async def call(self, peer: str, topic: str, payload: bytes) -> bytes:
        raise unavailable("nobody")

    def on_call(self, topic: str, handler: Callable[[str, bytes], Awaitable[bytes]]) -> None: ...


def test_an_error_in_one_stream_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        copies = StreamCopies(NoPeers(), {}, ResumableStreams().hand_over)
        shown = asyncio.Event()
        copies.add("a", (), 0, lambda: [].pop())
        copies.add("b", (), 0, shown.set)
        await asyncio.wait_for(shown.wait(), 10)

    asyncio.run(run())
    assert [one.getMessage().partition(":")[0] for one in caplog.records] == ["unexpected error in a copied stream"]


class ForgetfulPeer(NoPeers):
    """A host that has none of the records to which something is added."""

    def __init__(self) -> None:
        self.message_bytes: list[int] = []

    def live(self) -> Sequence[str]:
        return ("b",)

    async def call(self, peer: str, topic: str, payload: bytes) -> bytes:
        self.message_bytes.append(len(payload))
        call: Any = _decode_call(payload)
        return _encode(_Refused(unknown=tuple(item.key for item in call.items if isinstance(item, _Step))))


async def test_records_that_are_sent_again_are_sent_in_several_messages() -> None:
    peer = ForgetfulPeer()
    copies = StreamCopies(peer, {}, ResumableStreams().hand_over)
    for number in range(6):
        await copies.begin(StreamRecord(StreamHead(key=str(number), path="/p", request=bytes(400_000))), lambda: None)
    peer.message_bytes.clear()
    shown = asyncio.Event()
    for number in range(6):
        copies.add(str(number), ((0, b"x"),), 1, shown.set)
    await asyncio.wait_for(shown.wait(), 10)
    assert sum(peer.message_bytes) > 6 * 400_000 and max(peer.message_bytes) < 2_000_000
