"""vLLM's KV events: what a subscriber gets over ZeroMQ, what it can ask for again, and where they may be sent."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from llmbackend.engine.config import EngineConfig, KVEventsConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.memory.kv_events import END_OF_REPLAY, _Publisher
from llmbackend.engine.memory.prefix_cache import prefix_hashes
from llmbackend.engine.messages import InferRequest
from tests.helpers.mock_engine import Outcomes, make_core, make_request

BLOCK = 4
TIMEOUT_MS = 30_000


def free_endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@contextmanager
def connected(kind: int, endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(kind) as one:
        one.linger, one.rcvtimeo = 0, TIMEOUT_MS
        one.connect(endpoint)
        yield one


@contextmanager
def publishing_core(**events: Any) -> Iterator[EngineCore]:
    core = make_core(
        block_size=BLOCK,
        num_kv_blocks=8,
        max_model_len=32,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, **events),
    )
    try:
        yield core
    finally:
        core.close()


def run(core: EngineCore, *requests: InferRequest) -> list[tuple[int, ...]]:
    """The whole text of each request."""
    outcomes = Outcomes()
    for request in requests:
        core.add(request)
    while core.has_work:
        outcomes.add(core.step())
    return [(*request.prompt_token_ids, *outcomes[request.request_id].token_ids) for request in requests]


def replayed(endpoint: str, since: int = 0) -> list[tuple[int, Any]]:
    """As vLLM's example subscriber asks for what it missed."""
    with connected(zmq.DEALER, endpoint) as asking:
        asking.send_multipart((b"", since.to_bytes(8, "big")))
        batches: list[tuple[int, Any]] = []
        while True:
            empty, number, payload = asking.recv_multipart()
            assert empty == b""
            if number == b"\xff" * 8:
                return batches
            batches.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)))


