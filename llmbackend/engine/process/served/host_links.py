"""The process of a served engine, and its links to any number of hosts and to its keeper.

Run by the keeper's fork server (`prepare`). Invariants: a host is told only about its own requests; one that
disconnects, is silent for longer than the heartbeat timeout, or sends malformed messages is dropped and its requests
end; nothing a host does ends the engine. Hosts can connect before the load ends; they are told of a failed load for
FAILED_LOAD_S before the keeper is, which starts another process; the process never outlives its keeper. What is meant
for all hosts is encoded once, and sent at most every REPORT_INTERVAL_S in addition to a host's own outputs, so a host
costs time only for its requests.
"""

from __future__ import annotations

import gc
import itertools
import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec
import zmq

from llmbackend.links.secrets import ClientCheck, ClusterSecrets
from llmbackend.links.sockets import HANDSHAKE_FAILURES, Monitor, new_socket

from ...config import EngineConfig
from ...engine_core import EngineCore
from ...messages import (
    AdapterResult,
    EngineInput,
    EngineStarted,
    EngineStats,
    ModelPrepared,
    RequestEvent,
    StepOutput,
    StepResult,
)
from ...reports import NOT_WATCHED, Watch
from ...step import Runner
from ..engine_process import QUIET_MS, EngineProgram, end_at_once, end_with_host, load
from .attached_host import AttachedHost, owner_of
from .remote_messages import STARTED, WELCOME, Head, Hello, Welcome, boot_id, refusal
from .served_order import KeptState, ServedProcessOrder

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S: Final = 0.02
STATE_INTERVAL_S: Final = 1.0
"""How often the keeper is told that the engine is not stuck, unless the step timeout is below four of these."""
LINGER_MS: Final = 1000
GOODBYE_TIMEOUT_S: Final = 0.5
"""How long an exiting process waits for its hosts to disconnect, which shows that they read its last message."""
_WARNING_INTERVAL_S: Final = 10.0

_encode = msgspec.msgpack.Encoder().encode
_decode_input = msgspec.msgpack.Decoder(EngineInput).decode
_decode_hello = msgspec.msgpack.Decoder(Hello).decode
_decode_started = msgspec.msgpack.Decoder(EngineStarted).decode


@dataclass
class _HostUpdate:
    """The part of a step's result for one host."""

    outputs: list[StepOutput] = field(default_factory=list)
    adapters: list[AdapterResult] = field(default_factory=list)
    events: list[RequestEvent] = field(default_factory=list)


