"""The `llmbackend` command: flags in, one frozen settings object out.

For: people and process managers. Does not know: how anything is served; `serve.py` and `bench.py` do. Invariant:
flags have Triton's names and defaults where Triton has them, and a wrong one ends with a message that names it and
exit code 2 or 1.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from llmbackend import __version__
from llmbackend.core.messages import ServerOptions

from .settings import Endpoint, LogSettings, ServerSettings

app = typer.Typer(
    help="Serve large language models the Triton way.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _boolean(text: str | bool) -> bool:
    """Triton's flags take a value: `--allow-http=false`."""
    if isinstance(text, bool):
        return text
    values = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}
    try:
        return values[text.lower()]
    except KeyError:
        raise typer.BadParameter(f"'{text}' is not a boolean, expected true or false") from None


def _flag(name: str, help_text: str) -> Any:
    return typer.Option(name, parser=_boolean, metavar="BOOL", help=help_text)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"llmbackend {__version__}")
        raise typer.Exit


@app.command()
def serve(
    model_repository: Annotated[
        list[Path] | None,
        typer.Option("--model-repository", "--model-store", help="Directory of models; repeatable."),
    ] = None,
    model: Annotated[
        str, typer.Option(help="Serve one checkpoint directory or hub id, with no repository (see --model-name).")
    ] = "",
    model_name: Annotated[str, typer.Option(help="The name that --model is served as; default: its last part.")] = "",
    dtype: Annotated[str, typer.Option(help="For --model: auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="For --model: cpu, cuda or cuda:N.")] = "cpu",
    max_model_len: Annotated[int, typer.Option(help="For --model: context limit in tokens; 0 = the model's.")] = 0,
    server_id: Annotated[str, typer.Option("--id", help="The server's name in its metadata.")] = "triton",
    model_control_mode: Annotated[str, typer.Option(help="none or explicit.")] = "none",
    load_model: Annotated[
        list[str] | None,
        typer.Option("--load-model", help="Model to load at start in explicit mode; repeatable, or *."),
    ] = None,
    model_load_thread_count: Annotated[int, typer.Option(min=1, help="Models loaded at once.")] = 4,
    model_load_retry_count: Annotated[int, typer.Option(min=0, help="Retries of a failed load.")] = 0,
    disable_auto_complete_config: Annotated[
        bool, typer.Option("--disable-auto-complete-config", help="Backends may not complete config.pbtxt.")
    ] = False,
    backend_directory: Annotated[Path | None, typer.Option(help="Where <name>/ directories of backends are.")] = None,
    backend_config: Annotated[
        list[str] | None, typer.Option("--backend-config", help="<backend>,<key>=<value> or <key>=<value>; repeatable.")
    ] = None,
    allow_http: Annotated[Any, _flag("--allow-http", "Serve HTTP: KServe v2, generate, OpenAI.")] = True,
    http_address: Annotated[str, typer.Option(help="Address of HTTP.")] = "0.0.0.0",
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of HTTP; 0 picks a free one.")] = 8000,
    http_max_input_size: Annotated[int, typer.Option(min=1, help="Largest request body, bytes.")] = 64 << 20,
    allow_grpc: Annotated[Any, _flag("--allow-grpc", "Serve gRPC.")] = True,
    grpc_address: Annotated[str, typer.Option(help="Address of gRPC.")] = "0.0.0.0",
    grpc_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of gRPC; 0 picks a free one.")] = 8001,
    allow_metrics: Annotated[Any, _flag("--allow-metrics", "Serve Prometheus metrics.")] = True,
    metrics_address: Annotated[str, typer.Option(help="Address of metrics; default: that of HTTP.")] = "",
    metrics_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of metrics; 0 picks a free one.")] = 8002,
    exit_timeout_secs: Annotated[int, typer.Option(min=0, help="Seconds that running requests get at shutdown.")] = 30,
    exit_on_error: Annotated[Any, _flag("--exit-on-error", "Exit when a startup model fails.")] = True,
    strict_readiness: Annotated[Any, _flag("--strict-readiness", "Ready only if every model is.")] = True,
    log_verbose: Annotated[int, typer.Option(min=0, help="Debug lines from 1 on.")] = 0,
    log_info: Annotated[Any, _flag("--log-info", "Log information.")] = True,
    log_warning: Annotated[Any, _flag("--log-warning", "Log warnings.")] = True,
    log_error: Annotated[Any, _flag("--log-error", "Log errors.")] = True,
    log_format: Annotated[str, typer.Option(help="default or ISO8601.")] = "default",
) -> None:
    """Serve models over KServe v2 HTTP and gRPC, generate/SSE and the OpenAI API."""
    from .serve import run_server, single_model_repository

    _one_of("--log-format", log_format, ("default", "ISO8601"))
    _one_of("--model-control-mode", model_control_mode, ("none", "explicit"))
    repositories = _existing(model_repository or [])
    if model:
        repositories.append(single_model_repository(model, model_name, dtype, device, max_model_len))
    if not repositories:
        raise typer.BadParameter("give --model-repository DIR, or --model DIR for a single checkpoint")
    options = ServerOptions(
        model_repositories=tuple(repositories),
        server_id=server_id,
        model_control_mode=model_control_mode,  # type: ignore[arg-type]  # checked above
        startup_models=tuple(load_model or ()),
        backend_directory=backend_directory,
        backend_config=_backend_config(backend_config or []),
        strict_readiness=strict_readiness,
        exit_on_error=exit_on_error,
        model_load_thread_count=model_load_thread_count,
        model_load_retry_count=model_load_retry_count,
        auto_complete_config=not disable_auto_complete_config,
    )
    settings = ServerSettings(
        options=options,
        http=Endpoint(address=http_address, port=http_port, enabled=allow_http),
        grpc=Endpoint(address=grpc_address, port=grpc_port, enabled=allow_grpc),
        metrics=Endpoint(address=metrics_address or http_address, port=metrics_port, enabled=allow_metrics),
        http_max_input_size_bytes=http_max_input_size,
        exit_timeout_s=exit_timeout_secs,
        log=LogSettings(
            verbose=log_verbose,
            info=log_info,
            warning=log_warning,
            error=log_error,
            format=log_format,  # type: ignore[arg-type]  # checked above
        ),
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
        )
    except (ValueError, RuntimeError, OSError) as error:
        typer.echo(f"bench: {error}", err=True)
        raise typer.Exit(1) from error


def _existing(directories: list[Path]) -> list[Path]:
    for directory in directories:
        if not directory.is_dir():
            raise typer.BadParameter(f"--model-repository '{directory}' is not a directory")
    return list(directories)


def _one_of(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise typer.BadParameter(f"{flag} is '{value}', expected one of {', '.join(allowed)}")


def _backend_config(items: list[str]) -> dict[str, dict[str, str]]:
    """`<backend>,<key>=<value>` or `<key>=<value>` (for every backend: key "")."""
    config: dict[str, dict[str, str]] = {}
    for item in items:
        backend, comma, setting = item.partition(",")
        if not comma:
            backend, setting = "", item
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"--backend-config '{item}', expected <backend>,<key>=<value> or <key>=<value>")
        config.setdefault(backend, {})[key] = value
    return config


def main() -> None:
    """Entry point of the `llmbackend` command."""
    app(prog_name="llmbackend", args=sys.argv[1:])


if __name__ == "__main__":
    main()
