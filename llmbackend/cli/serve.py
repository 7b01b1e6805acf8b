"""`llmbackend serve`: builds the server's settings from the flags in `flags/`. Invalid flags are refused before any
model is read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import typer

from llmbackend.core.server_log import LogSettings
from llmbackend.frontends.protocol_options import ProtocolOptions
from llmbackend.server.ports import Endpoint, check_port_collision

from ..server.settings import ServerSettings, SingleModel
from .cluster import ClusterFlags
from .command_line import PlainHelpCommand, takes_flag_groups, warn
from .flags import vllm_environment
from .flags.clients import AccessFlags, LimitFlags, StoreFlags
from .flags.endpoints import CorsFlags, GrpcFlags, HttpFlags, MetricsFlags, PageFlags, ProtocolFlags, SharedMemoryFlags
from .flags.engine import EngineFlags
from .flags.given import given_flags
from .flags.inert import InertFlags
from .flags.models import ModelFlags, SchedulingFlags, ServerFlags, server_options
from .flags.observability import LogFlags, MetricsConfigFlags, TraceFlags
from .flags.vllm import VllmServerFlags
from .vllm_notation import in_plain_notation

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class _ServeCommand(PlainHelpCommand):
    """Also accepts vLLM's notation."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            args = in_plain_notation(args, self.get_params(ctx))
        return super().parse_args(ctx, args)


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


@app.command(cls=_ServeCommand)
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
    vllm: VllmServerFlags,
    inert: InertFlags,
) -> None:
    """Serve models over KServe v2 HTTP and gRPC, generate/SSE and the OpenAI API."""
    access_settings = access.settings()  # removes keys from the environment before child processes inherit it
    from ..server.serve import run_server

    for text in (*models.warnings(), *engine.warnings(), *inert.warnings(), *vllm_environment.warnings(os.environ)):
        warn(text)
    endpoints = vllm.endpoints(http, grpc, metrics, bool(models.model_tag), partial(_is_given, context))
    _check_endpoints(endpoints)
    if server.frontend_processes > 1 or cluster.cluster is not None:
        vllm.check_one_process()
    single = _single_model(models, engine, vllm)
    allow_client_shm = shared_memory.allowed(endpoints["HTTP"], endpoints["GRPC"])
    options = server_options(models, single, server, metrics_config.options(), allow_client_shm)
    settings = ServerSettings(
        log=_log_settings(context, log),
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
        protocols=_protocol_options(protocols, vllm, cors, pages, metrics),
        flags=given_flags(context),
        pages=pages.settings(),
        flag_model="" if single is None else single.name,
        is_on_one_port=vllm.is_on_one_port(bool(models.model_tag)),
    )
    if (cluster_settings := cluster.settings()) is not None:
        from ..cluster.launcher import run_cluster_server

        raise typer.Exit(run_cluster_server(settings, cluster_settings))
    raise typer.Exit(run_server(settings))


def _log_settings(context: typer.Context, log: LogFlags) -> LogSettings:
    of_level = ("log_level", "log_verbose", "log_info", "log_warning", "log_error")
    if not any(_is_given(context, name) for name in of_level):
        log = replace(log, log_level=vllm_environment.log_level(os.environ))
    return log.settings()


def _check_endpoints(endpoints: Mapping[str, Endpoint]) -> None:
    try:
        check_port_collision(endpoints)
    except ValueError as error:
        raise typer.TyperException(str(error)) from None


def _single_model(models: ModelFlags, engine: EngineFlags, vllm: VllmServerFlags) -> SingleModel | None:
    """The model of the command line, fetched if it is not on this machine."""
    checkpoint = models.checkpoint
    if checkpoint:
        engine = engine.with_defaults(vllm_environment.engine_arguments(os.environ))
        checkpoint, engine = vllm.fetched(checkpoint, engine)
    return engine.model(checkpoint, models.names)


def _protocol_options(
    protocols: ProtocolFlags, vllm: VllmServerFlags, cors: CorsFlags, pages: PageFlags, metrics: MetricsFlags
) -> ProtocolOptions:
    return replace(
        vllm.applied_to(protocols.options()),
        cors=cors.options(),
        allowed_hosts=cors.hosts(pages.pages_host or ()),
        http_metrics=metrics.allow_metrics,
    )
