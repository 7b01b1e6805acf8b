"""The life of a server process: start, announce, drain, stop.

For: `llmbackend serve`. Does not know: protocols or models. Invariant: SIGTERM and SIGINT lead to one drain that
refuses new work, lets running requests finish within the exit timeout, stops every engine and exits 0 (1 when requests
were cut off or something did not end), also while models still load; a second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import uvloop

from llmbackend.core.errors import StartupError, TritonError
from llmbackend.core.inference_server import InferenceServer
from llmbackend.frontends.access.access_control import AccessControl
from llmbackend.frontends.access.settings import exposure
from llmbackend.frontends.journals.documents import StoreError

from ..core.server_log import ServerLog
from .descriptor_room import raise_limit
from .load_reports import begin_load
from .ports import ClaimedPorts, PortWish
from .process_age import process_age_s
from .process_end import exit_now, in_thread, kill_children, reload_on_hangup, stop_on_signal
from .process_memory import give_back_freed
from .settings import ServerSettings
from .start_failure import as_flags, failure_summary, print_error

if TYPE_CHECKING:
    from llmbackend.frontends.journals.response_store import ResponseStore

    from .frontend_server import FrontendServer

log = logging.getLogger(__name__)

LOAD_GRACE_S = 2.0
"""Time for a running load to end by itself when the server is stopped; then its engine is killed."""
GC_THRESHOLD_OBJECTS = 10_000
"""How many new objects start a collection of the youngest generation. Objects of requests are freed without it;
Python's default of 700 costs a thirtieth of a small request's time."""
CLOSE_GRACE_S = 1.0
"""Time for clients to read their last bytes after every request has ended."""


def run_server(settings: ServerSettings) -> int:
    """Serves until a signal; returns the process's exit code."""
    server_log = ServerLog(settings.log)
    try:
        server_log.install()
    except OSError as error:
        print_error(
            f"--log-file '{settings.log.file}' can not be written: {error.strerror}. Name another file, or none."
        )
        return 1
    raise_limit(settings.limits.connections)
    gc.set_threshold(GC_THRESHOLD_OBJECTS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings, server_log))


async def _serve(settings: ServerSettings, server_log: ServerLog) -> int:
    stop = stop_on_signal()
    try:
        access = AccessControl(settings.access)
    except ValueError as error:
        print_error(str(error))
        return 1
    reload_on_hangup(stop, access.reload)
    try:
        storage = settings.store.open_storage()
    except StoreError as error:
        print_error(f"--response-store: {error}.")
        return 1
    try:
        claims = _claim_ports(settings)
    except OSError as error:
        print_error(f"cannot listen: {error}. Stop what has the port, or choose another one.")
        return 1
    server = access.host(settings.options)
    loading = await begin_load(server.start)
    from .frontends import make_frontends  # half a second, while the engines start
    from .terminal import announce, load_bars

    with load_bars():
        store = settings.store.around(storage)
        frontends = make_frontends(server, settings, access, server_log, store, claims)
        gc.freeze()  # what was imported stays: no collection looks at it again
        gc.enable()
        is_over = await _ends_before(loading, stop)
    if not is_over:
        return await _stop_while_loading(server, loading, settings.exit_timeout_s)
    try:
        await loading
    except TritonError as error:
        print(f"error: creating server: {error.code.value} - {error.message}", file=sys.stderr)  # as Triton's main
        if isinstance(error, StartupError):
            print_error(f"\n{failure_summary(reasons_with_flags(error.reasons, settings.flag_model))}")
        return 1
    await store.start()
    try:
        await frontends.start()
    except (OSError, RuntimeError) as error:
        log.error("cannot listen: %s", error)
        await in_thread(server.stop, settings.exit_timeout_s)
        return 1
    _log_endpoints(frontends, settings)
    announce(server, _urls(frontends, settings), process_age_s())
    in_thread(give_back_freed)
    if warning := exposure(
        settings.access, http_address=settings.http.address_or_none, grpc_address=settings.grpc.address_or_none
    ):
        log.warning("%s", warning)
    await stop.wait()
    return await _drain(server, frontends, store, settings.exit_timeout_s)


def _claim_ports(settings: ServerSettings) -> ClaimedPorts:
    """Raises OSError."""
    http, grpc, metrics = settings.http, settings.grpc, settings.metrics
    return ClaimedPorts.claim(
        http=PortWish(http.address, http.port_or_none, http.reuse_port),
        metrics=PortWish(metrics.address, metrics.port_or_none),
        grpc=PortWish(grpc.address, grpc.port_or_none, settings.protocols.grpc_reuse_port),
    )


def reasons_with_flags(reasons: Mapping[str, str], flag_model: str) -> dict[str, str]:
    """The reasons, where that of the model of `--model` names flags instead of engine arguments."""
    return {name: as_flags(reason) if name == flag_model else reason for name, reason in reasons.items()}


async def _ends_before(loading: asyncio.Future[None], stop: asyncio.Event) -> bool:
    """Waits for the end of loading or for a signal. True: loading ended first."""
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait((loading, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    return loading.done()


async def _stop_while_loading(server: InferenceServer, loading: asyncio.Future[None], timeout_s: float) -> int:
    """Nothing is served yet: the engine of a load that does not end soon is killed, which ends the load."""
    log.info("stopping while models are loading")
    stopping = in_thread(server.stop, timeout_s)
    await asyncio.wait((stopping, loading), timeout=LOAD_GRACE_S, return_when=asyncio.ALL_COMPLETED)
    if not stopping.done():
        log.warning("killing the engines that are still loading")
        kill_children()
    if not await stopping:
        exit_now(1)
    with contextlib.suppress(TritonError):  # it says that the server is stopping
        await loading
    log.info("server stopped")
    return 0


async def _drain(server: InferenceServer, frontends: FrontendServer, store: ResponseStore, timeout_s: float) -> int:
    """Refuses new work, waits for running requests, unloads, closes the ports. Background responses in a store
    that stays are not waited for: the next server goes on with them."""
    log.info("shutting down: waiting up to %g s for running requests", timeout_s)
    stopping = in_thread(server.stop, timeout_s)
    await store.suspend()
    is_clean = await stopping
    await frontends.stop(grace_s=CLOSE_GRACE_S)
    await store.close()
    if not is_clean:
        log.error("server stopped before all of its work was done")
        exit_now(1)
    log.info("server stopped")
    return 0


def _log_endpoints(frontends: FrontendServer, settings: ServerSettings) -> None:
    """Triton's lines, which tools wait for."""
    started = (
        ("GRPCInferenceService", settings.grpc.address, frontends.grpc_port),
        ("HTTPService", settings.http.address, frontends.http_port),
        ("Metrics Service", settings.metrics.address, frontends.metrics_port),
    )
    for name, address, port in started:
        if port is not None:
            log.info("Started %s at %s:%d", name, address, port)


def _urls(frontends: FrontendServer, settings: ServerSettings) -> dict[str, str]:
    """Where each open endpoint listens, by protocol."""
    scheme = "http" if settings.access.http_tls is None else "https"
    found = {
        "http": (scheme + "://{}:{}", settings.http.address, frontends.http_port),
        "grpc": ("{}:{}", settings.grpc.address, frontends.grpc_port),
        "metrics": ("http://{}:{}/metrics", settings.metrics.address, frontends.metrics_port),
    }
    return {name: form.format(address, port) for name, (form, address, port) in found.items() if port is not None}
