"""`llmbackend serve --cluster`: runs this machine's Ray node, agent, host and frontends, and drains them on a signal.

Used by the command line. Independent of models, protocols and Ray's API. Invariants: processes that die are restarted,
with increasing pauses if they die soon; if the first start fails, the command ends with the reason; SIGTERM or SIGINT
begins one drain, a second signal ends everything immediately; nothing that the command started outlives it, except
after SIGKILL: the next launcher with the same run folder then takes over the node.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import platform
import signal
import socket
import sys
import uuid
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Final

import msgspec

from llmbackend import __version__
from llmbackend.core.server_log import ServerLog
from llmbackend.fork_server.process_resources import OwnedFolder, remove_abandoned
from llmbackend.links.secrets import ClusterSecrets
from llmbackend.server.frontend_processes import FrontendProcesses, FrontendsFailedError
from llmbackend.server.frontend_settings import open_host_folder
from llmbackend.server.ports import ClaimedPorts, port_of
from llmbackend.server.process import in_thread, reload_on_hangup, report_ready, stop_on_signal, take_ready_descriptor
from llmbackend.server.process_frontends import frontend_settings_of
from llmbackend.server.settings import ServerSettings
from llmbackend.server.start_failure import print_error
from llmbackend.server.terminal import log_endpoints, page_url, show_urls, urls_of

from .host_process import HostOrder
from .messages import AgentNews, AgentOrder, HostAddress, Versions
from .processes import Child, end_engines
from .ray_node import RayNode, require_ray
from .secrets_folder import SecretsFolder
from .settings import AUTO, LOOPBACK, ClusterError, ClusterSettings


class MachineFrontends:
    """This machine's ports and the frontend processes on them. Created on the event loop."""

    metrics_port: int | None = None
    """The host has the metrics port."""

    def __init__(self, settings: ServerSettings, folder: Path, keys: ClusterSecrets) -> None:
        """folder: used only by this launcher, created if missing. keys: for links to hosts on other machines. Raises
        OSError that names a port in use by another process."""
        folder.mkdir(mode=0o700, exist_ok=True)
        self.host_settings = replace(settings, host_folder=folder)
        self._claims = claims = ClaimedPorts.claim(
            http=settings.http,
            metrics=replace(settings.metrics, enabled=False),
            grpc=replace(settings.grpc, reuse_port=settings.protocols.grpc_reuse_port),
            for_processes=True,
        )
        self.http_port, self.grpc_port = port_of(claims.http), port_of(claims.grpc)
        shared_folder, self._counts = open_host_folder(self.host_settings)
        orders = frontend_settings_of(settings, shared_folder, self._claims, keys=keys)
        self.processes = FrontendProcesses(orders, self._counts.forget)

    async def stop(self, grace_s: float) -> None:
        """Refuses new requests and lets running ones finish for `grace_s` seconds. To be called once."""
        await self.processes.stop(grace_s)
        self._claims.close()
        self._counts.close()


log = logging.getLogger(__name__)

AGENT_START_S: Final = 60.0
AGENT_END_S: Final = 15.0
HOST_END_S: Final = 15.0
"""Time added to the exit timeout of its requests."""
NODE_CHECK_S: Final = 1.0


def run_cluster_server(settings: ServerSettings, cluster: ClusterSettings) -> int:
    """Serves until a signal; returns the process's exit code."""
    try:
        require_ray()
        secrets = (
            SecretsFolder.open_or_create(cluster.secrets)
            if cluster.address == AUTO
            else SecretsFolder.open(cluster.secrets)
        )
        ServerLog(settings.log).install()
        launcher = _Launcher(settings, cluster, secrets, RayNode(cluster, secrets))
    except (ClusterError, OSError) as error:
        print_error(f"--cluster: {error}")
        return 1
    return asyncio.run(launcher.run())


def own_versions() -> Versions:
    return Versions(llmbackend=__version__, python=platform.python_version(), ray=version("ray"))