class HostLinks:
    def __init__(
        self, config: EngineConfig, order: ServedProcessOrder, secrets: ClusterSecrets, listen_fd: int
    ) -> None:
        """listen_fd: of a listening socket; closed together with this."""
        self._config = config
        self._order = order
        self._context = zmq.Context()
        self._check = ClientCheck(self._context, secrets.curve_public_key)
        self._hosts: dict[int, AttachedHost] = {}
        """By number, the longest attached first: that host counts the engine's own counters."""
        self._by_routing_id: dict[bytes, AttachedHost] = {}
        self._numbers = itertools.count(1)
        self._said = EngineStarted()
        """The latest message about the load, for hosts that attach later."""
        self._core: EngineCore | None = None
        """Set at the end of the load."""
        self._knows_vocabulary = False
        self._num_requests = 0
        self._stats, self._step_id = EngineStats(), 0
        self._state_interval_s = min(STATE_INTERVAL_S, config.step_timeout_s / 4)
        self._is_report_due = self._is_check_due = False
        self._has_stepped = False
        """Whether a step has computed something."""
        self._report_at_s = self._state_at_s = self._warning_at_s = 0.0
        self._has_ended = False
        self._keeper: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        self._keeper.set_hwm(0)
        self._keeper.connect(order.endpoint)
        self._router = new_socket(self._context, zmq.ROUTER, secrets, order.heartbeat_timeout_s)
        self._refused = Monitor(self._router, HANDSHAKE_FAILURES)
        self._router.setsockopt(zmq.USE_FD, listen_fd)
        self._router.bind(order.listen_endpoint)
        self._poller = zmq.Poller()
        for socket in (self._router, self._keeper, self._refused.socket):
            self._poller.register(socket, zmq.POLLIN)

    @property
    def has_failed(self) -> bool:
        """Whether the model cannot be loaded."""
        return bool(self._said.error)

    # --- while the model loads ----------------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Sends the load's message to all hosts, now and later, and to the keeper, unless the load has failed: the
        keeper would end this process, which still has to tell hosts why."""
        self._take_messages()
        self._said = _decode_started(data)
        if not self._said.error:
            self._keeper.send(data)
        for host in tuple(self._hosts.values()):
            self._tell(host, STARTED, data)

    def answer_until_left(self, timeout_s: float) -> None:
        """After the load's last message: answers hosts until all have disconnected or time is up."""
        self._answer(timeout_s, lambda: not self._hosts)

    def answer_for(self, duration_s: float) -> None:
        """After a failed load: tells hosts that connect within `duration_s` why it failed, and then the keeper."""
        self._answer(duration_s, lambda: self._has_ended)
        self._keeper.send(_encode(self._said))

    def _answer(self, duration_s: float, is_over: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + duration_s
        while not is_over() and (left_s := deadline_s - time.monotonic()) > 0:
            self._poller.poll(math.ceil(left_s * 1e3))
            self._take_messages()
            self._read_keeper()
            self._warn_of_refused(time.monotonic())

    # --- steps --------------------------------------------------------------------------------------------------------

    def serve(self, core: EngineCore) -> None:
        """Steps until the keeper ends the engine, then closes the core."""
        self._core = core
        for host in self._hosts.values():
            self._report_to(host, self._report())
        try:
            while self._take_inputs(core):
                self._deliver(core.step())
                self._is_check_due = not core.has_work
        finally:
            core.close()

    def close(self) -> None:
        self._refused.close()
        self._router.close(LINGER_MS)
        self._keeper.close(LINGER_MS)
        self._check.close()
        self._context.term()

    def _take_inputs(self, core: EngineCore) -> bool:
        """Applies all messages so far; waits for one if the core has nothing to do. False = the engine ends."""
        while not self._has_ended:
            self._take_messages()
            self._run_periodic_work(time.monotonic(), is_idle=not core.has_work)
            if core.has_work:
                break
            state_ms = math.ceil(self._state_interval_s * 1e3)
            is_quiet = not self._poller.poll(min(QUIET_MS, state_ms) if self._is_check_due else state_ms)
            if is_quiet and self._is_check_due:
                self._check_core(core)
        return not self._has_ended

    def _check_core(self, core: EngineCore) -> None:
        self._is_check_due = False
        if (breach := core.check_idle()) is not None:
            self._stats, self._is_report_due = breach.stats, True

    def _run_periodic_work(self, now_s: float, is_idle: bool) -> None:
        """Sends due reports, reads the keeper's messages."""
        if self._is_report_due and (is_idle or now_s >= self._report_at_s + REPORT_INTERVAL_S):
            self._report_to_all(now_s)
        is_state_due = now_s >= self._state_at_s + self._state_interval_s
        if is_idle or is_state_due:
            self._read_keeper()
            self._warn_of_refused(now_s)
        if is_state_due:
            self._state_at_s = now_s
            if is_idle and self._hosts:
                self._report_to_all(now_s)  # the only way to notice that a host is gone
            self._keeper.send(_encode(KeptState(num_hosts=len(self._hosts), has_stepped=self._has_stepped)))

    def _deliver(self, result: StepResult) -> None:
        self._stats, self._step_id, self._is_report_due = result.stats, result.step_id, True
        if result.stats.last_step_s and not self._has_stepped:
            self._has_stepped, self._state_at_s = True, 0.0  # tells the keeper now
        if result.blocks is not None:
            self._tell_of_blocks(StepResult(result.step_id, (), result.stats, blocks=result.blocks))
        news: defaultdict[AttachedHost, _HostUpdate] = defaultdict(_HostUpdate)
        for output in result.outputs:
            if (host := owner_of(output.request_id, self._hosts)) is not None:
                host.give(output)
                self._num_requests -= output.finish_reason is not None
                news[host].outputs.append(output)
        for event in result.events:
            if (host := owner_of(event.request_id, self._hosts)) is not None:
                host.give_event(event)
                news[host].events.append(event)
        for adapter in result.adapters:
            if (host := owner_of(adapter.name, self._hosts)) is not None:
                news[host].adapters.append(host.give_adapter(adapter))
        reports = {}
        if result.report is not None:
            for host in self._hosts.values():
                if (report := host.report(result.report)) is not None:
                    reports[host] = report
                    news[host]  # it gets a message even without outputs
        for host, one in news.items():
            parts = tuple(one.outputs), result.stats, tuple(one.adapters), tuple(one.events), reports.get(host)
            self._report_to(host, _encode(StepResult(result.step_id, *parts)))

    def _tell_of_blocks(self, result: StepResult) -> None:
        """Sends changes of the prefix cache to each host that follows them."""
        encoded = _encode(result)
        for host in tuple(self._hosts.values()):
            if host.follows_prefixes:
                self._report_to(host, encoded)

    def _report_to_all(self, now_s: float) -> None:
        self._is_report_due, self._report_at_s = False, now_s
        report = self._report()
        for host in tuple(self._hosts.values()):
            self._report_to(host, report)

    def _report(self) -> bytes:
        return _encode(StepResult(self._step_id, (), self._stats))

    def _report_to(self, host: AttachedHost, result: bytes) -> None:
        counts = host is next(iter(self._hosts.values()), None)
        num_of_others = self._num_requests - len(host.requests)
        head = Head(counts, num_of_others, host.prompt_tokens, host.generation_tokens)
        self._tell(host, head.pack(), result)

    # --- messages -----------------------------------------------------------------------------------------------------

    def _take_messages(self) -> None:
        while True:
            try:
                routing_id, message = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except ValueError:  # wrong number of parts
                continue
            host = self._by_routing_id.get(routing_id)
            if host is None:
                self._attach(routing_id, message)
            else:
                self._apply(host, message)

    def _attach(self, routing_id: bytes, message: bytes) -> None:
        try:
            said = _decode_hello(message)
            reason = refusal(said, self._config, self._order.node)
        except msgspec.DecodeError as error:
            said, reason = None, f"a host must send Hello first: {error}"
        number = next(self._numbers)
        host = AttachedHost(number, routing_id, said.host_id if said else "", self._config.lora_modules)
        if reason:
            logger.warning("refusing a host: %s", reason)
            self._tell(host, STARTED, _encode(EngineStarted(error=reason)))
            return
        self._hosts[number] = self._by_routing_id[routing_id] = host
        logger.info("host '%s' is attached; hosts: %d", host.host_id, len(self._hosts))
        self._tell(host, WELCOME, _encode(self._welcome()))
        if self._said != EngineStarted():
            self._tell(host, STARTED, _encode(self._said))
        if self._core is not None:
            self._report_to(host, self._report())

    def _welcome(self) -> Welcome:
        return Welcome(
            incarnation=self._order.incarnation,
            monotonic_ns=time.monotonic_ns(),
            boot_id=boot_id(),
            knows_vocabulary=self._knows_vocabulary,
        )

    def _apply(self, host: AttachedHost, message: bytes) -> None:
        try:
            said = _decode_input(message)
        except msgspec.DecodeError as error:
            self._refuse(host, f"this host sent a message that cannot be read: {error}")
            return
        if said.shutdown:
            self._drop(host, "it has left")
        elif self._core is not None:
            try:
                self._pass_on(host, said, self._core)
            except ValueError as error:
                self._refuse(host, str(error))

    def _pass_on(self, host: AttachedHost, said: EngineInput, core: EngineCore) -> None:
        if said.watch is not None:
            host.watch = said.watch
            self._watch_for_all(core)
        if said.prefixes is not None:
            host.follows_prefixes = said.prefixes
            core.prefixes.publish(any(one.follows_prefixes for one in self._hosts.values()))
        if said.vocabulary is not None and not self._knows_vocabulary:
            self._knows_vocabulary = True  # one model, one vocabulary
            core.set_vocabulary(said.vocabulary)
        for adapter in said.load:
            core.adapters.load(host.take_adapter(adapter))
        for request in said.add:
            core.add(host.take(request))
            self._num_requests += 1
        for request_id in said.abort:
            if engine_id := host.requests.get(request_id):
                core.abort(engine_id)
        for name in said.drop:
            host.adapters.discard(host.adapter_name(name))
            core.adapters.drop(host.adapter_name(name))

    def _watch_for_all(self, core: EngineCore) -> None:
        watches = [host.watch for host in self._hosts.values()]
        core.watch(Watch(steps=any(one.steps for one in watches), blocks=any(one.blocks for one in watches)))

    def _refuse(self, host: AttachedHost, reason: str) -> None:
        self._tell(host, STARTED, _encode(EngineStarted(error=reason)))
        self._drop(host, reason)

    def _drop(self, host: AttachedHost, why: str) -> None:
        """Aborts the host's requests and drops its adapters."""
        if self._by_routing_id.pop(host.routing_id, None) is None:
            return
        self._hosts = {number: one for number, one in self._hosts.items() if one is not host}
        self._num_requests -= len(host.requests)
        logger.info(
            "host '%s' is gone with %d requests: %s; hosts: %d", host.host_id, len(host.requests), why, len(self._hosts)
        )
        if self._core is not None:
            for engine_id in host.requests.values():
                self._core.abort(engine_id)
            for name in host.adapters:
                self._core.adapters.drop(name)
            if host.follows_prefixes and not any(one.follows_prefixes for one in self._hosts.values()):
                self._core.prefixes.publish(False)
            if host.watch != NOT_WATCHED:
                self._watch_for_all(self._core)

    def _tell(self, host: AttachedHost, head: bytes, body: bytes) -> None:
        """Never blocks. A host that is unreachable is dropped."""
        try:
            self._router.send_multipart((host.routing_id, head, body), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._drop(host, f"its connection has ended ({error})")

    def _read_keeper(self) -> None:
        while True:
            try:
                message = _decode_input(self._keeper.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            self._has_ended = self._has_ended or message.shutdown

    def _warn_of_refused(self, now_s: float) -> None:
        for _ in self._refused.read():
            if now_s >= self._warning_at_s + _WARNING_INTERVAL_S:
                self._warning_at_s = now_s
                logger.warning("a peer was refused: it does not have the cluster's CURVE key")


FAILED_LOAD_S: Final = 10.0

_decode_process_order = msgspec.json.Decoder(ServedProcessOrder).decode


class ServedEngineProgram(EngineProgram):
    def __call__(self, order: bytes, *descriptors: int) -> None:
        """Runs an engine. descriptors: the lifeline and the listening socket."""
        lifeline_fd, listen_fd = descriptors
        os.set_inheritable(listen_fd, False)
        engine = _decode_process_order(order)
        make = self._parts.in_own_process(engine.is_whole, lifeline_fd, engine.meeting)
        make_runner = partial(_make_runner, make, self._config)
        end_with_host(lifeline_fd)
        logging.basicConfig(level=logging.INFO, format="engine %(process)d %(levelname)s %(message)s")
        links = HostLinks(engine.config, engine, ClusterSecrets.load(engine.secrets_folder), listen_fd)
        core = load(self._config, make_runner, links.send, self._before)
        if core is not None:
            gc.collect()
            gc.freeze()
            links.serve(core)
        elif links.has_failed:
            links.answer_for(FAILED_LOAD_S)
        else:
            links.answer_until_left(GOODBYE_TIMEOUT_S)
        links.close()
        if core is None:
            end_at_once()


def _make_runner(make: Callable[[], Runner | ModelPrepared], config: EngineConfig) -> Runner | ModelPrepared:
    """Raises ValueError if a folder named by another machine does not exist on this one."""
    if os.path.isabs(config.model) and not os.path.isdir(config.model):
        raise ValueError(f"engine argument 'model' is '{config.model}', which is not a folder on this machine")
    return make()


def prepare(runners: str, config_json: str) -> ServedEngineProgram:
    """Called in the fork server, as engine_process.prepare."""
    return ServedEngineProgram(msgspec.json.decode(config_json, type=EngineConfig), runners)
