"""The life of a server process: startup, readiness announcement, drain, shutdown.

Used by `llmbackend serve`. Independent of protocols and models. Invariant: SIGTERM or SIGINT begins a drain, even while
models load: new work is refused, running requests may finish within the exit timeout, every engine is stopped, and the
exit code is 0, or 1 if requests were cut off or something did not end. A second signal ends the process immediately.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import uvloop

from llmbackend.core.errors import StartupError, TritonError
from llmbackend.core.inference_server import InferenceServer
from llmbackend.fork_server.process_resources import give_back_freed_memory, process_age_s, remove_abandoned
from llmbackend.frontends.access.access_control import AccessControl
from llmbackend.frontends.access.settings import AccessSettings, exposure
from llmbackend.frontends.journals.documents import StoreError

from ..core.server_log import ServerLog
from .ports import ClaimedPorts, PortTakenError
from .process import (
    exit_now,
    in_thread,
    kill_children,
    raise_limit,
    reload_on_hangup,
    report_ready,
    stop_on_signal,
    take_ready_descriptor,
)
from .settings import ServerSettings
from .start_failure import as_flags, failure_summary, print_error
from .terminal import begin_load, log_endpoints, page_url, urls_of

if TYPE_CHECKING:
    from llmbackend.frontends.journals.documents import Storage
    from llmbackend.frontends.journals.response_store import ResponseStore
    from llmbackend.frontends.shared_counts import SharedCounts

    from .frontend_server import FrontendServer
    from .frontend_settings import ClusterMember, HostFolder
    from .process_frontends import ProcessFrontends

    Frontends = FrontendServer | ProcessFrontends

log = logging.getLogger(__name__)

LOAD_GRACE_S = 2.0
"""When the server is stopped, a load that does not end within this time is ended by killing its engine."""
GC_THRESHOLD_OBJECTS = 10_000
"""Number of new objects that triggers a collection of the youngest generation. Request objects are freed without the
collector; Python's default of 700 costs 3 % of a small request's time."""
CLOSE_GRACE_S = 1.0
"""Time for clients to read their last bytes after all requests have ended."""


def run_server(settings: ServerSettings, member: ClusterMember | None = None) -> int:
    """Serves until a signal. Returns the exit code. member: for a host of a cluster, whose launcher sets
    `settings.host_folder`."""
    server_log = ServerLog(settings.log)
    try:
        server_log.install()
    except OSError as error:
        print_error(
            f"--log-file '{settings.log.file}' cannot be written: {error.strerror}. Give another file, or none."
        )
        return 1
    remove_abandoned()
    raise_limit(settings.limits.connections)
    gc.set_threshold(GC_THRESHOLD_OBJECTS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings, server_log, member))


async def _serve(settings: ServerSettings, server_log: ServerLog, member: ClusterMember | None) -> int:
    stop, ready_descriptor = stop_on_signal(), take_ready_descriptor()
    try:
        apart = _host_folder(settings)
        access = _access_control(settings.access, apart)
        reloads = [access.reload]
        reload_on_hangup(stop, reloads)
        storage, claims = _open_storage(settings), _claim_ports(settings)
    except (OSError, ValueError) as error:
        print_error(str(error))
        return 1
    server = access.host(settings.options)
    loading = await begin_load(server.start)
    from .terminal import load_bars  # importing this and the frontends takes half a second, while the engines start

    with load_bars():
        store = settings.store.store_on(storage)
        frontends: Frontends
        try:
            if apart is None:
                from .frontends import make_frontends

                frontends = make_frontends(server, settings, access, server_log, store, claims)
            else:
                from .process_frontends import ProcessFrontends

                frontends = ProcessFrontends(server, settings, access, server_log, store, claims, *apart, member)
                reloads.append(frontends.reload)
        except (OSError, RuntimeError, ValueError) as error:
            print_error(f"cannot serve: {error}")
            await _stop_while_loading(server, loading, settings.exit_timeout_s)
            return 1
        gc.freeze()  # collections then skip the imported objects
        gc.enable()
        is_over = await _ends_before(loading, stop)
    if not is_over:
        _announce_stop(member)
        return await _stop_while_loading(server, loading, settings.exit_timeout_s)
    if not await _has_loaded(loading, settings.flag_model):
        return 1
    if not await _listens(frontends, server, store, settings.exit_timeout_s):
        return 1
    _announce(server, frontends, settings, ready_descriptor)
    await stop.wait()
    _announce_stop(member)
    return await _drain(server, frontends, store, settings.exit_timeout_s)


def _announce_stop(member: ClusterMember | None) -> None:
    if member is not None:
        member.on_stopping()


async def _has_loaded(loading: asyncio.Future[None], flag_model: str) -> bool:
    """Whether a finished load succeeded. Prints why not."""
    try:
        await loading
    except TritonError as error:
        print(f"error: creating server: {error.code.value} - {error.message}", file=sys.stderr)  # as Triton's main
        if isinstance(error, StartupError):
            print_error(f"\n{failure_summary(reasons_with_flags(error.reasons, flag_model))}")
        return False
    return True


async def _listens(frontends: Frontends, server: InferenceServer, store: ResponseStore, timeout_s: float) -> bool:
    """Starts the store and the frontends; stops the server if that fails."""
    try:
        await store.start()
        await frontends.start()
    except (OSError, RuntimeError, StoreError) as error:
        log.error("cannot serve: %s" if isinstance(error, StoreError) else "cannot listen: %s", error)
        try:
            await in_thread(server.stop, timeout_s)
        except RuntimeError:  # no thread can be started
            exit_now(1)
        return False
    return True


def _announce(
    server: InferenceServer, frontends: Frontends, settings: ServerSettings, ready_descriptor: int | None
) -> None:
    """Reports readiness in the log, on the terminal, and to the parent process."""
    from .terminal import announce

    log_endpoints(frontends, settings)
    urls = urls_of(frontends, settings)
    announce(server, page_url(urls, settings) | urls, process_age_s(), settings.is_on_one_port)
    report_ready(ready_descriptor, urls)
    with contextlib.suppress(RuntimeError):  # if no thread can be started, the server works without it
        in_thread(give_back_freed_memory)
    http, grpc = settings.http.address_or_none, settings.grpc.address_or_none
    if warning := exposure(settings.access, http_address=http, grpc_address=grpc):
        log.warning("%s", warning)
    if settings.protocols.allow_fault_injection:
        log.warning("--allow-fault-injection: operators may kill engines; never set it on a shared server")


def _open_storage(settings: ServerSettings) -> Storage:
    """Raises ValueError."""
    try:
        return settings.store.open_storage()
    except StoreError as error:
        raise ValueError(f"--response-store: {error}.") from error


def _claim_ports(settings: ServerSettings) -> ClaimedPorts:
    """Raises OSError."""
    http, grpc = settings.http, replace(settings.grpc, reuse_port=settings.protocols.grpc_reuse_port)
    if settings.host_folder is not None:  # the launcher has the clients' ports
        http, grpc = replace(http, enabled=False), replace(grpc, enabled=False)
    try:
        return ClaimedPorts.claim(
            http=http, metrics=settings.metrics, grpc=grpc, for_processes=settings.frontend_processes > 1
        )
    except OSError as error:
        if isinstance(error, PortTakenError):  # in Triton's words as well
            text = "failed to start %s service: Unavailable - Socket '%s' already in use"
            log.error(text, error.service, error.socket)
        text = f"cannot listen: {error}. Stop the process that uses the port, or choose another port."
        raise OSError(text) from error


def _host_folder(settings: ServerSettings) -> tuple[HostFolder, SharedCounts] | None:
    """None for a host without frontend processes. Raises OSError."""
    if settings.frontend_processes == 1 and settings.host_folder is None:
        return None
    from .frontend_settings import open_host_folder

    return open_host_folder(settings)


def _access_control(settings: AccessSettings, apart: tuple[HostFolder, SharedCounts] | None) -> AccessControl:
    """Raises OSError or ValueError."""
    if apart is None:
        return AccessControl(settings)
    folder, shared = apart
    return AccessControl(settings.without_tls(), shared, folder.metrics)


def reasons_with_flags(reasons: Mapping[str, str], flag_model: str) -> dict[str, str]:
    """The reasons; the one for the model of `--model` names flags rather than engine arguments."""
    return {name: as_flags(reason) if name == flag_model else reason for name, reason in reasons.items()}


async def _ends_before(loading: asyncio.Future[None], stop: asyncio.Event) -> bool:
    """Waits for the end of loading or a signal. Returns True if loading ended first."""
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait((loading, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    return loading.done()


async def _stop_while_loading(server: InferenceServer, loading: asyncio.Future[None], timeout_s: float) -> int:
    """Stops a server that does not serve yet. Kills the engines of loads that do not end within LOAD_GRACE_S."""
    log.info("stopping while models are loading")
    stopping = in_thread(server.stop, timeout_s)
    await asyncio.wait((stopping, loading), timeout=LOAD_GRACE_S, return_when=asyncio.ALL_COMPLETED)
    if not stopping.done():
        log.warning("killing the engines that are still loading")
        kill_children()
    if not await stopping:
        exit_now(1)
    with contextlib.suppress(TritonError):  # the server is stopping
        await loading
    log.info("server stopped")
    return 0


async def _drain(server: InferenceServer, frontends: Frontends, store: ResponseStore, timeout_s: float) -> int:
    """Refuses new work, waits for running requests, unloads models, closes the ports. Does not wait for background
    responses in a persistent store: the next server continues them."""
    log.info("shutting down: waiting up to %g s for running requests", timeout_s)
    await frontends.leave()
    stopping = in_thread(server.stop, timeout_s)
    await store.suspend()
    is_clean = await stopping
    await frontends.stop(grace_s=CLOSE_GRACE_S)
    await store.close()
    if not is_clean:
        log.error("server stopped before all of its work was finished")
        exit_now(1)
    log.info("server stopped")
    return 0