class _Launcher:
    def __init__(
        self, settings: ServerSettings, cluster: ClusterSettings, secrets: SecretsFolder, node: RayNode
    ) -> None:
        """Raises OSError if the run folder cannot be written."""
        self._settings = settings
        self._cluster = cluster
        self._secrets = secrets
        self._node = node
        self._host_id = f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
        self._is_serving = False
        remove_abandoned("host", cluster.run_folder)
        self._owned = OwnedFolder("host", cluster.run_folder)
        self._folder = self._owned.path

    async def run(self) -> int:
        ready_descriptor, stop = take_ready_descriptor(), stop_on_signal()
        self._agent = Child("the cluster's agent", self._command("agent"), self._agent_order, self._node.environment)
        self._host = Child("the host", self._command("host_process"), self._host_order, os.environ)
        try:
            self._frontends = MachineFrontends(self._settings, self._folder, self._secrets.curve_keys)
        except (OSError, ValueError) as error:
            print_error(f"cannot listen: {error}. Stop the process that uses the port, or choose another port.")
            self._owned.remove()
            return 1
        reload_on_hangup(stop, (self._reload,))
        stopped = asyncio.create_task(stop.wait())
        starting = asyncio.create_task(self._start())
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return await self._stop()
        if problem := starting.result():
            if problem != _HOST_FAILED:
                print_error(f"--cluster: {problem}")
            return await self._stop() or self._host.exit_code or 1
        self._is_serving = True
        report_ready(ready_descriptor, self._urls)
        watching = asyncio.create_task(self._keep_node())
        await stopped
        watching.cancel()
        return await self._stop()

    async def _start(self) -> str:
        """Returns why this machine does not serve; "" = it serves."""
        try:
            log.info("looking for the cluster's Ray node on this machine (%s)", self._cluster.address)
            await in_thread(self._node.ensure)
        except (ClusterError, OSError) as error:
            return str(error)
        log.info("Ray's node is running; the cluster's head is %s%s", self._node.address, self._how_to_join())
        try:
            news = await asyncio.wait_for(self._agent.start(), AGENT_START_S)
        except TimeoutError:
            return f"the agent of this machine has not joined within {AGENT_START_S:.0f} s"
        if not news:
            return "the agent of this machine exited before it had joined"
        if refusal := msgspec.json.decode(news, type=AgentNews).error:
            return refusal
        self._frontends.processes.start()
        ready = await self._host.start()
        if not ready:
            return _HOST_FAILED
        try:
            await self._frontends.processes.serve()
        except FrontendsFailedError as error:
            return str(error)
        log_endpoints(self._frontends, self._settings)
        urls = urls_of(self._frontends, self._settings)
        show_urls(page_url(urls, self._settings) | urls)
        self._urls: dict[str, str] = urls | json.loads(ready)
        return ""

    def _reload(self) -> None:
        self._host.signal(signal.SIGHUP)
        self._frontends.processes.reload()

    def _how_to_join(self) -> str:
        if self._cluster.bind == LOOPBACK:
            return ", for this machine alone (other machines can join with --cluster-bind ADDRESS here)"
        return f"; other machines join with --cluster {self._node.address}"

    def _command(self, module: str) -> list[str]:
        return [sys.executable, "-m", f"{__package__}.{module}"]

    def _agent_order(self) -> bytes:
        order = AgentOrder(
            socket=str(self._agent_socket),
            address=self._node.address,
            bind=self._cluster.bind,
            host=HostAddress(id=self._host_id, endpoint=""),
            versions=own_versions(),
            key_name=self._secrets.key_name,
        )
        return msgspec.json.encode(order) + b"\n"

    def _host_order(self) -> bytes:
        settings, secrets = self._frontends.host_settings, self._secrets.path.resolve()
        return pickle.dumps(HostOrder(settings, self._agent_socket, secrets, self._host_id, self._cluster.bind))

    @property
    def _agent_socket(self) -> Path:
        return self._folder / "agent.sock"

    async def _keep_node(self) -> None:
        """Restarts the node when it ends. Engines outlive it; their restarted actors find them."""
        while True:
            await asyncio.sleep(NODE_CHECK_S)
            if self._node.is_running():
                continue
            log.error("Ray's node of this machine has exited; restarting it. Engines and streams continue")
            try:
                await in_thread(self._node.ensure)
            except (ClusterError, OSError) as error:
                log.error("%s", error)

    async def _stop(self) -> int:
        """Drains requests, releases the engines, then ends the node with its remaining engines."""
        log.info("leaving the cluster")
        await self._frontends.stop(self._settings.exit_timeout_s if self._is_serving else 0)
        code = await self._host.stop(self._settings.exit_timeout_s + HOST_END_S)
        await self._agent.stop(AGENT_END_S)
        if self._node.pid:
            await in_thread(self._node.end)
            await in_thread(end_engines, self._cluster.run_folder)
        self._owned.remove()
        log.info("left the cluster")
        return code


_HOST_FAILED: Final = "see the host's log"
