"""Engines that several hosts share, with real processes on loopback: tokens, losses of every end, refusals."""

from __future__ import annotations

import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

import llmbackend
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.errors import EngineDeadError
from llmbackend.engine.messages import EngineStarted, EngineStats, InferRequest, StepResult
from llmbackend.engine.process.served.locating import (
    EngineAddress,
    EngineUsers,
    remote_engines,
    stop_loads,
    use_locator,
)
from llmbackend.engine.process.served.remote import RemoteTransport
from llmbackend.engine.process.served.remote_messages import STARTED, WELCOME, Head, Welcome, boot_id
from llmbackend.engine.process.served.served_engine import Keeper, KeptTransport, listen
from llmbackend.engine.process.served.served_order import ServedEngineNews, ServedEngineOrder
from llmbackend.links.secrets import ClusterSecrets
from llmbackend.links.sockets import new_socket
from llmbackend.testing.mock_model import MockRunner
from llmbackend.waiting.wakeup import Wakeup
from tests.helpers.manager_owner import Owner
from tests.helpers.mock_engine import Outcome, expect_oracle, make_request, random_requests
from tests.helpers.processes import is_alive
from tests.helpers.served_engines import FixedLocator, Relay, ServedEngine
from tests.helpers.waiting import eventually, wait_for_self_check

DEMO_MODEL = str(Path(__file__).parents[2] / "model_repository/demo/1")
WAIT_S = 60.0
MOCK: dict[str, Any] = {"mock_step_ms": 5.0, "max_num_seqs": 8}
MakeOwner = Callable[..., Owner]
ServeEngine = Callable[..., ServedEngine]


@pytest.fixture(scope="module")
def secrets_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("secrets")
    ClusterSecrets.create(folder)
    return folder


@pytest.fixture
def secrets(secrets_folder: Path) -> ClusterSecrets:
    return ClusterSecrets.load(secrets_folder)


@pytest.fixture
def serve(secrets_folder: Path) -> Iterator[ServeEngine]:
    made: list[ServedEngine] = []

    def make(config: EngineConfig | None = None, **options: Any) -> ServedEngine:
        engine = ServedEngine(config or EngineConfig(model="mock", **MOCK), secrets_folder, **options)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def engine(secrets_folder: Path) -> Iterator[ServedEngine]:
    """A mock that tests share, one after the other."""
    engine = ServedEngine(EngineConfig(model="mock", **MOCK), secrets_folder)
    yield engine
    engine.close()


@pytest.fixture
def make_owner() -> Iterator[MakeOwner]:
    """Managers, each of which is a host of its own to its engine."""
    made: list[Owner] = []

    def make(**arguments: Any) -> Owner:
        made.append(Owner())
        return made[-1].start(**{**MOCK, **arguments})

    yield make
    for owner in made:
        owner.manager.shutdown()
    use_locator(None)


def long_requests(prefix: str, count: int = 3, num_tokens: int = 60) -> list[InferRequest]:
    return [
        make_request(f"{prefix}{i}", [i, 1, 2], max_tokens=num_tokens, min_tokens=num_tokens, temperature=i % 2, seed=i)
        for i in range(count)
    ]


def endless(request_id: str) -> InferRequest:
    return make_request(request_id, max_tokens=4000, ignore_eos=True)


def expect_all(owner: Owner, requests: list[InferRequest]) -> None:
    owner.wait_for_end(*(request.request_id for request in requests))
    for request in requests:
        expect_oracle(owner.outcomes[request.request_id], request)


def wait_until_idle(owner: Owner) -> None:
    """The engine has no requests and no blocks in use, by its own word."""
    eventually(lambda: owner.manager.capacity == MOCK["max_num_seqs"], WAIT_S)
    eventually(lambda: owner.stats and owner.stats[-1].num_free_blocks == owner.stats[-1].num_blocks, WAIT_S)


# --- two hosts --------------------------------------------------------------------------------------------------------