class Router:
    """What a consumer of the events believes: hash → tokens of the block, and the hash before it."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}

    def take(self, events: list[list[Any]]) -> None:
        for tag, *fields in events:
            if tag == "AllBlocksCleared":
                self.blocks.clear()
            elif tag == "BlockRemoved":
                for block in fields[0]:
                    del self.blocks[block]
            else:
                self._store(*fields)

    def _store(self, hashes: list[int], parent: int | None, tokens: list[int], size: int, *others: Any) -> None:
        assert (size, len(tokens)) == (BLOCK, BLOCK * len(hashes))
        assert others[:3] == (None, "GPU", None)
        for index, block in enumerate(hashes):
            self.blocks[block] = parent, tuple(tokens[index * size : (index + 1) * size])
            parent = block


def test_a_subscriber_is_told_of_each_block_with_its_tokens() -> None:
    endpoint, replay_endpoint = free_endpoint(), free_endpoint()
    with (
        publishing_core(endpoint=endpoint, replay_endpoint=replay_endpoint, topic="kv@here@mock") as core,
        connected(zmq.SUB, endpoint) as subscriber,
    ):
        subscriber.subscribe("kv@")
        replayed(replay_endpoint)  # the thread runs; the subscription itself has no answer
        router, numbers, texts = Router(), list[int](), list[tuple[int, ...]]()
        first = run(core, make_request("first", range(8)))[0]
        while not texts or not subscriber.poll(100):  # a text for each try, until the subscription is there
            texts += run(core, make_request(f"r{len(texts)}", (len(texts), *range(50, 62))))
        while subscriber.poll(1000):
            topic, number, payload = subscriber.recv_multipart()
            time_s, events, rank = msgspec.msgpack.decode(payload)
            assert (topic, rank) == (b"kv@here@mock", 0) and time_s > 1e9
            numbers.append(int.from_bytes(number, "big"))
            if not router.blocks and numbers == [numbers[0]]:
                for _, (_, missed, _) in replayed(replay_endpoint)[: numbers[0]]:
                    router.take(missed)
            router.take(events)
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        core.prefixes.publish(True)
        changes = core.step().blocks
        assert changes is not None
        assert set(router.blocks) == set(memoryview(changes.stored).cast("Q"))
        for text in (first, *texts):
            hashes = prefix_hashes(("", "", ""), (*text, 0), BLOCK)
            for index, (block, before) in enumerate(zip(hashes, [None, *hashes], strict=False)):
                if block in router.blocks:
                    assert router.blocks[block] == (before, text[index * BLOCK : (index + 1) * BLOCK])


def test_what_was_missed_is_sent_again_and_the_first_event_clears_all() -> None:
    replay_endpoint = free_endpoint()
    with publishing_core(endpoint=free_endpoint(), replay_endpoint=replay_endpoint, buffer_steps=3) as core:
        run(core, make_request("a", range(8), max_tokens=1))
        assert [event[0] for event in replayed(replay_endpoint)[0][1][1]] == ["AllBlocksCleared", "BlockStored"]
        run(core, *(make_request(f"r{i}", range(i, i + 8), max_tokens=16, ignore_eos=True) for i in range(1, 3)))
        kept = replayed(replay_endpoint)
        assert len(kept) == 3 and kept[0][0] > 0
        assert replayed(replay_endpoint, kept[1][0]) == kept[1:]


def test_a_slow_client_gets_every_batch_of_a_replay_and_its_end() -> None:
    """More than the sockets' buffers and a queue of ZeroMQ's default length hold."""
    count, payload, replay_endpoint = 3000, bytes(10_000), free_endpoint()
    config = KVEventsConfig(endpoint=free_endpoint(), replay_endpoint=replay_endpoint, buffer_steps=count)
    with zmq.Context() as context, connected(zmq.DEALER, replay_endpoint) as asking:
        asking.rcvhwm = 1  # for connections from now on
        asking.disconnect(replay_endpoint)
        publisher = _Publisher(context, config)
        try:
            for _ in range(count):
                publisher._publish(payload)
            asking.connect(replay_endpoint)
            asking.send_multipart((b"", bytes(8)))
            assert publisher._replays is not None
            publisher._replay(publisher._replays, publisher._replays.recv_multipart())
            numbers = [asking.recv_multipart()[1] for _ in range(count + 1)]
        finally:
            context.destroy(linger=0)
        assert [int.from_bytes(number, "big") for number in numbers[:-1]] == [*range(count)]
        assert numbers[-1] == END_OF_REPLAY


def test_salts_are_told_as_extra_keys_of_the_first_block() -> None:
    replay_endpoint = free_endpoint()
    with publishing_core(endpoint=free_endpoint(), replay_endpoint=replay_endpoint) as core:
        request = make_request("a", range(8), max_tokens=1)
        run(core, msgspec.structs.replace(request, tenant="t", cache_salt="s"))
        stored = replayed(replay_endpoint)[0][1][1][1]
        assert stored[-1] == [["t", "s"], None] and len(stored[1]) == 2


def test_an_adapter_is_told_by_its_served_name_and_its_load_as_a_key() -> None:
    replay_endpoint = free_endpoint()
    with publishing_core(endpoint=free_endpoint(), replay_endpoint=replay_endpoint) as core:
        sql = msgspec.structs.replace(make_request("sql", range(8), max_tokens=1), lora_name="sql#1")
        run(core, msgspec.structs.replace(sql, served_lora_name="sql"))
        run(core, make_request("none", range(8), max_tokens=1))
        batches = replayed(replay_endpoint)
        [served, plain] = [event for _, (_, events, _) in batches for event in events if event[0] == "BlockStored"]
        assert (served[7], served[8]) == ("sql", [["sql#1"], None])
        assert (plain[7], plain[8:]) == (None, [None])


def test_an_endpoint_in_use_is_named() -> None:
    endpoint = free_endpoint()
    text = f"kv_events_config': {endpoint} cannot be bound: Address already in use.*: unload it first"
    with (
        socket.create_server(("127.0.0.1", int(endpoint.rpartition(":")[2]))),
        pytest.raises(ValueError, match=text),
    ):
        make_core(kv_events_config=KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint))


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://10.0.0.7:5557", "tcp://[::]:5557", "tcp://127.0.0.1", "", "ipc://x",
        "tcp://127.0.0.1.example.org:5557", "tcp://127.0.0.1:5557@10.0.0.7:1", "tcp://127.0.0.1:99999", "tcp://[::1",
        "tcp://127.0.0.1:5557/x", "tcp://127.0.0.1:5557;tcp://10.0.0.7:1",
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["endpoint", "replay_endpoint"])
def test_other_machines_cannot_be_told(name: str, endpoint: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is '.*', expected tcp:// with a loopback address and a port"):
        msgspec.convert({name: endpoint}, KVEventsConfig)


def test_each_instance_has_ports_of_its_own() -> None:
    events = KVEventsConfig(
        enable_kv_cache_events=True, endpoint="tcp://localhost:6000", replay_endpoint="tcp://[::1]:7000"
    )
    config = EngineConfig(model="mock", kv_events_config=events)
    own = config.of_instance(2).kv_events_config
    assert own is not None
    assert (own.own_endpoint, own.own_replay_endpoint) == ("tcp://127.0.0.1:6002", "tcp://[::1]:7002")
    assert config.of_instance(0) == config
    with pytest.raises(ValueError, match=r"65535', expected a port from 1 to 65534"):
        KVEventsConfig(endpoint="tcp://127.0.0.1:65535", data_parallel_rank=1)


def test_events_need_a_prefix_cache() -> None:
    with pytest.raises(ValueError, match="'kv_events_config' is set, expected 'enable_prefix_caching' to be true"):
        EngineConfig(
            model="mock", enable_prefix_caching=False, kv_events_config=KVEventsConfig(enable_kv_cache_events=True)
        )
