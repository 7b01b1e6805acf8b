"""The response cache: what is kept, what is a hit, what it counts (golden 44)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbackend.core.caching import (
    ENTRY_OVERHEAD_BYTES,
    CacheKeys,
    LocalCache,
    RedisCache,
    ThreadedCache,
    pack,
    unpack,
)
from llmbackend.core.config.model_config import parse_text
from llmbackend.core.config.model_config_rules import validate_response_cache
from llmbackend.core.errors import ErrorCode, TritonError, internal
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import NO_TENANT, InferenceResponse, Tenant
from llmbackend.core.tensors import NUMPY_DTYPE, Tensor
from llmbackend.frontends.operations.probes import render
from tests.helpers.core_host import STAGE, Client, Repository, send, serving, version_of, x
from tests.helpers.redis_server import RedisServer, started_redis
from tests.helpers.waiting import eventually

# Answers with X and the number of its execution, so that a test sees which one answered. Refuses what begins with -1.
COUNTING_BACKEND = """
import time
import numpy as np
from tests.helpers.core_host import STAGE
from llmbackend.core.backend_api import ResponseFlag, Tensor, internal

def TRITONBACKEND_ModelInstanceExecute(instance, requests):
    start = time.monotonic_ns()
    for request in requests:
        STAGE.note(request.id)
        if request.id.startswith("gated"):
            STAGE.wait(request.id)
        data = request.inputs["X"].data
        response = request.new_response()
        if "Y" in request.requested_outputs:
            response.add_output(Tensor("Y", "FP32", data.shape, data))
        if "N" in request.requested_outputs:
            response.add_output(Tensor.of("N", np.array([len(STAGE.events)], np.int32)))
        response.set_parameter("greeting", "hello")
        response.send(ResponseFlag.FINAL, internal("no") if data.flat[0] == -1 else None)
        end = time.monotonic_ns()
        instance.report_statistics(request, data.flat[0] != -1, start, start, end, end)
        request.release()
    instance.report_batch_statistics(len(requests), start, start, end, end)
"""
IO = """
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "N" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
CACHED = "response_cache { enable: true }"
LOCAL = {"cache_config": {"local": {"size": "1048576"}}}


@pytest.fixture
def cached(repository: Repository) -> Repository:
    repository.backend("counting", COUNTING_BACKEND)
    repository.model("m", "counting", CACHED, io=IO)
    return repository


def answer(server: InferenceServer, *values: float, model: str = "m", **fields: Any) -> InferenceResponse:
    (response,) = send(server, model, x(*values), **fields).responses()
    return response


def test_an_equal_request_is_answered_without_an_execution(cached: Repository) -> None:
    with serving(cached, "m", **LOCAL) as server:
        first, second = answer(server, 1, 2, id="a"), answer(server, 1, 2, id="b")
        assert STAGE.events == ["a"]
        assert (first.request_id, second.request_id) == ("a", "b")
        assert [tensor.name for tensor in second.outputs] == ["Y", "N"]
        for ours, theirs in zip(second.outputs, first.outputs, strict=True):
            assert ours.datatype == theirs.datatype and np.array_equal(ours.data, theirs.data)
        assert second.parameters == first.parameters == {"greeting": "hello"}


def test_what_was_answered_to_one_tenant_is_no_answer_to_another(cached: Repository) -> None:
    with serving(cached, "m", **LOCAL) as server:
        alice, bob = Tenant("alice", cache_name="alice"), Tenant("bob", cache_name="bob")
        for tenant in (alice, bob, NO_TENANT, alice, bob, NO_TENANT):
            answer(server, 1, 2, id=tenant.key_name or "nobody", tenant=tenant)
        assert STAGE.events == ["alice", "bob", "nobody"]
        answer(server, 1, 2, id="sharing", tenant=Tenant("carol"))
        assert STAGE.events == ["alice", "bob", "nobody"], "a tenant that shares is answered with what is shared"