def test_two_hosts_get_the_tokens_that_one_would_get(
    engine: ServedEngine, secrets: ClusterSecrets, make_owner: MakeOwner
) -> None:
    """With request ids that are the same on both."""
    use_locator(FixedLocator(engine.address), secrets)
    first, second = make_owner(), make_owner()
    ours, theirs = random_requests(seed=3, count=20), random_requests(seed=4, count=20)
    first.submit(*ours)
    second.submit(*theirs)
    expect_all(first, ours)
    expect_all(second, theirs)
    wait_until_idle(first)
    for owner, requests in ((first, ours), (second, theirs)):
        eventually(lambda owner=owner: owner.stats[-1].num_requests_running == 0)  # type: ignore[misc]
        stats = owner.stats[-1]
        assert stats.prompt_tokens == sum(len(request.prompt_token_ids) for request in requests)
        assert stats.generation_tokens == sum(len(outcome.token_ids) for outcome in owner.outcomes.values())
    counted = [owner.stats[-1].prefix_cache_queries for owner in (first, second)]
    assert sum(counted) >= first.stats[-1].prompt_tokens + second.stats[-1].prompt_tokens and 0 in counted


def test_a_host_sends_only_while_the_engine_has_room(
    engine: ServedEngine, secrets: ClusterSecrets, make_owner: MakeOwner
) -> None:
    use_locator(FixedLocator(engine.address), secrets)
    first, second = make_owner(), make_owner()
    first.submit(*(endless(f"r{i}") for i in range(6)))
    first.wait_for_tokens("r5")
    eventually(lambda: second.manager.capacity == 2, WAIT_S)
    second.submit(*(endless(f"r{i}") for i in range(4)))
    second.wait_for_tokens("r1")
    assert [request.request_id for request in second.queue] == ["r2", "r3"]
    first.control("r0")
    second.wait_for_tokens("r2")
    assert (first.reason("r0"), first.reason("r1")) == ("abort", None)
    first.manager.shutdown()
    second.wait_for_tokens("r3")
    for i in range(4):
        second.control(f"r{i}")
    second.wait_for_end("r3")
    wait_until_idle(second)


def test_each_host_knows_the_blocks_of_the_prefix_cache(
    engine: ServedEngine, secrets: ClusterSecrets, make_owner: MakeOwner
) -> None:
    use_locator(FixedLocator(engine.address), secrets)
    first = make_owner()
    first.manager.follow_prefixes(True)
    prompts = [make_request(f"r{i}", range(i, i + 40 + i), max_tokens=2) for i in range(6)]
    first.submit(*prompts[:3])
    first.wait_for_end("r0", "r1", "r2")
    second = make_owner()
    second.manager.follow_prefixes(True)
    second.submit(*prompts[3:])
    second.wait_for_end("r3", "r4", "r5")
    eventually(lambda: len(first.blocks) >= 6 and first.blocks == second.blocks, WAIT_S)


def test_the_vocabulary_is_sent_by_one_host(serve: ServeEngine, secrets: ClusterSecrets, make_owner: MakeOwner) -> None:
    """Another one that comes later has its grammars matched, too."""
    use_locator(FixedLocator(serve().address), secrets)
    for num_sent in (1, 0):
        owner = make_owner()
        owner.submit(msgspec.structs.replace(make_request("r", max_tokens=50), grammar="start: /[a-z]{9}/"))
        owner.wait_for_end("r")
        assert (owner.reason("r"), owner.num_vocabularies) == ("stop", num_sent)


def test_an_engine_that_is_not_up_yet_is_waited_for(
    engine: ServedEngine, secrets: ClusterSecrets, make_owner: MakeOwner
) -> None:
    locator = FixedLocator(None)
    use_locator(locator, secrets)
    timer = threading.Timer(0.1, locator.move, (0, engine.address))
    timer.start()
    owner = make_owner()
    timer.join()
    owner.submit(request := make_request("r"))
    expect_all(owner, [request])
    owner.manager.shutdown()
    assert locator.released == [0]


