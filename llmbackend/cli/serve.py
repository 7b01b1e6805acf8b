"""`llmbackend serve`: its flags in, one frozen settings object out.

For: the `llmbackend` command. Does not know: how anything is served; `server/` does. The flags are in the modules named
`…_flags`. Invariant: what is wrong with the flags is said before a model is looked at.
"""

from __future__ import annotations

from dataclasses import replace

import typer

from llmbackend.server.ports import check_port_collision

from ..server.settings import ServerSettings
from .cluster import ClusterFlags
from .command_line import PlainHelpCommand, takes_flag_groups, warn
from .flags.clients import AccessFlags, LimitFlags, StoreFlags
from .flags.endpoints import CorsFlags, GrpcFlags, HttpFlags, MetricsFlags, PageFlags, ProtocolFlags, SharedMemoryFlags
from .flags.engine import EngineFlags
from .flags.given import given_flags
from .flags.inert import InertFlags
from .flags.models import ModelFlags, SchedulingFlags, ServerFlags, server_options
from .flags.observability import LogFlags, MetricsConfigFlags, TraceFlags

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(cls=PlainHelpCommand)
@takes_flag_groups
def serve(
    context: typer.Context,
    models: ModelFlags,
    engine: EngineFlags,
    server: ServerFlags,
    scheduling: SchedulingFlags,
    http: HttpFlags,
    grpc: GrpcFlags,
    metrics: MetricsFlags,
    metrics_config: MetricsConfigFlags,
    shared_memory: SharedMemoryFlags,
    access: AccessFlags,
    limits: LimitFlags,
    store: StoreFlags,
    log: LogFlags,
    trace: TraceFlags,
    protocols: ProtocolFlags,
    cors: CorsFlags,
    pages: PageFlags,
    cluster: ClusterFlags,
    inert: InertFlags,
) -> None:
    """Serve models over KServe v2 HTTP and gRPC, generate/SSE and the OpenAI API."""
    access_settings = access.settings()  # removes keys from the environment before child processes inherit it
    from ..server.serve import run_server

    endpoints = {"HTTP": http.endpoint(), "GRPC": grpc.endpoint(), "metrics": metrics.endpoint(http.http_address)}
    try:
        check_port_collision(endpoints)
    except ValueError as error:
        raise typer.TyperException(str(error)) from None
    for text in (*models.warnings(), *engine.warnings(), *inert.warnings()):
        warn(text)
    single = engine.model(models.model, models.model_name)
    allow_client_shm = shared_memory.allowed(http.endpoint(), grpc.endpoint())
    options = server_options(models, single, server, metrics_config.options(), allow_client_shm)
    settings = ServerSettings(
        log=log.settings(),
        options=replace(scheduling.applied_to(options), trace=trace.settings()),
        http=endpoints["HTTP"],
        grpc=endpoints["GRPC"],
        metrics=endpoints["metrics"],
        http_max_input_size_bytes=http.http_max_input_size,
        openai_max_input_size_bytes=http.openai_max_input_size,
        exit_timeout_s=server.exit_timeout_secs,
        frontend_processes=server.frontend_processes,
        limits=limits.limits(),
        store=store.settings(),
        access=access_settings,
        protocols=replace(
            protocols.options(),
            cors=cors.options(),
            allowed_hosts=cors.hosts(pages.pages_host or ()),
            http_metrics=metrics.allow_metrics,
        ),
        flags=given_flags(context),
        pages=pages.settings(),
        flag_model="" if single is None else single.served_name,
    )
    if (cluster_settings := cluster.settings()) is not None:
        from ..cluster.launcher import run_cluster_server

        raise typer.Exit(run_cluster_server(settings, cluster_settings))
    raise typer.Exit(run_server(settings))