def test_golden_44_hits_and_misses_are_counted(cached: Repository) -> None:
    with serving(cached, "m", **LOCAL) as server:
        for _ in range(2):
            answer(server, 1, 2)
        eventually(lambda: server.model_statistics("m")[0].execution_count == 1)
        (statistics,) = server.model_statistics("m")
        counts = statistics.inference_stats
        assert (statistics.inference_count, statistics.execution_count) == (1, 1)
        assert (counts.success.count, counts.queue.count, counts.compute_infer.count) == (2, 2, 1)
        assert (counts.cache_hit.count, counts.cache_miss.count) == (1, 1)
        assert counts.cache_hit.ns > 0 and counts.cache_miss.ns > 0
        lines = render(server.metrics_registry).decode().splitlines()
        labels = '{model="m",version="1"}'
        for line in (
            f"nv_inference_request_success{labels} 2",
            f"nv_cache_num_hits_per_model{labels} 1",
            f"nv_cache_num_misses_per_model{labels} 1",
            "nv_cache_num_entries 1",
            "nv_cache_num_lookups 2",
            "nv_cache_num_hits 1",
            "nv_cache_num_misses 1",
            "nv_cache_num_evictions 0",
        ):
            assert line in lines
        families = [line.split()[2] for line in lines if line.startswith("# TYPE nv_cache")]
        assert families == [
            "nv_cache_num_hits_per_model",
            "nv_cache_hit_duration_per_model",
            "nv_cache_num_misses_per_model",
            "nv_cache_miss_duration_per_model",
            "nv_cache_util",
            "nv_cache_num_entries",
            "nv_cache_num_hits",
            "nv_cache_num_misses",
            "nv_cache_num_lookups",
            "nv_cache_num_evictions",
            "nv_cache_lookup_duration",
            "nv_cache_insertion_duration",
        ]


def test_other_data_another_shape_other_outputs_another_model_are_no_hits(cached: Repository) -> None:
    cached.model("n", "counting", CACHED, io=IO)
    with serving(cached, "m", "n", **LOCAL) as server:
        answer(server, 1, 2, id="first")
        answer(server, 1, 3, id="data")
        answer(server, 1, 2, 0, id="shape")
        answer(server, 1, 2, model="n", id="model")
        only_y = answer(server, 1, 2, id="outputs", requested_outputs=("Y",))
        assert STAGE.events == ["first", "data", "shape", "model", "outputs"]
        assert [tensor.name for tensor in only_y.outputs] == ["Y"]


def test_parameters_and_the_id_do_not_matter(cached: Repository) -> None:
    with serving(cached, "m", **LOCAL) as server:
        answer(server, 1, 2, id="a", parameters={"k": 1}, priority=1)
        answer(server, 1, 2, id="b", parameters={"k": 2})
        assert STAGE.events == ["a"]


def test_errors_are_not_kept(cached: Repository) -> None:
    with serving(cached, "m", **LOCAL) as server:
        for name in ("a", "b"):
            error = answer(server, -1, id=name).error
            assert error is not None and error.message == "no"
        assert STAGE.events == ["a", "b"]
        assert server.model_statistics("m")[0].inference_stats.cache_miss.count == 0


def test_a_model_without_response_cache_is_not_cached(cached: Repository) -> None:
    cached.model("plain", "counting", io=IO)
    with serving(cached, "plain", **LOCAL) as server:
        for name in ("a", "b"):
            answer(server, 1, model="plain", id=name)
        assert STAGE.events == ["a", "b"]
        assert b"per_model" not in render(server.metrics_registry)