@pytest.mark.parametrize("is_located", [False, True])
def test_a_host_that_stops_does_not_wait_for_an_engine_that_never_came(
    secrets: ClusterSecrets, is_located: bool
) -> None:
    """Nor for one whose machine does not answer. Without the stop, the load would wait for half an hour."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        silent = EngineAddress(f"tcp://127.0.0.1:{listener.getsockname()[1]}", 1, "south")
        use_locator(locator := FixedLocator(silent if is_located else None), secrets, heartbeat_timeout_s=1000.0)
        errors: list[str] = []

        def load() -> None:
            with pytest.raises(RuntimeError) as caught:
                Owner().start(**MOCK)
            errors.append(str(caught.value))

        loading = threading.Thread(target=load)
        loading.start()
        eventually(lambda: locator.num_asked, WAIT_S)
        stop_loads()
        loading.join(WAIT_S)
    use_locator(None)
    assert errors and errors[0].startswith("this host is stopping and no longer waits for engines")


def test_an_engine_is_not_released_when_its_next_user_has_located_it() -> None:
    config, wanted = EngineConfig(model="mock"), {0}

    class Locator(FixedLocator):
        def release(self, index: int, config: EngineConfig) -> None:
            entering.start()
            entering.join(0.1)  # as far as it gets
            wanted.discard(index)

    def enter() -> None:
        users.enter(0, config, lambda: None)
        wanted.add(0)  # located

    entering = threading.Thread(target=enter)
    users = EngineUsers(Locator())
    wake = threading.Event().set
    users.enter(0, config, wake)
    users.leave(0, config, wake)
    entering.join()
    assert wanted == {0}


@pytest.mark.slow
def test_the_bundled_model_gives_its_tokens_to_both(serve: ServeEngine, secrets: ClusterSecrets) -> None:
    config = EngineConfig(model=DEMO_MODEL, num_threads=1)
    requests = [
        make_request(f"r{i}", range(5 + i, 25 + i), max_tokens=24, temperature=0.8, seed=i, ignore_eos=True)
        for i in range(4)
    ]
    alone = Owner().start_with(config)
    alone.submit(*requests)
    alone.wait_for_end(*(request.request_id for request in requests))
    alone.manager.shutdown()
    use_locator(FixedLocator(serve(config).address), secrets)
    owners = [Owner().start_with(config) for _ in range(2)]
    for owner in owners:
        owner.submit(*requests)
    for owner in owners:
        owner.wait_for_end(*(request.request_id for request in requests))
        owner.manager.shutdown()
        assert owner.outcomes == alone.outcomes
    use_locator(None)


# --- losses -----------------------------------------------------------------------------------------------------------


def test_streams_of_two_hosts_survive_kills_of_their_engine(
    serve: ServeEngine, secrets: ClusterSecrets, make_owner: MakeOwner
) -> None:
    """The next process listens where the last one did: nobody need tell the hosts."""
    engine = serve()
    locator = FixedLocator(engine.address)
    use_locator(locator, secrets)
    owners = [make_owner() for _ in range(2)]
    requests = [long_requests(name) for name in "ab"]
    for owner, its in zip(owners, requests, strict=True):
        owner.submit(*its)
    incarnations = [engine.news.incarnation]
    for count in (3, 12, 30):
        for owner, its in zip(owners, requests, strict=True):
            first = its[0].request_id
            owner.wait_for(lambda o=owner, r=first, n=count: len(o.outcomes.setdefault(r, Outcome()).token_ids) >= n)  # type: ignore[misc]
        incarnations.append(engine.kill().incarnation)
    for owner, its in zip(owners, requests, strict=True):
        expect_all(owner, its)
        assert {error.kind for _, error in owner.deaths} == {"disconnect"}
    assert incarnations == sorted(set(incarnations))


def test_an_engine_that_is_stopped_is_replaced_long_before_a_step_may_end(
    serve: ServeEngine, secrets: ClusterSecrets, make_owner: MakeOwner
) -> None:
    """step_timeout_s is two minutes."""
    engine = serve(heartbeat_timeout_s=0.5)
    use_locator(FixedLocator(engine.address), secrets)
    owner, requests = make_owner(), long_requests("a", num_tokens=200)
    owner.submit(*requests)
    owner.wait_for_tokens(requests[0].request_id)
    os.kill(engine.news.pid, signal.SIGSTOP)
    assert engine.read_news().incarnation > engine.news.incarnation
    expect_all(owner, requests)


def test_an_engine_that_hangs_is_replaced_by_its_keeper(
    serve: ServeEngine, secrets: ClusterSecrets, make_owner: MakeOwner, tmp_path: Path
) -> None:
    limits: dict[str, Any] = {"step_timeout_s": 1.0, "fault_directory": str(tmp_path)}
    engine = serve(EngineConfig(model="mock", **MOCK, **limits))
    use_locator(FixedLocator(engine.address), secrets)
    owner = make_owner(**limits)
    requests = long_requests("r", 3, 200)
    owner.submit(*requests)
    owner.wait_for_tokens("r2")
    (tmp_path / "hang").touch()
    expect_all(owner, requests)
    assert owner.deaths and engine.read_news().incarnation == engine.news.incarnation + 1


def test_a_keeper_counts_processes_that_finished_no_step_whatever_they_tell_it(
    secrets: ClusterSecrets,
    secrets_folder: Path,
    make_owner: MakeOwner,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = EngineConfig(model="mock", step_timeout_s=4.0, **MOCK)
    order, receive = ServedEngineOrder(config=config, secrets_folder=str(secrets_folder)), KeptTransport.receive
    news: queue.SimpleQueue[ServedEngineNews] = queue.SimpleQueue()
    told_by: set[int | None] = set()

    def receive_noting(transport: KeptTransport, timeout_s: float | None = None) -> list[StepResult]:
        if results := receive(transport, timeout_s):
            told_by.add(transport.pid)
        return results

    monkeypatch.setattr(KeptTransport, "receive", receive_noting)
    with listen(order) as listener:
        keeper = Keeper(order, listener, news.put)
        thread = threading.Thread(target=keeper.run)
        thread.start()
        try:
            for _ in range(2):
                pid = news.get(timeout=WAIT_S).pid
                eventually(lambda pid=pid: pid in told_by, WAIT_S)  # type: ignore[misc]
                os.kill(pid, signal.SIGKILL)
            endpoint = f"tcp://127.0.0.1:{news.get(timeout=WAIT_S).port}"
            assert "failure 2 in a row, the next start is in 0.5 s" in caplog.text
            use_locator(FixedLocator(EngineAddress(endpoint, 1)), secrets)
            owner = make_owner(step_timeout_s=4.0)
            owner.submit(request := make_request("r"))
            expect_all(owner, [request])
            eventually(lambda: keeper._supervisor._num_failures == 0, WAIT_S)
        finally:
            keeper.stop()
            thread.join()


HOST = """
import sys
from pathlib import Path
from llmbackend.links.secrets import ClusterSecrets
from llmbackend.engine.process.served.locating import EngineAddress, use_locator
from tests.engine.test_remote_engines import MOCK, endless
from tests.helpers.manager_owner import Owner
from tests.helpers.served_engines import FixedLocator
use_locator(FixedLocator(EngineAddress(sys.argv[1], 1)), ClusterSecrets.load(Path(sys.argv[2])))
owner = Owner().start(**MOCK)
owner.submit(*(endless(f"r{i}") for i in range(5)))
owner.wait_for_tokens("r4")
print("streams", flush=True)
sys.stdin.read()
"""


def test_the_requests_of_a_killed_host_leave_the_engine(
    engine: ServedEngine, secrets: ClusterSecrets, secrets_folder: Path, make_owner: MakeOwner
) -> None:
    use_locator(FixedLocator(engine.address), secrets)
    owner = make_owner()
    host = subprocess.Popen(
        [sys.executable, "-c", HOST, engine.address.endpoint, str(secrets_folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert host.stdout is not None and host.stdin is not None
    with host.stdin, host.stdout:
        assert host.stdout.readline() == b"streams\n"
        owner.submit(*(requests := long_requests("r")))
        eventually(lambda: owner.manager.capacity <= 0, WAIT_S)
        host.kill()
        host.wait()
    expect_all(owner, requests)
    wait_until_idle(owner)
    wait_for_self_check()
    assert owner.stats[-1].num_invariant_breaches == 0 and not owner.deaths


@pytest.mark.slow
def test_a_cut_network_is_noticed_on_both_sides(
    serve: ServeEngine, secrets: ClusterSecrets, make_owner: MakeOwner
) -> None:
    """Connections stay open and are silent. The other host goes on."""
    engine = serve(heartbeat_timeout_s=1.0)
    relay = Relay(engine.address)
    locator = FixedLocator(relay.address)
    use_locator(locator, secrets, heartbeat_timeout_s=1.0)
    owner = make_owner()
    locator.addresses[0] = engine.address
    other = make_owner()
    requests, others = long_requests("r", 3, 400), long_requests("other", 3, 600)
    owner.submit(*requests)
    other.submit(*others)
    owner.wait_for_tokens("r2")
    relay.is_cut = True
    expect_all(owner, requests)
    expect_all(other, others)
    assert [(error.kind, len(lost)) for lost, error in owner.deaths] == [("disconnect", 3)] and not other.deaths
    wait_until_idle(other)
    relay.close()


def test_an_engine_with_a_long_configuration_starts(serve: ServeEngine) -> None:
    """As with the chat template of a large model."""
    config = EngineConfig(model="mock", chat_template="{# a comment #}" * 1000, **MOCK)
    assert serve(config).news.pid


def test_a_keeper_whose_fork_server_does_not_get_ready_can_be_stopped(
    secrets_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hanging_runners.py").write_text(
        f"import time\nfrom pathlib import Path\nPath({str(tmp_path)!r}, 'imported').touch()\ntime.sleep(3600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    order = ServedEngineOrder(
        config=EngineConfig(model="mock"), secrets_folder=str(secrets_folder), runners="hanging_runners"
    )
    keeper = subprocess.Popen(
        [sys.executable, "-m", "llmbackend.engine.process.served.served_engine"], stdin=subprocess.PIPE
    )
    assert keeper.stdin is not None
    with keeper.stdin:
        keeper.stdin.write(msgspec.json.encode(order) + b"\n")
        keeper.stdin.flush()
        try:
            eventually((tmp_path / "imported").exists, WAIT_S)
            keeper.terminate()
            assert keeper.wait(WAIT_S) == 0
        finally:
            keeper.kill()
            keeper.wait()


def test_an_engine_ends_with_its_keeper(serve: ServeEngine) -> None:
    engine = serve()
    engine.process.kill()
    eventually(lambda: not is_alive(engine.news.pid), WAIT_S)


@pytest.mark.parametrize("outlives_parent", [False, True])
def test_an_engine_ends_with_its_parent_or_when_no_host_is_left(
    serve: ServeEngine, secrets: ClusterSecrets, make_owner: MakeOwner, outlives_parent: bool
) -> None:
    engine = serve(outlives_parent=outlives_parent, orphan_timeout_s=0.5)
    use_locator(FixedLocator(engine.address), secrets)
    if outlives_parent:
        owner = make_owner()
        owner.submit(*(requests := long_requests("r", 1, 500)))
        owner.wait_for_tokens("r0")
        engine.leave()
        expect_all(owner, requests)
        owner.manager.shutdown()
    engine.leave()
    assert engine.process.wait(WAIT_S) == 0
    assert not is_alive(engine.news.pid)


# --- what one link says -----------------------------------------------------------------------------------------------


class ScriptedEngine:
    """Says to one host what the test says."""

    def __init__(self, secrets: ClusterSecrets) -> None:
        self._context = zmq.Context()
        self._router = new_socket(self._context, zmq.ROUTER, secrets, WAIT_S)
        port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self.address = EngineAddress(f"tcp://127.0.0.1:{port}", 1)

    def welcome(self) -> None:
        self._host, _ = self._router.recv_multipart()
        self.say(WELCOME, msgspec.msgpack.encode(Welcome(incarnation=1, monotonic_ns=0, boot_id=boot_id())))
        info = MockRunner(EngineConfig(model="mock")).info
        self.say(STARTED, msgspec.msgpack.encode(EngineStarted(info=info)))

    def say(self, head: bytes, body: bytes) -> None:
        self._router.send_multipart((self._host, head, body))

    def say_step(self, number: int) -> None:
        self.say(Head(True, 0, 0, 0).pack(), msgspec.msgpack.encode(StepResult(number, (), EngineStats())))

    def end(self) -> None:
        """Once all is sent."""
        self._router.close(round(WAIT_S * 1e3))
        self._context.term()


@pytest.fixture
def scripted(secrets: ClusterSecrets) -> Iterator[tuple[ScriptedEngine, RemoteTransport]]:
    engine, wakeup = ScriptedEngine(secrets), Wakeup()
    use_locator(FixedLocator(engine.address), secrets, heartbeat_timeout_s=WAIT_S)
    engines = remote_engines()
    assert engines is not None
    config = EngineConfig(model="mock")
    transport = RemoteTransport(engines, engine.address, config, wakeup.fileno(), lambda progress: None)
    transport.launch()
    engine.welcome()
    while transport.receive_started(WAIT_S) is None:
        pass
    yield engine, transport
    transport.close(force=True)
    engine.end()
    wakeup.close()
    use_locator(None)


def test_results_before_the_end_of_a_connection_are_received(
    scripted: tuple[ScriptedEngine, RemoteTransport],
) -> None:
    engine, transport = scripted
    engine.say_step(1)
    engine.say_step(2)
    engine.end()
    assert transport._monitor.socket.poll(round(WAIT_S * 1e3)), "the end is known, and the results are there"
    assert [result.step_id for result in transport.receive(WAIT_S)] == [1, 2]
    with pytest.raises(EngineDeadError, match="the connection to it has ended"):
        transport.receive(WAIT_S)


@pytest.mark.parametrize(
    ("head", "body", "reason"),
    [
        (Head(True, 0, 0, 0).pack(), b"\xc1", "sent a message that cannot be read"),
        (b"no head", b"", "sent a message that cannot be read"),
        (STARTED, msgspec.msgpack.encode(EngineStarted(error="enough")), "was lost: enough"),
    ],
)
def test_nothing_after_a_message_that_ends_a_link_is_received(
    scripted: tuple[ScriptedEngine, RemoteTransport], head: bytes, body: bytes, reason: str
) -> None:
    engine, transport = scripted
    engine.say_step(1)
    engine.say(head, body)
    engine.say_step(2)
    received = []
    for _ in range(3):
        with pytest.raises(EngineDeadError, match=reason):
            while True:
                received += [result.step_id for result in transport.receive(WAIT_S)]
    assert received == [1]


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_an_engine_of_a_cluster_is_not_unloaded_by_one_of_its_hosts(secrets: ClusterSecrets) -> None:
    use_locator(locator := FixedLocator(None), secrets)
    expect_refusal(
        "^engine argument 'idle_unload_s' is 60, expected 0 in a cluster", idle_unload_s=60.0, load_timeout_s=1.0
    )
    assert not locator.num_asked


def expect_refusal(pattern: str, **arguments: Any) -> None:
    owner = Owner()
    try:
        with pytest.raises(RuntimeError, match=pattern):
            owner.start(**{**MOCK, **arguments})
    finally:
        owner.manager.shutdown()
        use_locator(None)


def test_a_host_without_the_clusters_key_is_told_so(engine: ServedEngine, tmp_path: Path) -> None:
    use_locator(FixedLocator(engine.address), ClusterSecrets.create(tmp_path))
    expect_refusal("it has another CURVE key, or has just exited", max_engine_failures=2)


def test_the_public_key_alone_opens_nothing(engine: ServedEngine, secrets: ClusterSecrets) -> None:
    public, secret = zmq.curve_keypair()

    class Thief(ClusterSecrets):
        def secure_client(self, socket: zmq.Socket[Any]) -> None:
            socket.curve_serverkey = self.curve_public_key
            socket.curve_publickey, socket.curve_secretkey = public, secret

    use_locator(FixedLocator(engine.address), Thief(secrets.curve_public_key, secret))
    expect_refusal("refuses this host's CURVE key")


def test_a_release_that_differs_is_named_with_ours(
    engine: ServedEngine, secrets: ClusterSecrets, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = llmbackend.__version__
    monkeypatch.setattr(llmbackend, "__version__", "99.0")
    use_locator(FixedLocator(engine.address), secrets, host_id="north")
    expect_refusal(rf"host 'north' runs llmbackend 99\.0 \(protocol 1\), the engine llmbackend {ours} ")


def test_engine_arguments_that_differ_are_named(engine: ServedEngine, secrets: ClusterSecrets) -> None:
    use_locator(FixedLocator(engine.address), secrets, host_id="north")
    expect_refusal(
        "engine argument 'block_size' is 16 on host 'north' and 32 in the engine: they must be equal", block_size=16
    )


def test_an_address_where_nobody_listens_is_named(secrets: ClusterSecrets) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    use_locator(FixedLocator(EngineAddress(f"tcp://127.0.0.1:{port}", 1, "south")), secrets)
    expect_refusal(rf"tcp://127\.0\.0\.1:{port} on south was lost: it cannot be reached", max_engine_failures=2)


def test_a_model_that_the_engines_machine_cannot_read_is_named(
    serve: ServeEngine, secrets: ClusterSecrets, tmp_path: Path
) -> None:
    missing = str(tmp_path / "model")
    engine = serve(EngineConfig(model=missing, **MOCK), node="south")
    use_locator(FixedLocator(msgspec.structs.replace(engine.address, node="south")), secrets)
    for _ in range(2):  # each host that comes is told
        owner = Owner()
        with pytest.raises(RuntimeError, match=f"tcp://.* on south.*'model' is '{missing}', which is not a folder"):
            owner.start_with(EngineConfig(model=missing, **MOCK))
    use_locator(None)


@pytest.mark.parametrize(("file", "pattern"), [(None, "cannot be read: No such file"), ("short", "is not a CURVE key")])
def test_a_keeper_without_a_key_says_so(tmp_path: Path, file: str | None, pattern: str) -> None:
    if file is not None:
        (tmp_path / "curve.key").write_text(file)
    engine = ServedEngine(EngineConfig(model="mock"), tmp_path)
    assert re.search(pattern, engine.news.error)
    assert engine.process.wait(WAIT_S) == 2
    engine.close()


def test_an_order_is_checked() -> None:
    order = b'{"config": {"model": "mock"}, "secrets_folder": "x", "orphan_timeout_s": 0}\n'
    done = subprocess.run(
        [sys.executable, "-m", "llmbackend.engine.process.served.served_engine"],
        input=order,
        stdout=subprocess.PIPE,
        check=False,
    )
    assert done.returncode == 2
    assert "'orphan_timeout_s' is 0, expected a number above 0" in msgspec.json.decode(done.stdout)["error"]


@pytest.mark.parametrize("parts", [[b"no hello"], [b"\xc1"], [b"more", b"parts"]])
def test_a_host_that_makes_no_sense_harms_nobody(
    engine: ServedEngine, secrets: ClusterSecrets, make_owner: MakeOwner, parts: list[bytes]
) -> None:
    use_locator(FixedLocator(engine.address), secrets)
    owner = make_owner()
    with zmq.Context() as context, context.socket(zmq.DEALER) as link:
        secrets.secure_client(link)
        link.linger = 0
        link.connect(engine.address.endpoint)
        link.send_multipart(parts)
        if len(parts) == 1:
            assert link.poll(round(WAIT_S * 1e3))
            head, body = link.recv_multipart()
            started = msgspec.msgpack.decode(body, type=EngineStarted)
            assert head == b"" and "a host must send Hello first" in started.error
        owner.submit(*(requests := long_requests("r", 2, 10)))
        expect_all(owner, requests)
    assert not owner.deaths
