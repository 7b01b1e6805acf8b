"""The `llmbackend` command: flags in, one frozen settings object out.

For: people and process managers. Does not know: how anything is served; `server/` and `bench.py` do. The flags of
`serve` are in the modules named `…_flags`. Invariant: a wrong flag ends with a message that names it and exit code 1.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from llmbackend import __version__

from ..server.settings import ServerSettings, check_port_collision
from .access_flags import AccessFlags
from .engine_flags import EngineFlags
from .flag_groups import takes_flag_groups, warn
from .inert_flags import InertFlags
from .limit_flags import LimitFlags
from .observability_flags import LogFlags, MetricsConfigFlags, TraceFlags
from .protocol_flags import CorsFlags, GrpcFlags, HttpFlags, MetricsFlags, ProtocolFlags, SharedMemoryFlags
from .server_flags import ModelFlags, SchedulingFlags, ServerFlags, server_options
from .store_flags import StoreFlags

app = typer.Typer(
    help="Serve large language models the Triton way.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"llmbackend {__version__}")
        raise typer.Exit


@app.command()
@takes_flag_groups
def serve(
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
        limits=limits.limits(),
        store=store.settings(),
        access=access_settings,
        protocols=replace(protocols.options(), cors=cors.options(), http_metrics=metrics.allow_metrics),
        flag_model="" if single is None else single.served_name,
    )
    raise typer.Exit(run_server(settings))


@app.command()
def bench(
    model: Annotated[str, typer.Option(help="Checkpoint directory, hub id, or mock.")],
    workload: Annotated[
        Path,
        typer.Option(help='JSON list of {"prompt_token_ids": [...] or "prompt_tokens": n, "output_tokens": n}.'),
    ],
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    load_format: Annotated[str, typer.Option(help="safetensors, or dummy for random weights.")] = "safetensors",
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests in one step.")] = 64,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Token budget of a step.")] = 512,
    quantization: Annotated[str | None, typer.Option(help="int8, or none by default.")] = None,
    engine_args: Annotated[str, typer.Option(help='Further engine arguments, as JSON: {"num_threads": 1}.')] = "{}",
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Run again with each optimisation turned off in turn.")
    ] = False,
) -> None:
    """Run a workload through the engine alone, all requests at once, end-of-sequence ignored."""
    from .bench import run_bench

    try:
        run_bench(
            model=model,
            workload_path=workload,
            json_path=json_path,
            dtype=dtype,
            device=device,
            load_format=load_format,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            quantization=quantization,
            ablate=ablate,
            **_json_object(engine_args),
        )
    except (ValueError, RuntimeError, OSError) as error:
        typer.echo(f"bench: {error}", err=True)
        raise typer.Exit(1) from error


@app.command(name="install-triton-backend")
def install_triton_backend(
    directory: Annotated[Path, typer.Argument(help="Triton's --backend-directory.", show_default=False)],
    name: Annotated[str, typer.Option(help='The backend\'s name there; vllm serves backend: "vllm".')] = "llm",
    engine_python: Annotated[
        str, typer.Option(help="The Python that runs engines (torch, transformers); by default this one.")
    ] = "",
) -> None:
    """Put the `llm` backend into NVIDIA's own server, as a python-based backend (docs/inside_triton.md)."""
    from ..adapter.inside_triton.install import install

    try:
        target = install(directory, name, engine_python)
    except (OSError, LookupError) as error:
        typer.echo(f"install-triton-backend: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"installed in {target}")


def _json_object(text: str) -> dict[str, Any]:
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError(f"--engine-args is {text}, expected a JSON object")
    return values


def main() -> None:
    """Entry point of the `llmbackend` command. As Triton, it ends with exit code 1 when its command line is wrong."""
    try:
        sys.exit(app(prog_name="llmbackend", args=sys.argv[1:], standalone_mode=False))
    except typer.TyperException as error:
        typer.echo(_wrong_usage(error), err=True)
        sys.exit(1)


def _wrong_usage(error: typer.TyperException) -> str:
    """How the command is used, and at the bottom, where it is seen, what was wrong; in Triton's words."""
    context = getattr(error, "ctx", None)
    usage = f"{context.get_usage()}\n\n" if context is not None else ""
    if not isinstance(error, typer.BadParameter):
        return f"{usage}{error.format_message()}"
    option = error.param_hint or (error.param.opts[0] if error.param is not None else "")
    if not option:
        return f"{usage}{error.message}"
    message = error.message if str(option) in error.message else f"{option}: {error.message}"
    return f'{usage}Bad option: "{option}".\n{message}'


if __name__ == "__main__":
    main()