def test_without_a_cache_in_the_server_the_model_serves_and_the_log_says_so(
    cached: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(cached, "m") as server:
        for name in ("a", "b"):
            answer(server, 1, id=name)
        assert STAGE.events == ["a", "b"]
    assert "model 'm' has 'response_cache', but the server has none (--cache-config)" in caplog.text


def test_a_reloaded_model_answers_itself(cached: Repository) -> None:
    with serving(cached, "m", **LOCAL) as server:
        answer(server, 1, id="a")
        server.load_model(
            "m",
            {
                "config": '{"backend": "counting", "response_cache": {"enable": true}, "input": [{"name":'
                '"X", "data_type": "TYPE_FP32", "dims": [-1]}], "output": [{"name": "Y", "data_type": '
                '"TYPE_FP32", "dims": [-1]}]}'
            },
        )
        answer(server, 1, id="b")
        assert STAGE.events == ["a", "b"]


def test_two_equal_requests_at_once_are_both_executed_and_one_is_kept(cached: Repository) -> None:
    cached.model("m", "counting", CACHED + "\ninstance_group { count: 2 }", io=IO)
    with serving(cached, "m", **LOCAL) as server:
        clients = [send(server, "m", x(1), id=name) for name in ("gated 1", "gated 2")]
        eventually(lambda: len(STAGE.events) == 2)
        for name in ("gated 1", "gated 2"):
            STAGE.open(name)
        for client in clients:
            assert client.responses()[0].error is None
        counts = server.model_statistics("m")[0].inference_stats
        assert (counts.cache_hit.count, counts.cache_miss.count) == (0, 1)


def test_an_ensemble_is_cached_as_a_whole(cached: Repository) -> None:
    cached.model("part", "counting", io=IO)
    step = (
        '{ model_name: "part" model_version: -1 input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" } }'
    )
    directory = cached.models / "whole"
    (directory / "1").mkdir(parents=True)
    io = IO.replace(', { name: "N" data_type: TYPE_INT32 dims: [ 1 ] }', "")
    (directory / "config.pbtxt").write_text(
        f'platform: "ensemble"\n{io}\n{CACHED}\nensemble_scheduling {{ step [ {step} ] }}\n'
    )
    with serving(cached, "whole", **LOCAL) as server:
        for name in ("a", "b"):
            assert answer(server, 1, model="whole", id=name).error is None
        assert STAGE.events == ["a"]
        assert server.model_statistics("whole")[0].inference_stats.cache_hit.count == 1


def test_an_answer_from_the_cache_waits_for_earlier_requests_where_order_is_preserved(cached: Repository) -> None:
    config = CACHED + "\nmax_batch_size: 1\ndynamic_batching { preserve_ordering: true }"
    cached.model("m", "counting", config, io=IO)
    row = Tensor.of("X", np.array([[1]], np.float32)), Tensor.of("X", np.array([[2]], np.float32))
    with serving(cached, "m", **LOCAL) as server:
        send(server, "m", row[0]).responses()
        slow, hit = send(server, "m", row[1], id="gated"), send(server, "m", row[0], id="hit")
        eventually(lambda: "gated" in STAGE.events)
        assert hit.events.empty()
        STAGE.open("gated")
        assert hit.responses()[0].error is None and "hit" not in STAGE.events
        assert not slow.events.empty()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ("model_transaction_policy { decoupled: true }", "'decoupled' transaction policy"),
        ("sequence_batching {}", "sequence batching scheduler"),
    ],
)
def test_models_that_can_not_be_cached_are_refused_in_tritons_words(fields: str, reason: str) -> None:
    config = parse_text(f'name: "m" backend: "b" {CACHED} {fields}', "test")
    with pytest.raises(TritonError) as caught:
        validate_response_cache(config)
    assert caught.value.status == (
        f"Invalid argument: Response Cache does not currently support model m with {reason}. Please disable the "
        f"response cache."
    )


@pytest.mark.parametrize(
    ("config", "status"),
    [
        (
            {"local": {}},
            "Invalid argument: Failed to initialize LocalCache: config didn't contain a valid 'size' field.",
        ),
        (
            {"local": {"size": "many"}},
            "Invalid argument: Failed to initialize LocalCache: 'size' must be a positive number of bytes, got 'many'",
        ),
        ({"disk": {"size": "1"}}, "Invalid argument: unable to find cache 'disk'. This server has 'local' and 'redis'"),
        (
            {"local": {"size": "1"}, "redis": {}},
            "Invalid argument: found multiple cache configurations, but only a single cache is currently supported",
        ),
        (
            {"redis": {"host": "127.0.0.1"}},
            "Invalid argument: Failed to initialize RedisCache, didn't specify address. Must at a minimum specify "
            "'host' and 'port' in the configuration - e.g. tritonserver --cache-config redis,host=redis --cache-config "
            "redis,port=6379 --model-repository=/models ...",
        ),
    ],
)
def test_a_cache_that_can_not_be_made_stops_the_server(
    cached: Repository, config: dict[str, dict[str, str]], status: str
) -> None:
    server = InferenceServer(cached.options(cache_config=config))
    with pytest.raises(TritonError) as caught:
        server.start()
    assert caught.value.status == status
    assert not server.is_live()


# --- the local cache ------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 300), st.booleans()), max_size=60))
def test_the_local_cache_keeps_its_size_and_the_most_recently_used(steps: list[tuple[int, int, bool]]) -> None:
    size_bytes = 3 * (ENTRY_OVERHEAD_BYTES + 200)
    cache = LocalCache(size_bytes)
    model: dict[bytes, bytes] = {}  # least recently used first
    for number, length, is_lookup in steps:
        key, entry = bytes([number]), bytes([number]) * length
        if is_lookup:
            assert cache.lookup(key) == model.get(key)
            if key in model:
                model[key] = model.pop(key)
            continue
        try:
            cache.insert(key, entry)
        except TritonError as error:
            assert error.code is (ErrorCode.ALREADY_EXISTS if key in model else ErrorCode.INTERNAL)
            assert key in model or length + ENTRY_OVERHEAD_BYTES > size_bytes
            continue
        model[key] = entry
        while sum(len(kept) + ENTRY_OVERHEAD_BYTES for kept in model.values()) > size_bytes:
            del model[next(iter(model))]
        gauges = cache.gauges()
        assert gauges["nv_cache_num_entries"] == len(model) and gauges["nv_cache_util"] <= 1
    assert list(cache._entries.items()) == list(model.items())


def test_a_response_larger_than_the_cache_is_answered_and_not_kept(
    cached: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(cached, "m", cache_config={"local": {"size": "1000"}}) as server:
        for name in ("a", "b"):
            assert answer(server, *range(1, 400), id=name).error is None
        assert STAGE.events == ["a", "b"]
        assert server.model_statistics("m")[0].inference_stats.cache_miss.count == 2  # as in Triton
    assert "is greater than total cache size: 1000" in caplog.text


@given(
    datatype=st.sampled_from(sorted(NUMPY_DTYPE)),
    shape=st.lists(st.integers(0, 3), max_size=3),
    parameters=st.dictionaries(
        st.text(max_size=5), st.one_of(st.integers(-(2**63), 2**63 - 1), st.text(), st.booleans())
    ),
)
def test_an_entry_gives_back_every_tensor_and_parameter(
    datatype: str, shape: list[int], parameters: dict[str, Any]
) -> None:
    data = np.zeros(shape, NUMPY_DTYPE[datatype])
    if datatype == "BYTES":
        data[...] = "ä".encode()
    outputs, found = unpack(pack(InferenceResponse("m", 1, "", (Tensor("T", datatype, data.shape, data),), parameters)))
    (tensor,) = outputs
    assert (tensor.name, tensor.datatype, tensor.shape) == ("T", datatype, data.shape)
    assert np.array_equal(tensor.data, data) and tensor.data.dtype == data.dtype and found == parameters


class FakeRequest:
    """What a key is made of."""

    tenant = NO_TENANT

    def __init__(self, inputs: dict[str, Tensor], requested_outputs: tuple[str, ...]) -> None:
        self.inputs = inputs
        self.requested_outputs = requested_outputs


@pytest.mark.parametrize("datatype", sorted(NUMPY_DTYPE))
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_tensors_of_every_datatype_have_a_key(datatype: str, shape: tuple[int, ...]) -> None:
    data = np.zeros(shape, NUMPY_DTYPE[datatype])
    if datatype == "BYTES":
        data[...] = b"a"
    request = FakeRequest({"X": Tensor("X", datatype, data.shape, data)}, ())
    assert len(CacheKeys("m", 1, b"").of(request)) == 16  # type: ignore[arg-type]


def test_no_two_different_requests_have_one_key() -> None:
    def key(
        name: str = "X", values: list[float] | None = None, shape: tuple[int, ...] = (1, 4), **others: Any
    ) -> bytes:
        data = np.array(values or [1, 2, 3, 4], np.float32).reshape(shape)
        request = FakeRequest({name: Tensor.of(name, data)}, others.get("outputs", ("Y",)))
        keys = CacheKeys(others.get("model", "m"), others.get("version", 1), others.get("load", b""))
        return keys.of(request)  # type: ignore[arg-type]

    as_int = FakeRequest({"X": Tensor.of("X", np.array([[1, 2, 3, 4]], np.float32).view(np.int32))}, ("Y",))
    keys = [
        key(),
        key("Z"),
        key(values=[1, 2, 3, 5]),
        key(shape=(4, 1)),
        key(shape=(2, 2)),
        key(outputs=("Y", "Z")),
        key(outputs=("YZ",)),
        key(model="n"),
        key(model="m1", version=1),
        key(model="m", version=11),
        key(load=b"2"),
        CacheKeys("m", 1, b"").of(as_int),  # type: ignore[arg-type]
    ]
    assert len(set(keys)) == len(keys) and key() == keys[0]


# --- redis ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    with started_redis(tmp_path) as server:
        yield server


@contextmanager
def two_servers(cached: Repository, settings: Any) -> Iterator[tuple[InferenceServer, InferenceServer]]:
    with serving(cached, "m", **settings) as first, serving(cached, "m", **settings) as second:
        yield first, second


def test_redis_an_answer_of_one_server_is_a_hit_in_another(cached: Repository, redis_server: RedisServer) -> None:
    with two_servers(cached, redis_server.settings) as (first, second):
        ours = answer(first, 1, 2, id="a")
        eventually(lambda: first.model_statistics("m")[0].inference_stats.cache_miss.count == 1)
        theirs = answer(second, 1, 2, id="b")
        assert STAGE.events == ["a"]
        assert np.array_equal(ours.outputs[0].data, theirs.outputs[0].data)
        assert second.model_statistics("m")[0].inference_stats.cache_hit.count == 1


def test_redis_that_goes_away_costs_hits_and_no_request(
    cached: Repository, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(cached, "m", **redis_server.settings) as server:
        answer(server, 1, id="a")
        eventually(lambda: server.model_statistics("m")[0].inference_stats.cache_miss.count == 1)
        redis_server.stop()
        assert answer(server, 1, id="b").error is None
        eventually(lambda: "Failed to insert key" in caplog.text)
        redis_server.start()
        answer(server, 1, id="c")
        eventually(lambda: server.model_statistics("m")[0].inference_stats.cache_miss.count == 3)
        answer(server, 1, id="d")
        assert STAGE.events == ["a", "b", "c"]
    assert "Failed to retrieve key" in caplog.text


def test_redis_that_is_not_there_stops_the_server_at_start(cached: Repository) -> None:
    pytest.importorskip("redis")
    server = InferenceServer(cached.options(cache_config={"redis": {"host": "127.0.0.1", "port": "1"}}))
    with pytest.raises(TritonError, match="Failed to initialize RedisCache: ") as caught:
        server.start()
    assert caught.value.code is ErrorCode.INTERNAL and not server.is_live()


# --- a cache on the other side of a network ----------------------------------------------------------------------


class SlowCache:
    """A cache on threads of its own that answers when the test lets it."""

    is_shared = takes_time = True

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entries: dict[bytes, bytes] = {}
        self.fails = False

    def run_lookup(self, task: Any, skip: Any = None) -> None:
        threading.Thread(target=task, daemon=True).start()

    run_insert = run_lookup

    def lookup(self, key: bytes) -> bytes | None:
        assert self.gate.wait(20)
        if self.fails:
            raise RuntimeError("broken")
        return self.entries.get(key)

    def insert(self, key: bytes, entry: bytes) -> None:
        if self.fails:
            raise internal("broken")
        self.entries[key] = entry

    def close(self) -> None: ...


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowCache:
    cache = SlowCache()
    monkeypatch.setattr("llmbackend.core.caching.create_cache", lambda *_: cache)
    return cache


def test_a_remote_cache_without_its_threads_is_refused() -> None:
    store: Any = SimpleNamespace(is_shared=True, lookup=None, insert=None)
    start = threading.Thread.start

    def start_one(thread: threading.Thread) -> None:
        if thread.name.endswith("_1"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(threading.Thread, "start", start_one)
        with pytest.raises(TritonError, match="cannot start its 4 threads"):
            ThreadedCache(store, 4, 0.1)


def test_a_remote_cache_keeps_no_caller_waiting(cached: Repository, slow: SlowCache) -> None:
    with serving(cached, "m") as server:
        start_s = time.monotonic()
        client = send(server, "m", x(1), id="a")  # the caller is the event loop of every frontend
        assert time.monotonic() - start_s < 5 and client.events.empty()
        slow.gate.set()
        assert client.responses()[0].error is None
        eventually(lambda: slow.entries)
        answer(server, 1, id="b")
        assert STAGE.events == ["a"]


def test_a_request_that_waits_for_a_remote_cache_can_be_cancelled(cached: Repository, slow: SlowCache) -> None:
    with serving(cached, "m") as server:
        client = send(server, "m", x(1), id="a")
        client.cancel()
        slow.gate.set()
        assert client.error().code is ErrorCode.CANCELLED
        assert STAGE.events == []


def test_a_refusal_behind_a_remote_cache_reaches_its_client(cached: Repository, slow: SlowCache) -> None:
    policy = "dynamic_batching { default_queue_policy { max_queue_size: 1 } }\nmax_batch_size: 1\n"
    cached.model("m", "counting", CACHED + "\n" + policy, io=IO)
    slow.gate.set()

    def row(value: float, name: str) -> Client:
        return send(server, "m", Tensor.of("X", np.array([[value]], np.float32)), id=name)

    with serving(cached, "m") as server:
        first = row(1, "gated")
        eventually(lambda: STAGE.events)
        second = row(2, "b")
        eventually(lambda: version_of(server, "m").leaked_resources()["requests in its queue"] == 1)
        assert row(3, "c").error().status == "Unavailable: [request id: c] Exceeds maximum queue size"
        STAGE.open("gated")
        assert [client.responses()[0].error for client in (first, second)] == [None, None]


def test_a_cache_that_breaks_costs_hits_and_no_request(
    cached: Repository, slow: SlowCache, caplog: pytest.LogCaptureFixture
) -> None:
    slow.gate.set()
    slow.fails = True
    with serving(cached, "m") as server:
        for name in ("a", "b"):
            assert answer(server, 1, id=name).error is None
        assert STAGE.events == ["a", "b"]
        eventually(lambda: server.model_statistics("m")[0].inference_stats.cache_miss.count == 2)
    assert "Failed to look up" in caplog.text and "Failed to insert" in caplog.text


class HangingRedis:
    """A Redis client whose first `get` returns when the test lets it."""

    connection_pool = SimpleNamespace(disconnect=lambda: None)

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.num_lookups = 0

    def get(self, key: bytes) -> bytes | None:
        self.num_lookups += 1
        assert self.gate.wait(20)
        return None

    def set(self, key: bytes, entry: bytes, nx: bool) -> bool:
        return True


def test_redis_that_hangs_delays_a_request_by_one_lookup_and_not_by_all_before(
    cached: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, clock = HangingRedis(), Clock()
    cache = ThreadedCache(RedisCache(client), 1, wait_timeout_s=0.1, clock=clock)
    monkeypatch.setattr("llmbackend.core.caching.create_cache", lambda *_: cache)
    with serving(cached, "m") as server:
        clients = [send(server, "m", x(1), id="a")]
        eventually(lambda: client.num_lookups)
        clients += [send(server, "m", x(2), id="b"), send(server, "m", x(3), id="c")]
        clock.now_s = 5.0
        client.gate.set()
        assert [each.responses()[0].error for each in clients] == [None, None, None]
        assert STAGE.events == ["a", "b", "c"] and client.num_lookups == 1
        clock.now_s = 6.0
        answer(server, 4, id="d")
        assert client.num_lookups == 2


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s
